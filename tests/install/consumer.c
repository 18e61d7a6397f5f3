#include "device/device.h" /* a header of this program, not of the library */
#include <tandem/device.h>
#include <tandem/flash.h>

int main(void)
{
    const float q[1] = {0}, v[1] = {42};
    const td_attention_shape one = {.batch = 1, .heads = 1, .seq = 1, .head_dim = 1, .dtype = TD_F32};
    float o[1] = {0}, lse[1];
    td_device *dev;
    td_attention_sizes sizes;
    void *work;

    if (td_device_open("cpu", &dev) != TD_OK || td_flash_sizes(dev, &one, &sizes) != TD_OK ||
        td_device_alloc(dev, sizes.forward_work, &work) != TD_OK ||
        td_flash_forward(dev, &one, q, q, v, o, lse, work) != TD_OK)
        return 1;
    td_device_close(dev);
    return o[0] == OWN_ANSWER ? 0 : 1; /* with one key the output is its value */
}
