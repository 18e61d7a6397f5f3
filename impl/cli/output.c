#include "cli/output.h"

#include "base/check.h"
#include "base/grow.h"
#include "base/utf8.h"

#include <ctype.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Enough for all tables of results; later cells are text. */
enum { TYPED_COLUMNS = 12, CELL_TEXT = 256 };

/** All digits of a cell's number; "" if its format is not a single conversion of a number. */
typedef char digits[32];

/* ---- rows as JSON ---- */

/** Reads the arguments as printf would. Stops at a conversion that tables of results do not use. */
static void take_numbers(const char *format, va_list args, digits numbers[TYPED_COLUMNS])
{
    const char *start = format; /* of the cell */
    int column = 0;

    for (const char *at = format; *at && column < TYPED_COLUMNS; at++) {
        digits number = "";
        if (*at == '\t') {
            start = at + 1;
            column++;
        }
        if (*at != '%' || *++at == '%')
            continue;
        const char *const first = at - 1;
        at += strspn(at, "+.0123456789");
        if (*at == 's') {
            (void)va_arg(args, const char *);
        } else if (strncmp(at, PRId64, strlen(PRId64)) == 0) {
            snprintf(number, sizeof number, "%" PRId64, va_arg(args, int64_t));
            at += strlen(PRId64) - 1;
        } else if (strchr("efg", *at)) {
            snprintf(number, sizeof number, "%.17g", va_arg(args, double));
        } else {
            return;
        }
        if (first == start && (at[1] == '\t' || at[1] == '\0'))
            memcpy(numbers[column], number, sizeof number);
    }
}

static void write_string(const char *text)
{
    char part[TD_JSON_PART];

    putchar('"');
    while (*text) {
        text = td_json_part(text, part);
        fputs(part, stdout);
    }
    putchar('"');
}

/** Writes "bf16 logits GiB" as the key "bf16_logits_gib". */
static void write_key(const char *head, int length)
{
    char key[CELL_TEXT] = "";
    size_t used = 0;

    for (; length > 0 && used < sizeof key - 1; length--, head++)
        if (isalnum((unsigned char)*head))
            key[used++] = (char)tolower((unsigned char)*head);
        else if (used > 0 && key[used - 1] != '_')
            key[used++] = '_';
    key[used - (used > 0 && key[used - 1] == '_')] = '\0';
    write_string(key);
    fputs(": ", stdout);
}

/** Writes a number if the text is one, with or without commas between groups of digits; else the text. */
static void write_value(const char *text)
{
    char number[CELL_TEXT], *end;
    size_t used = 0;

    for (const char *at = text; *at; at++)
        if (*at != ',')
            number[used++] = *at;
    number[used] = '\0';
    const double value = strtod(number, &end);
    if (*end == '\0' && isfinite(value))
        printf("%.17g", value);
    else
        write_string(text);
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

static void write_row(const td_table *table, const char *line, digits numbers[TYPED_COLUMNS])
{
    char **const argv = table->common->argv, *const command = strrchr(argv[0], ' ');
    const char *start, *between = "";

    fputs("{\"command\": ", stdout);
    write_string(command ? command + 1 : argv[0]);
    fputs(", \"argv\": [", stdout);
    for (int i = 1; i < table->common->argc; i++) {
        fputs(i > 1 ? ", " : "", stdout);
        write_string(argv[i]);
    }
    fputs("], ", stdout);
    if (table->name) {
        fputs("\"table\": ", stdout);
        write_string(table->name);
        fputs(", ", stdout);
    }
    fputs("\"row\": {", stdout);
    for (int column = 0; table->align[column]; column++) {
        const bool typed = column < TYPED_COLUMNS && *numbers[column];
        char text[CELL_TEXT];
        int length = cell(line, column, &start);

        snprintf(text, sizeof text, "%.*s", length, start);
        if (!*text)
            continue;
        fputs(between, stdout);
        length = cell(table->heads, column, &start);
        write_key(start, length);
        write_value(typed ? numbers[column] : text);
        between = ", ";
    }
    puts("}}");
    fflush(stdout); /* the end of the program reports a failure */
}

/* ---- tables ---- */

static td_status add_line(td_table *table, const char *format, va_list args)
{
    td_status status = TD_OK;
    digits numbers[TYPED_COLUMNS] = {""};
    va_list again;
    char *line;

    TD_FAIL_IF(!td_grow(&table->lines, table->count, &table->capacity, 16, sizeof *table->lines),
               TD_NO_MEMORY, "no memory for a table of %" PRId64 " rows", table->count + 1);
    va_copy(again, args);
    take_numbers(format, again, numbers);
    va_end(again);
    TD_FAIL_IF(vasprintf(&line, format, args) < 0, TD_NO_MEMORY, "no memory for a row of a table");
    table->lines[table->count++] = line;
    if (table->common->argv)
        write_row(table, line, numbers);
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
        free(table->lines[i]);
    free(table->lines);
    *table = (td_table){.count = 0};
    return status;
}

static const char *text_of(const td_table *table, int64_t row)
{
    return row == 0 ? table->heads : table->lines[row - 1];
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

/* ---- the machine ---- */

/** name = the processor's name in /proc/cpuinfo. */
static void read_processor(char name[128])
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];

    snprintf(name, 128, "unknown processor");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name : %127[^\n]", name) == 1)
            break;
    if (file)
        fclose(file);
}

static int usable_cores(void)
{
    cpu_set_t mine;

    CPU_ZERO(&mine);
    return sched_getaffinity(0, sizeof mine, &mine) == 0 ? CPU_COUNT(&mine)
                                                         : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

const char *td_machine_name(const td_device *dev, char text[160])
{
    char processor[128];

    if (td_device_kind_of(dev) != TD_DEVICE_CPU) {
        snprintf(text, 160, "%s", td_device_model(dev));
        return text;
    }
    read_processor(processor);
    snprintf(text, 160, "%s, %d threads", processor, usable_cores());
    return text;
}
