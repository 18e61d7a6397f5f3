#include "cli/output.h"

#include "base/check.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct td_table {
    char *align;
    char **lines; /* heads, then rows; cells between tabs */
    int64_t count, capacity;
};

/* ---- tables ---- */

static td_status add_line(td_table *table, const char *format, va_list args)
{
    td_status status = TD_OK;

    if (table->count == table->capacity) {
        int64_t capacity = table->capacity > 0 ? 2 * table->capacity : 16;
        char **lines = realloc(table->lines, (size_t)capacity * sizeof *lines);
        if (!lines) {
            status = td_fail(TD_NO_MEMORY, "no memory for a table of %" PRId64 " rows", capacity);
            goto cleanup;
        }
        table->lines = lines;
        table->capacity = capacity;
    }
    if (vasprintf(&table->lines[table->count], format, args) < 0) {
        status = td_fail(TD_NO_MEMORY, "no memory for a row of a table");
        goto cleanup;
    }
    table->count++;
cleanup:
    return status;
}

td_status td_table_row(td_table *table, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    td_status status = add_line(table, format, args);
    va_end(args);
    return status;
}

td_status td_table_create(const char *align, const char *heads, td_table **out)
{
    td_status status = TD_OK;
    td_table *table = calloc(1, sizeof *table);

    *out = NULL;
    if (!table || !(table->align = strdup(align))) {
        status = td_fail(TD_NO_MEMORY, "no memory for a table");
        goto cleanup;
    }
    TD_TRY(td_table_row(table, "%s", heads));
    *out = table;
    table = NULL;
cleanup:
    td_table_destroy(table);
    return status;
}

void td_table_destroy(td_table *table)
{
    if (!table)
        return;
    for (int64_t i = 0; i < table->count; i++)
        free(table->lines[i]);
    free(table->lines);
    free(table->align);
    free(table);
}

/** The length of cell `column` of a line, and where it starts. */
static int cell(const char *line, int column, const char **start)
{
    for (; column > 0; column--) {
        line += strcspn(line, "\t");
        line += *line == '\t';
    }
    *start = line;
    return (int)strcspn(line, "\t");
}

static int column_width(const td_table *table, int column)
{
    const char *start;
    int width = 3; /* of the rule's "---" */

    for (int64_t i = 0; i < table->count; i++) {
        int length = cell(table->lines[i], column, &start);
        width = length > width ? length : width;
    }
    return width;
}

static void write_rule(const td_table *table, FILE *out)
{
    for (int column = 0; table->align[column]; column++) {
        fprintf(out, "| ");
        for (int i = column_width(table, column); i > 1; i--)
            putc('-', out);
        fprintf(out, "%s ", table->align[column] == 'r' ? ":" : "-");
    }
    fputs("|\n", out);
}

void td_table_write(const td_table *table, FILE *out)
{
    if (table->count == 1) /* heads alone */
        return;
    for (int64_t i = 0; i < table->count; i++) {
        for (int column = 0; table->align[column]; column++) {
            const char *start;
            int length = cell(table->lines[i], column, &start);
            int blanks = column_width(table, column) - length;
            if (table->align[column] == 'r')
                fprintf(out, "| %*s%.*s ", blanks, "", length, start);
            else
                fprintf(out, "| %.*s%*s ", length, start, blanks, "");
        }
        fputs("|\n", out);
        if (i == 0)
            write_rule(table, out);
    }
    putc('\n', out);
}

void td_table_print(const td_table *table)
{
    td_table_write(table, stdout);
}

const char *td_grouped(int64_t number, char text[32])
{
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%" PRId64, number);
    char *end = text;

    for (int i = 0; i < length; i++) {
        *end++ = digits[i];
        if (digits[i] != '-' && i + 1 < length && (length - 1 - i) % 3 == 0)
            *end++ = ',';
    }
    *end = '\0';
    return text;
}

/* ---- progress ---- */

void td_progress(const char *format, ...)
{
    va_list args;

    if (!isatty(STDERR_FILENO))
        return;
    va_start(args, format);
    fputs("\r\033[K", stderr); /* to the start of the line, and wipe it */
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

void td_progress_end(void)
{
    td_progress("%s", "");
}

/* ---- records ---- */

const char *td_machine_name(const td_device *dev, char text[160])
{
    char line[256], model[128] = "unknown processor";
    cpu_set_t mine;

    if (td_device_kind_of(dev) != TD_DEVICE_CPU) {
        snprintf(text, 160, "%s", td_device_model(dev));
        return text;
    }
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, "model name", 10) == 0 && strstr(line, ": ")) {
            snprintf(model, sizeof model, "%s", strstr(line, ": ") + 2);
            model[strcspn(model, "\n")] = '\0';
            break;
        }
    if (file)
        fclose(file);
    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof mine, &mine);
    snprintf(text, 160, "%s, %d threads", model, CPU_COUNT(&mine));
    return text;
}

td_status td_output_record(const td_device *dev, const char *deliverable, const char *module, td_record **out)
{
    td_status status = TD_OK;
    td_record *record = NULL;
    char machine[160];

    *out = NULL;
    TD_TRY(td_record_create(deliverable, module, "c", &record));
    TD_TRY(td_record_set_string(record, "machine", td_machine_name(dev, machine)));
    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        TD_TRY(td_record_set_integer(record, "threads", td_cpu_threads()));
    TD_TRY(td_record_set_string(record, "versions.tandem", TANDEM_VERSION));
    TD_TRY(td_record_set_string(record, "versions.cc", __VERSION__));
    *out = record;
    record = NULL;
cleanup:
    td_record_destroy(record);
    return status;
}
