#include "cli/output.h"

#include "base/build.h"
#include "base/check.h"
#include "base/grow.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TYPED_COLUMNS = 12 }; /* enough for all tables of results; later cells are text */

struct td_table_line {
    char *text; /* cells between tabs */
    td_cell cells[TYPED_COLUMNS];
};

/* ---- tables ---- */

/** Reads the arguments as printf would. Stops at a conversion that tables of results do not use. */
static void take_values(const char *format, va_list args, td_cell cells[TYPED_COLUMNS])
{
    const char *start = format; /* of the cell */
    int column = 0;

    for (const char *at = format; *at && column < TYPED_COLUMNS; at++) {
        td_cell value = {.kind = TD_CELL_TEXT};
        if (*at == '\t') {
            start = at + 1;
            column++;
        }
        if (*at != '%' || *++at == '%')
            continue;
        const char *const first = at - 1;
        at += strspn(at, ".0123456789");
        if (*at == 's')
            (void)va_arg(args, const char *);
        else if (strncmp(at, PRId64, strlen(PRId64)) == 0)
            value = (td_cell){.kind = TD_CELL_WHOLE, .whole = va_arg(args, int64_t)};
        else if (strchr("efg", *at))
            value = (td_cell){.kind = TD_CELL_REAL, .real = va_arg(args, double)};
        else
            return;
        at += value.kind == TD_CELL_WHOLE ? strlen(PRId64) - 1 : 0;
        if (first == start && (at[1] == '\t' || at[1] == '\0'))
            cells[column] = value;
    }
}

static td_status add_line(td_table *table, const char *format, va_list args)
{
    td_status status = TD_OK;
    va_list again;

    TD_FAIL_IF(!td_grow(&table->lines, table->count, &table->capacity, 16, sizeof *table->lines),
               TD_NO_MEMORY, "no memory for a table of %" PRId64 " rows", table->count + 1);
    td_table_line *line = &table->lines[table->count];
    *line = (td_table_line){.text = NULL};
    va_copy(again, args);
    take_values(format, again, line->cells);
    va_end(again);
    TD_FAIL_IF(vasprintf(&line->text, format, args) < 0, TD_NO_MEMORY, "no memory for a row of a table");
    table->count++;
cleanup:
    return status;
}

void td_table_row(td_table *table, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    if (table->status == TD_OK)
        table->status = add_line(table, format, args);
    va_end(args);
}

td_status td_table_end(td_table *table, td_status status, FILE *out)
{
    if (status == TD_OK)
        status = table->status;
    if (status == TD_OK && out)
        td_table_write(table, out);
    for (int64_t i = 0; i < table->count; i++)
        free(table->lines[i].text);
    free(table->lines);
    *table = (td_table){.count = 0};
    return status;
}

static const char *text_of(const td_table *table, int64_t row)
{
    return row == 0 ? table->heads : table->lines[row - 1].text;
}

