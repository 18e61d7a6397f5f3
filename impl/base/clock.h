/** The one clock of the host. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include "base/base.h"

TD_BEGIN_DECLS

/** CLOCK_MONOTONIC in nanoseconds: never decreases; its origin is unspecified. */
TD_API int64_t td_clock_ns(void);

TD_END_DECLS

#endif
