/** Handles the signals by which a launcher ends its ranks. */
#ifndef TD_CLI_GUARD_H
#define TD_CLI_GUARD_H

#include "comm/comm.h"

/** Changes how SIGINT and SIGTERM end the program: the communicators of all ranks are aborted, so that the
 * calls of this program return with an error. If the program still runs half a second later, it is ended with
 * the communicator's message. Launchers also send these signals after a rank died; the message then names the
 * dead rank. Call this before any thread starts. */
td_status td_guard_begin(const char *program);

/** Sets the communicator that a signal aborts; NULL: none. */
void td_guard_comm(td_comm *comm);

/** True for the first caller only, which prints the message. So the program prints one message about an
 * error. */
bool td_guard_reports_first(void);

#endif
