/** Internal to impl/: settings that all ranks have to have alike. */
#ifndef TD_COMM_AGREE_H
#define TD_COMM_AGREE_H

#include "base/setting.h"
#include "comm/comm.h"

enum { TD_SETTINGS_MOST = 64 };

/** All ranks together, with as many settings of the same names, up to TD_SETTINGS_MOST. TD_BAD_ARGUMENT on
 * every rank: the message names the first setting that differs, the rank, its value and rank 0's.
 * TD_NO_MEMORY. Errors of collectives. */
td_status td_comm_agree(td_comm *comm, int64_t count, const td_setting *settings);

#endif
