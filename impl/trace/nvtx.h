/** Internal to impl/trace/: a listener that gives a device's labels and operations to NVTX. */
#ifndef TD_TRACE_NVTX_H
#define TD_TRACE_NVTX_H

#include "device/listen.h"

typedef struct td_nvtx td_nvtx;

/** Makes the domain "tandem" and listens to dev. *out is NULL, and *why a sentence, where this build has no
 * NVTX. TD_NO_MEMORY. */
td_status td_nvtx_open(td_device *dev, td_nvtx **out, const char **why);

/** Listens no more. Accepts NULL. */
void td_nvtx_close(td_nvtx *nvtx);

#endif
