/** The program's output: tables, their rows as JSON, the progress line. */
#ifndef TD_CLI_OUTPUT_H
#define TD_CLI_OUTPUT_H

#include "cli/options.h"

#include <stdio.h>

/* ---- tables ---- */

/** A Markdown table with padded columns, also for terminals. Tabs separate cells. Initialise it as
 * {.align = ..., .heads = ..., .common = ...}, and end it with td_table_end. */
typedef struct td_table {
    const char *align;       /* 'l' or 'r' for each column */
    const char *heads;       /* the heads of the columns, with units */
    const td_common *common; /* the command's options */
    const char *name;        /* of the table, in JSON; NULL: the command has only this table */
    char **lines;            /* [count], the rows: cells between tabs */
    int64_t count, capacity;
    td_status status; /* TD_NO_MEMORY: a row could not be added */
} td_table;

/** Adds a row, formatted like printf: "%s\t%.2f". Missing cells at the end are empty. After a failure it does
 * nothing, and td_table_end returns the failure.
 *
 * With --json the row is also printed to standard output at once, as one line:
 *
 *     {"command": "sizes", "argv": ["--json"], "row": {"size": "small", "d_model": 768, ...}}
 *
 * "table" follows "argv" if the table has a name. The key of a cell is the head of its column in small
 * letters and _. Empty cells are left out. A cell whose format is a single conversion of a number keeps all
 * digits of the number. A text that is a number, also with commas between groups of digits, becomes one. */
void td_table_row(td_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Writes the table and an empty line. Writes nothing for a table without rows, or after a failure. */
void td_table_write(const td_table *table, FILE *out);

/** Writes the table, unless `status` or the table's status is a failure, and frees its rows. status: of the
 * code that filled the table. out NULL: nothing is written. Returns the first failure. */
td_status td_table_end(td_table *table, td_status status, FILE *out);

/** Writes number with a comma between groups of three digits to text. Returns text. */
const char *td_grouped(int64_t number, char text[32]);

/* ---- progress ---- */

/** Replaces the progress line on standard error. Does nothing if standard error is not a terminal. */
void td_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** Clears the progress line. */
void td_progress_end(void);

/* ---- the machine ---- */

/** Writes the device's model to text and returns text: the GPU's name, or the processor's model and the
 * number of hardware threads that this process may use. */
const char *td_machine_name(const td_device *dev, char text[160]);

#endif
