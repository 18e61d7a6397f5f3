/* A double with behaviour: labels stay balanced, even if a pop fails. */
#include "device/device.h"
#include "support/fault.h"

td_status __real_td_device_pop_label(td_device *dev);
td_status __wrap_td_device_pop_label(td_device *dev)
{
    const td_status status = __real_td_device_pop_label(dev);

    return td_fault("td_device_pop_label") ? td_fail(TD_IO_ERROR, "td_device_pop_label was told to fail")
                                           : status;
}
