/* A build without NVTX's headers. */
#include "trace/nvtx.h"

td_status td_nvtx_open(td_device *dev, td_nvtx **out, const char **why)
{
    (void)dev;
    *out = NULL;
    *why = "this build of tandem has no NVTX (TANDEM_NVTX=ON)";
    return TD_OK;
}

void td_nvtx_close(td_nvtx *nvtx)
{
    (void)nvtx; /* always NULL */
}
