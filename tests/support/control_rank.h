/** One end of the control connections, which a thread opens. */
#ifndef TD_TESTS_CONTROL_RANK_H
#define TD_TESTS_CONTROL_RANK_H

#include "comm/control_state.h"
#include "support/test.h"

typedef struct rank {
    td_control_options options;
    td_control *control;
    td_status status;
    char error[512];
    pthread_t thread;
} rank;

static void *open_control(void *argument)
{
    rank *r = argument;

    r->status = td_control_open(&r->options, &r->control);
    snprintf(r->error, sizeof r->error, "%s", r->status == TD_OK ? "" : td_last_error());
    return NULL;
}

#endif
