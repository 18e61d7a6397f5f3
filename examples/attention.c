#include "base/rng.h"
#include "flash/flash.h"

#include <stdio.h>
#include <stdlib.h>

static void must(td_status status)
{
    if (status != TD_OK) {
        fprintf(stderr, "%s: %s\n", td_status_name(status), td_last_error());
        exit(1);
    }
}

int main(void)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 8, .seq = 1024, .head_dim = 64, .dtype = TD_F32, .causal = true};
    const int64_t numel = 1 * 8 * 1024 * 64;
    td_device *dev;
    td_attention_sizes sizes;
    float *x[4], *lse; /* q, k, v and the output */
    void *work;

    must(td_device_open("cpu", &dev));
    must(td_flash_sizes(dev, &shape, &sizes));
    for (uint64_t i = 0; i < 4; i++) {
        must(td_device_alloc(dev, (size_t)numel * sizeof(float), (void **)&x[i]));
        must(td_rng_normal(&(td_rng){.seed = 1, .stream = i}, 0, numel, 0.0f, 1.0f, x[i]));
    }
    must(td_device_alloc(dev, sizes.saved, (void **)&lse));
    must(td_device_alloc(dev, sizes.forward_work, &work));
    must(td_flash_forward(dev, &shape, x[0], x[1], x[2], x[3], lse, work));
    printf("query 0 sees key 0 alone, so its output is value 0: %g = %g\n", x[3][0], x[2][0]);
    td_device_close(dev); /* and every block on it */
    return 0;
}
