/** The program's output: tables, the progress line, records. */
#ifndef TD_CLI_OUTPUT_H
#define TD_CLI_OUTPUT_H

#include "base/record.h"
#include "device/device.h"

#include <stdio.h>

/* ---- tables ---- */

/** A Markdown table with padded columns, also for terminals. Tabs separate cells. Initialise it as
 * {.align = ..., .heads = ...}, and end it with td_table_end. */
typedef struct td_table_line td_table_line;
typedef struct td_table {
    const char *align;    /* 'l' or 'r' for each column */
    const char *heads;    /* the heads of the columns, with units */
    td_table_line *lines; /* [count], the rows */
    int64_t count, capacity;
    td_status status; /* TD_NO_MEMORY: a row could not be added */
} td_table;

/** The value of a cell. A cell whose format is a single conversion of a number has the number with all of its
 * digits. Any other cell is text. */
typedef struct td_cell {
    enum { TD_CELL_TEXT = 0, TD_CELL_WHOLE, TD_CELL_REAL } kind;
    int64_t whole;
    double real;
} td_cell;

/** Adds a row, formatted like printf: "%s\t%.2f". Missing cells at the end are empty. After a failure it does
 * nothing, and td_table_end returns the failure. */
void td_table_row(td_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes the table and an empty line. Writes nothing for a table without rows, or after a failure. */
void td_table_write(const td_table *table, FILE *out);

/** Writes the table, unless `status` or the table's status is a failure, and frees its rows. status: of the
 * code that filled the table. out NULL: nothing is written. Returns the first failure. */
td_status td_table_end(td_table *table, td_status status, FILE *out);

/** Copies a cell's text, cut to `room` bytes, and returns its value. Row 0 is the heads. */
td_cell td_table_cell(const td_table *table, int64_t row, int column, char *text, size_t room);

/** Writes number with a comma between groups of three digits to text. Returns text. */
const char *td_grouped(int64_t number, char text[32]);

/* ---- progress ---- */

/** Replaces the progress line on standard error. Does nothing if standard error is not a terminal. */
void td_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Clears the progress line. */
void td_progress_end(void);

/* ---- records ---- */

/** Writes the device's model to text and returns text: the GPU's name, or the processor's model and the
 * number of hardware threads that this process may use. */
const char *td_machine_name(const td_device *dev, char text[160]);

/** *out = a record of impl "c" with machine, host, threads, build and versions. dev NULL: without machine,
 * host and threads, for arithmetic that does not depend on them. The caller destroys *out. */
td_status td_output_record(const td_device *dev, const char *deliverable, const char *module,
                           td_record **out);

#endif
