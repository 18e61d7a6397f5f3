/** The result of every call that can fail, and a message with the reason. */
#ifndef TD_BASE_STATUS_H
#define TD_BASE_STATUS_H

#include "base/base.h"

TD_BEGIN_DECLS

typedef enum td_status {
    TD_OK = 0,
    TD_BAD_ARGUMENT,  /* an argument is NULL, out of range or does not fit another; a product beyond 2^63 */
    TD_NO_MEMORY,     /* the host or the device has too little memory */
    TD_UNSUPPORTED,   /* a valid request that this build or this device cannot serve */
    TD_IO_ERROR,      /* the operating system refused to read, write or open a file */
    TD_LIBRARY_ERROR, /* a library below (oneDNN, CUDA, NCCL, MPI, ...) failed; the message has its text */
    TD_BAD_STATE,     /* the object is not ready for this call: backward before forward, for example */
    TD_RANK_FAILED    /* another rank died, is late, gave up or made a different call; the message names it */
} td_status;

/** The constant's name, "TD_OK" and so on; "unknown status" for any other value. Never NULL. */
TD_API const char *td_status_name(td_status status);

/** The message of the last failed call on this thread: the argument, its value and what is required. Empty
 * before the first failure; a successful call does not change it. Valid until the next failure on this
 * thread; never NULL. */
TD_API const char *td_last_error(void);

TD_END_DECLS

#endif
