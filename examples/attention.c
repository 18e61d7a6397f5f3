#include <tandem/flash.h>
#include <tandem/rng.h>

#include <stdio.h>

int main(void)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 8, .seq = 1024, .head_dim = 64, .dtype = TD_F32, .causal = true};
    const int64_t numel = 1 * 8 * 1024 * 64;
    td_device *dev = NULL;
    td_attention_sizes sizes;
    void *x, *o, *lse, *work; /* x serves as q, k and v */

    if (td_device_open("cpu", &dev) || td_flash_sizes(dev, &shape, &sizes) ||
        td_device_alloc(dev, (size_t)numel * 4, &x) || td_device_alloc(dev, (size_t)numel * 4, &o) ||
        td_device_alloc(dev, sizes.saved, &lse) || td_device_alloc(dev, sizes.forward_work, &work) ||
        td_rng_normal(&(td_rng){.seed = 1}, 0, numel, 0, 1, x) ||
        td_flash_forward(dev, &shape, x, x, x, o, lse, work))
        return fprintf(stderr, "%s\n", td_last_error()), 1;
    printf("query 0 sees only key 0, so its output is value 0: %g = %g\n", *(float *)o, *(float *)x);
    td_device_close(dev); /* frees its blocks too */
}
