#include "cli/rows.h"

#include "base/check.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_TEXT = 64, CELL_TEXT = 256 };

/** "case" and "bf16 logits GiB" become "case.bf16_logits_gib". */
static void name_of(const char *group, const char *head, char name[NAME_TEXT])
{
    int length = snprintf(name, NAME_TEXT, "%s.", group);

    for (; *head && length < NAME_TEXT - 1; head++)
        if (isalnum((unsigned char)*head))
            name[length++] = (char)tolower((unsigned char)*head);
        else if (name[length - 1] != '_' && name[length - 1] != '.')
            name[length++] = '_';
    name[length - (name[length - 1] == '_')] = '\0';
}

/** Sets `name` to a number if the text is one, with or without commas between groups of digits; else to the
 * text. */
static td_status set_value(td_record *record, const char *name, const char *text)
{
    char digits[CELL_TEXT], *end;
    size_t length = 0;

    for (const char *at = text; *at; at++)
        if (*at != ',')
            digits[length++] = *at;
    digits[length] = '\0';
    errno = 0;
    const long long whole = strtoll(digits, &end, 10);
    if (*end == '\0' && errno == 0)
        return td_record_set_integer(record, name, whole);
    const double number = strtod(digits, &end);
    if (*end == '\0')
        return td_record_set_number(record, name, number);
    return td_record_set_string(record, name, text);
}

static td_status set_more(td_record *record, const char *more)
{
    td_status status = TD_OK;

    while (more && *more) {
        char name[NAME_TEXT], text[CELL_TEXT];
        const int key = (int)strcspn(more, "="), value = (int)strcspn(more + key + 1, "\t");

        snprintf(name, sizeof name, "case.%.*s", key, more);
        snprintf(text, sizeof text, "%.*s", value, more + key + 1);
        TD_TRY(set_value(record, name, text));
        more += key + 1 + value;
        more += *more == '\t';
    }
cleanup:
    return status;
}

static td_status append_row(const td_common *common, const td_table *table, const td_rows *rows, int64_t row)
{
    td_status status = TD_OK;
    td_record *record = NULL;

    TD_TRY(td_output_record(NULL, rows->deliverable, rows->module, &record));
    TD_TRY(td_record_set_string(record, "case.table", rows->table));
    TD_TRY(set_more(record, rows->more));
    for (int column = 0; table->align[column]; column++) {
        char head[CELL_TEXT], text[CELL_TEXT], name[NAME_TEXT];

        td_table_cell(table, 0, column, head, sizeof head);
        const td_cell cell = td_table_cell(table, row, column, text, sizeof text);
        if (!*text)
            continue;
        if (column < rows->keys) {
            name_of("case", head, name);
            TD_TRY(set_value(record, name, text));
            continue;
        }
        name_of("values", head, name);
        TD_TRY(cell.kind == TD_CELL_REAL    ? td_record_set_number(record, name, cell.real)
               : cell.kind == TD_CELL_WHOLE ? td_record_set_integer(record, name, cell.whole)
                                            : set_value(record, name, text));
    }
    TD_TRY(td_common_append(common, record));
cleanup:
    td_record_destroy(record);
    return status;
}

td_status td_rows_end(const td_common *common, td_table *table, td_status status, const td_rows *rows)
{
    if (status == TD_OK)
        status = table->status;
    if (status == TD_OK)
        td_table_write(table, td_common_tables(common));
    for (int64_t row = 1; common->json && row <= table->count && status == TD_OK; row++)
        status = append_row(common, table, rows, row);
    return td_table_end(table, status, NULL);
}
