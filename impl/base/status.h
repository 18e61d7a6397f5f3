/** The result of every call that can fail, and the text that says why. */
#ifndef TD_BASE_STATUS_H
#define TD_BASE_STATUS_H

#include "base/base.h"

TD_BEGIN_DECLS

typedef enum td_status {
    TD_OK = 0,
    TD_BAD_ARGUMENT,  /* an argument is NULL, out of range or unfit beside another; a product beyond 2^63 */
    TD_NO_MEMORY,     /* the host or the device has no room for the allocation */
    TD_UNSUPPORTED,   /* a valid request that this build or this device cannot serve */
    TD_IO_ERROR,      /* the operating system refused to read, write or open a file */
    TD_LIBRARY_ERROR, /* a library below (oneDNN, CUDA, NCCL, MPI, ...) failed; the message has its text */
    TD_BAD_STATE,     /* the object is not ready for this call: backward before forward, say */
    TD_RANK_FAILED    /* another rank died, is late, gave up or made another call; the message names it */
} td_status;

/** The constant's name, "TD_OK" and so on; "unknown status" for any other value. Never NULL. */
TD_API const char *td_status_name(td_status status);

/** The message of the last call on this thread that did not return TD_OK: the argument, its value and the
 * demand. Empty before the first failure; a success leaves it as it is. Valid until the next failure on this
 * thread; never NULL. */
TD_API const char *td_last_error(void);

TD_END_DECLS

#endif
