/** scale: y = x / 2, elementwise. */
#ifndef TD_SCALE_SCALE_H
#define TD_SCALE_SCALE_H

#include "base/dtype.h"
#include "device/device.h"

TD_BEGIN_DECLS

/** y = x / 2, computed in f32 and rounded once to dtype.
 *
 *   x  [count]  in   dtype  contiguous, on dev
 *   y  [count]  out  dtype  contiguous, on dev; may be x
 *
 * TD_BAD_ARGUMENT: a NULL, a count below 1 or beyond any memory, an unknown dtype. TD_UNSUPPORTED: a dtype
 * other than f32 and bf16, a device other than the CPU. After an error y is unchanged. */
TD_API td_status td_scale_forward(td_device *dev, int64_t count, td_dtype dtype, const void *x, void *y);

/** dx = dy / 2. dx may be dy. Arguments and errors: as td_scale_forward. */
TD_API td_status td_scale_backward(td_device *dev, int64_t count, td_dtype dtype, const void *x,
                                   const void *dy, void *dx);

TD_END_DECLS

#endif
