#include "support/as_if_graphs.h"
#include "base/check.h"
#include "device/backend.h"

extern const td_backend __real_td_backend_cpu;
extern td_backend __wrap_td_backend_cpu;
td_backend __wrap_td_backend_cpu;
static int launches;
static bool fails_once;

static td_status make_stream(void *context, void **native)
{
    (void)context;
    *native = &launches;
    return TD_OK;
}

static void drop_stream(void *context, void *native)
{
    (void)context, (void)native;
}

static void set_stream(void *context, bool own, void *native)
{
    (void)context, (void)own, (void)native;
}

static td_status begin_capture(void *context)
{
    (void)context;
    return TD_OK;
}

static td_status end_capture(void *context, void **graph)
{
    if (fails_once) {
        fails_once = false;
        return td_fail(TD_LIBRARY_ERROR, "ending a capture, as if: it is invalid");
    }
    return make_stream(context, graph);
}

static td_status launch(void *context, void *graph)
{
    (void)context, (void)graph;
    launches++;
    return TD_OK;
}

static bool gpu_once;

td_device_kind __real_td_device_kind_of(const td_device *device);
td_device_kind __wrap_td_device_kind_of(const td_device *device)
{
    const bool gpu = gpu_once;

    gpu_once = false;
    return gpu ? TD_DEVICE_CUDA : __real_td_device_kind_of(device);
}

void td_as_if_graphs(void)
{
    td_backend *cpu = &__wrap_td_backend_cpu;

    *cpu = __real_td_backend_cpu;
    cpu->stream_create = make_stream;
    cpu->stream_destroy = drop_stream;
    cpu->set_stream = set_stream;
    cpu->graph_begin = begin_capture;
    cpu->graph_end = end_capture;
    cpu->graph_launch = launch;
    cpu->graph_destroy = drop_stream;
}

void td_as_if_gpu_once(void)
{
    gpu_once = true;
}

void td_as_if_capture_fails_once(void)
{
    fails_once = true;
}

int td_as_if_launches(void)
{
    const int since = launches;

    launches = 0;
    return since;
}
