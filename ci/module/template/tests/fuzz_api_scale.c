/* The functions of scale.h. */
#include "support/fuzz_api_kit.h"

#include "scale/scale.h"

API(td_scale_forward)
{
    const int64_t count = extent("count");
    const td_dtype type = dtype("dtype");
    const void *x = in("x", BYTES(type, count));
    void *y = out("y", BYTES(type, count));

    return td_scale_forward(dev(), count, type, x, y);
}

API(td_scale_backward)
{
    const int64_t count = extent("count");
    const td_dtype type = dtype("dtype");
    const void *x = in("x", BYTES(type, count)), *dy = in("dy", BYTES(type, count));
    void *dx = out("dx", BYTES(type, count));

    return td_scale_backward(dev(), count, type, x, dy, dx);
}
