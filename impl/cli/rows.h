/** Tables whose rows are results: they are printed, and with --json appended as records. */
#ifndef TD_CLI_ROWS_H
#define TD_CLI_ROWS_H

#include "cli/options.h"
#include "cli/output.h"

/** How the rows of a table become records. The first `keys` cells of a row are its case, together with the
 * "key=value" pairs in `more`, which tabs separate (NULL: none). The other cells are its values. A value
 * whose format is a single conversion of a number keeps all of the number's digits. The name of a value is
 * the head of its column in small letters and _. Empty cells are left out. */
typedef struct td_rows {
    const char *deliverable, *module, *table;
    int keys;
    const char *more;
} td_rows;

/** Writes the table to td_common_tables(), appends a record for each row if --json is given, and frees the
 * rows. Does only the last if `status` or the table's status is a failure. Returns the first failure. */
td_status td_rows_end(const td_common *common, td_table *table, td_status status, const td_rows *rows);

#endif
