/** Tables whose rows are results: printed, and appended as records where --json asks for them. */
#ifndef TD_CLI_ROWS_H
#define TD_CLI_ROWS_H

#include "cli/options.h"
#include "cli/output.h"

/** Of what a table's rows are results. A row's first `keys` cells are its case, and so is what `more` has, in
 * "key=value" between tabs; NULL: nothing. The others are its values. A value whose format is one conversion
 * of a number has all of the number's digits. A column's name is its head, in small letters and _. An empty
 * cell is left out. */
typedef struct td_rows {
    const char *deliverable, *module, *table;
    int keys;
    const char *more;
} td_rows;

/** td_table_end of a table that is written where td_common_tables() says. Appends a record a row to what
 * --json names. */
td_status td_rows_end(const td_common *common, td_table *table, td_status status, const td_rows *rows);

#endif