/** Returns the length of cell `column` of a line; *start = its first character. */
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
    int width = 3; /* Markdown needs at least "---" under a head */

    for (int64_t i = 0; i <= table->count; i++) {
        int length = cell(text_of(table, i), column, &start);
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
    for (int64_t i = 0; i <= table->count && table->count > 0 && table->status == TD_OK; i++) {
        for (int column = 0; table->align[column]; column++) {
            const char *start;
            int length = cell(text_of(table, i), column, &start);
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
    if (table->count > 0 && table->status == TD_OK)
        putc('\n', out);
}

td_cell td_table_cell(const td_table *table, int64_t row, int column, char *text, size_t room)
{
    const char *start;
    const int length = cell(text_of(table, row), column, &start);

    snprintf(text, room, "%.*s", length, start);
    return row > 0 && column < TYPED_COLUMNS ? table->lines[row - 1].cells[column]
                                             : (td_cell){.kind = TD_CELL_TEXT};
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
    fputs("\r\033[K", stderr); /* go to the start of the line and clear it */
    vfprintf(stderr, format, args);
    va_end(args);
    fflush(stderr);
}

void td_progress_end(void)
{
    td_progress("%s", "");
}

/* ---- records ---- */

enum { PROCESSOR_TEXT = 8192 };

/** text = the section of /proc/cpuinfo about the first processor. */
static void read_processor(char text[PROCESSOR_TEXT])
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    const size_t length = file ? fread(text, 1, PROCESSOR_TEXT - 1, file) : 0;

    text[length] = '\0';
    char *next = strstr(text, "\n\n");
    if (next)
        next[1] = '\0';
    if (file)
        fclose(file);
}

/** The value of a line "name : value", up to its end; NULL without such a line. */
static const char *processor_line(const char *text, const char *name, int *length)
{
    const size_t bytes = strlen(name);

    for (; *text; text += strcspn(text, "\n"), text += *text == '\n') {
        const char *value = text + bytes;
        if (strncmp(text, name, bytes) != 0 || *(value += strspn(value, " \t")) != ':')
            continue;
        value += 1 + strspn(value + 1, " ");
        *length = (int)strcspn(value, "\n");
        return value;
    }
    return NULL;
}

static int usable_cores(void)
{
    cpu_set_t mine;

    CPU_ZERO(&mine);
    sched_getaffinity(0, sizeof mine, &mine);
    return CPU_COUNT(&mine);
}

const char *td_machine_name(const td_device *dev, char text[160])
{
    char processor[PROCESSOR_TEXT];
    int length = 0;

    if (td_device_kind_of(dev) != TD_DEVICE_CPU) {
        snprintf(text, 160, "%s", td_device_model(dev));
        return text;
    }
    read_processor(processor);
    const char *name = processor_line(processor, "model name", &length);
    snprintf(text, 160, "%.*s, %d threads", name ? length : 17, name ? name : "unknown processor",
             usable_cores());
    return text;
}

static bool has_word(const char *text, int length, const char *word)
{
    const int bytes = (int)strlen(word);

    for (int i = 0; i + bytes <= length; i++)
        if (memcmp(text + i, word, (size_t)bytes) == 0 && (i == 0 || text[i - 1] == ' ') &&
            (i + bytes == length || text[i + bytes] == ' '))
            return true;
    return false;
}

/** Sets the record's "host" to the processor, with the keys of parity/core/identity.py. */
static td_status set_host(td_record *record)
{
    static const char *const numbers[][2] = {
        {"cpu family", "host.family"}, {"model", "host.model"}, {"stepping", "host.stepping"}};
    static const char *const sets[] = {"avx2",        "avx512f",  "avx512_bf16",
                                       "avx512_fp16", "amx_bf16", "amx_fp16"};
    static const char *const limits[] = {"ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
                                         "ONEDNN_MAX_CPU_ISA"};
    td_status status = TD_OK;
    char processor[PROCESSOR_TEXT], text[160] = "unknown processor";
    FILE *file = NULL;
    int length;

    read_processor(processor);
    const char *value = processor_line(processor, "model name", &length);
    if (value)
        snprintf(text, sizeof text, "%.*s", length, value);
    TD_TRY(td_record_set_string(record, "host.name", text));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        value = processor_line(processor, numbers[i][0], &length);
        if (value)
            TD_TRY(td_record_set_integer(record, numbers[i][1], atoll(value)));
    }
    value = processor_line(processor, "flags", &length);
    text[0] = '\0';
    for (size_t i = 0; value && i < sizeof sets / sizeof sets[0]; i++)
        if (has_word(value, length, sets[i])) {
            const size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, "%s%s", used ? " " : "", sets[i]);
        }
    TD_TRY(td_record_set_string(record, "host.isa", text));
    TD_TRY(td_record_set_integer(record, "host.cores", usable_cores()));
    file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r");
    if (file && fgets(text, sizeof text, file) && strchr(text, 'K'))
        TD_TRY(td_record_set_number(record, "host.l3_mib", strtod(text, NULL) / 1024.0));
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        const char *limit = getenv(limits[i]);
        if (limit) {
            snprintf(text, sizeof text, "host.limits.%s", limits[i]);
            TD_TRY(td_record_set_string(record, text, limit));
        }
    }
cleanup:
    if (file)
        fclose(file);
    return status;
}

td_status td_output_record(const td_device *dev, const char *deliverable, const char *module, td_record **out)
{
    td_status status = TD_OK;
    const td_build *build = td_build_info();
    td_record *record = NULL;
    char machine[160];

    *out = NULL;
    TD_TRY(td_record_create(deliverable, module, "c", &record));
    if (dev) {
        TD_TRY(td_record_set_string(record, "machine", td_machine_name(dev, machine)));
        TD_TRY(set_host(record));
    }
    if (dev && td_device_kind_of(dev) == TD_DEVICE_CPU)
        TD_TRY(td_record_set_integer(record, "threads", td_cpu_threads()));
    else if (dev)
        TD_TRY(td_record_set_string(record, "device", "cuda"));
    TD_TRY(td_record_set_string(record, "build.version", build->version));
    TD_TRY(td_record_set_string(record, "build.commit", build->commit));
    TD_TRY(td_record_set_bool(record, "build.dirty", build->dirty));
    TD_TRY(td_record_set_string(record, "build.library", build->id));
    TD_TRY(td_record_set_string(record, "versions.tandem", build->version));
    TD_TRY(td_record_set_string(record, "versions.cc", build->compiler));
    *out = record;
    record = NULL;
cleanup:
    td_record_destroy(record);
    return status;
}
