/** The one clock of the host. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include "base/base.h"

TD_BEGIN_DECLS

/** Nanoseconds of CLOCK_MONOTONIC: never runs backwards, origin unspecified. */
TD_API int64_t td_clock_ns(void);

TD_END_DECLS

#endif
