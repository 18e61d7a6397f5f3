/* Copies masters, whose planes are two arrays, between the host and the device. */
#include "base/check.h"
#include "base/float16.h"
#include "transformer/model.h"
#include "transformer/saving.h"

static void *moved(void *at, int64_t begin, size_t size)
{
    return (char *)at + (size_t)begin * size;
}

td_status td_master_upload(td_transformer *model, td_master to, int64_t begin, int64_t count, td_dtype dtype,
                           const void *numbers, void *work)
{
    const size_t size = to.low ? sizeof(uint16_t) : td_dtype_size(dtype), bytes = (size_t)count * size;
    td_status status = TD_OK;

    if (to.low) {
        td_planes_split(count, numbers, work, (uint16_t *)work + count);
        TD_TRY(td_device_upload(model->dev, moved(to.low, begin, size), moved(work, count, size), bytes));
        numbers = work;
    }
    TD_TRY(td_device_upload(model->dev, moved(to.at, begin, size), numbers, bytes));
cleanup:
    return status;
}

td_status td_master_download(td_transformer *model, td_master from, int64_t begin, int64_t count,
                             td_dtype dtype, void *numbers, void *work)
{
    const size_t size = from.low ? sizeof(uint16_t) : td_dtype_size(dtype), bytes = (size_t)count * size;
    td_status status = TD_OK;

    TD_TRY(td_device_download(model->dev, from.low ? work : numbers, moved(from.at, begin, size), bytes));
    if (from.low) {
        TD_TRY(td_device_download(model->dev, moved(work, count, size), moved(from.low, begin, size), bytes));
        td_planes_join(count, work, (uint16_t *)work + count, numbers);
    }
cleanup:
    return status;
}
