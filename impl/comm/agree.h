/** Internal to impl/: compares settings of all ranks. All ranks must call these functions together. */
#ifndef TD_COMM_AGREE_H
#define TD_COMM_AGREE_H

#include "base/setting.h"
#include "comm/comm.h"

/** td_comm_exchange after work that may take longer than td_comm_options.seconds, such as writing a file. It
 * waits for each rank that is alive; TD_RANK_FAILED after `seconds` if a rank is not. */
td_status td_comm_exchange_patiently(td_comm *comm, const void *mine, size_t bytes, void *all);

/** Compares settings. All ranks pass the same count and the same names. TD_BAD_ARGUMENT on every rank if a
 * value differs: the message names the first such setting, the rank, its value and rank 0's value.
 * TD_NO_MEMORY. Errors of td_comm_exchange. */
td_status td_comm_agree(td_comm *comm, int64_t count, const td_setting *settings);

/** A list of rows that all ranks compare. */
typedef struct td_rows {
    int64_t count;
    size_t size;                                             /* bytes of a row, 1 to 32768 */
    td_status (*make)(void *user, int64_t index, void *row); /* this rank's row */
    /* Called for every rank but 0. first: rank 0's row; row: that rank's. */
    td_status (*look)(void *user, int64_t index, int32_t rank, const void *first, const void *row);
    void *user;
} td_rows;

/** Compares all rows. Returns the first error of make, look or td_comm_exchange. TD_NO_MEMORY. */
td_status td_comm_compare(td_comm *comm, const td_rows *rows);

#endif
