/** What the program says: tables, the progress line, records. */
#ifndef TD_CLI_OUTPUT_H
#define TD_CLI_OUTPUT_H

#include "base/record.h"
#include "device/device.h"

#include <stdio.h>

/* ---- tables ---- */

/** A Markdown table with padded columns, which reads well in a terminal too. Cells stand between tabs. It
 * begins as {.align = ..., .heads = ...}, and td_table_end ends it. */
typedef struct td_table_line td_table_line;
typedef struct td_table {
    const char *align, *heads; /* a letter a column, 'l' or 'r'; the column heads, units included */
    td_table_line *lines;      /* [count], the rows */
    int64_t count, capacity;
    td_status status; /* TD_NO_MEMORY: there was none for a row */
} td_table;

/** What a cell says: a number if its format is one conversion of a number, with all of its digits. */
typedef struct td_cell {
    enum { TD_CELL_TEXT = 0, TD_CELL_WHOLE, TD_CELL_REAL } kind;
    int64_t whole;
    double real;
} td_cell;

/** Adds a row, formatted as printf does: "%s\t%.2f". A row with fewer cells than columns ends in empty
 * ones. After a failure it does nothing, and td_table_end says why. */
void td_table_row(td_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes the table and an empty line; nothing for a table without rows, or after a failure. */
void td_table_write(const td_table *table, FILE *out);

/** Writes the table if status, of what filled it, is TD_OK, and frees its rows. out NULL: it is
 * not written. Returns the first failure. */
td_status td_table_end(td_table *table, td_status status, FILE *out);

/** Copies a cell's text, cut to what `room` holds, and returns its value. Row 0 holds the heads. */
td_cell td_table_cell(const td_table *table, int64_t row, int column, char *text, size_t room);

/** number with a comma between groups of three digits, in text. Returns text. */
const char *td_grouped(int64_t number, char text[32]);

/* ---- progress ---- */

/** Shows one line on standard error, over the last one; nothing unless that is a terminal. */
void td_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Wipes the line. */
void td_progress_end(void);

/* ---- records ---- */

/** What the device is: for the CPU the processor's model, and how many of its threads this process may
 * use. */
const char *td_machine_name(const td_device *dev, char text[160]);

/** A record of impl "c" with machine, host, threads, build and versions filled in. dev NULL: without the
 * first three, for arithmetic that any machine does alike. */
td_status td_output_record(const td_device *dev, const char *deliverable, const char *module,
                           td_record **out);

#endif
