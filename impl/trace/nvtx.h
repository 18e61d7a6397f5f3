/** Internal to impl/trace/: passes a device's labels and operations to NVTX. */
#ifndef TD_TRACE_NVTX_H
#define TD_TRACE_NVTX_H

#include "device/listen.h"

typedef struct td_nvtx td_nvtx;

/** Creates the domain "tandem" and listens to dev. If this build has no NVTX, *out is NULL and *why the
 * reason in a sentence. TD_NO_MEMORY. */
td_status td_nvtx_open(td_device *dev, td_nvtx **out, const char **why);

/** Stops listening and frees. Accepts NULL. */
void td_nvtx_close(td_nvtx *nvtx);

#endif
