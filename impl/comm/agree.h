/** Internal to impl/: what all ranks must have alike. All ranks call these functions together. */
#ifndef TD_COMM_AGREE_H
#define TD_COMM_AGREE_H

#include "base/setting.h"
#include "comm/comm.h"

/** As many settings of the same names on all ranks. TD_BAD_ARGUMENT on
 * every rank: the message names the first setting that differs, the rank, its value and rank 0's.
 * TD_NO_MEMORY. Errors of collectives. */
td_status td_comm_agree(td_comm *comm, int64_t count, const td_setting *settings);

/** A list of rows that all ranks compare. */
typedef struct td_rows {
    int64_t count;
    size_t size;                                             /* of a row: 1 to 32768 bytes */
    td_status (*make)(void *user, int64_t index, void *row); /* this rank's row, in zeroed memory */
    /* Is called for every rank but 0. first: rank 0's row; row: the rank's. */
    td_status (*look)(void *user, int64_t index, int32_t rank, const void *first, const void *row);
    void *user;
} td_rows;

/** Errors of the functions and of td_comm_exchange. TD_NO_MEMORY. */
td_status td_comm_compare(td_comm *comm, const td_rows *rows);

#endif
