/* Chooses the SMs of an update so that as many clusters of GEMM blocks as possible fit on the other SMs. */
#include "base/check.h"
#include "device/cuda.h"
#include "device/state.h"
#include "kernels/gpcs.h"
#include "ops/cuda/cuda.h"

#include <stdlib.h>

/* The number of blocks in the largest clusters of cuBLASLt's kernels: 2 x 4. */
enum { CLUSTER = 8 };

typedef struct gpcs {
    bool found;
    int of[TD_SM_SET_MOST];   /* for each SM, the lowest SM of its GPC */
    int size[TD_SM_SET_MOST]; /* SMs of a GPC, at the index of its lowest SM */
} gpcs;

/** The GPCs of the device. They are found once, when no capture is running: the first steps of a trainer are
 * queued. If CUDA fails, found is false. */
static td_status gpcs_of(td_device *dev, const gpcs **out)
{
    static const char key; /* its address is the name of this state */
    td_cuda *cuda = td_device_cuda(dev);
    gpcs *found = td_device_state(dev, &key), *made = NULL;
    td_status status = TD_OK;

    *out = found;
    if (found || td_graph_capture(dev) > 0)
        goto cleanup;
    made = calloc(1, sizeof *made);
    TD_FAIL_IF(!made, TD_NO_MEMORY, "no memory for the list of SMs");
    (void)td_cuda_enter(cuda);
    made->found = td_cuda_gpcs(cuda->stream, cuda->multiprocessors, made->of) == cudaSuccess;
    (void)cudaGetLastError();
    td_cuda_leave(cuda);
    for (int i = 0; i < cuda->multiprocessors && made->found; i++)
        made->size[made->of[i]]++;
    TD_TRY(td_device_keep(dev, &key, made, free));
    *out = made;
    made = NULL;
cleanup:
    free(made);
    return status;
}

/** Takes up to `most` SMs of a GPC, from the last one down, and returns their number. Two SMs with
 * neighbouring numbers can hold a cluster of two, so taking neighbours together leaves more pairs. */
static int take(const gpcs *all, int sms, int gpc, int most, td_sm_set *out)
{
    int taken = 0;

    for (int i = sms - 1; i >= 0 && taken < most; i--)
        if (all->of[i] == gpc && !(out->bits[i / 32] >> i % 32 & 1)) {
            out->bits[i / 32] |= UINT32_C(1) << i % 32;
            taken++;
        }
    return taken;
}

/** First takes the SMs of each GPC beyond a multiple of CLUSTER. Then takes whole clusters, beginning with
 * the smallest GPC. */
static void choose(const gpcs *all, int sms, int count, td_sm_set *out)
{
    for (int i = 0; i < sms && count > 0; i++) {
        const int rest = all->size[i] % CLUSTER;

        count -= take(all, sms, i, rest < count ? rest : count, out);
    }
    for (int size = CLUSTER; size <= sms && count > 0; size++)
        for (int i = 0; i < sms && count > 0; i++)
            if (all->size[i] == size)
                count -= take(all, sms, i, size < count ? size : count, out);
}

td_status td_cuda_sms_of(td_device *dev, int32_t count, td_sm_set *out)
{
    const int sms = td_device_cuda(dev)->multiprocessors;
    const gpcs *all;
    td_status status = TD_OK;

    *out = (td_sm_set){0};
    TD_TRY(gpcs_of(dev, &all));
    if (all && !all->found)
        goto cleanup;
    out->all = sms;
    if (all)
        choose(all, sms, count, out);
cleanup:
    return status;
}
