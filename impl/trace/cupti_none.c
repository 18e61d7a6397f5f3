/* A build without CUPTI's header. */
#include "trace/cupti.h"

#include <stdio.h>
#include <stdlib.h>

td_status td_cupti_open(td_cupti **out, char why[TD_CUPTI_WHY])
{
    *out = NULL;
    snprintf(why, TD_CUPTI_WHY, "this build of tandem has no CUPTI (TANDEM_CUPTI=ON)");
    return TD_OK;
}

int td_cupti_version(const td_cupti *cupti)
{
    (void)cupti; /* never called: td_cupti_open makes no object */
    return 0;
}

int64_t td_cupti_now(const td_cupti *cupti)
{
    (void)cupti;
    return 0;
}

void td_cupti_enter(td_cupti *cupti, int64_t range)
{
    (void)cupti;
    (void)range;
}

td_status td_cupti_take(td_cupti *cupti, td_names *names, td_cupti_log *log)
{
    (void)cupti;
    (void)names;
    *log = (td_cupti_log){.activities = NULL};
    return TD_OK;
}

void td_cupti_close(td_cupti *cupti)
{
    (void)cupti;
}
