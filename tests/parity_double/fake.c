#include "fake/fake.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum { BLOCKS = 64 };

struct td_stream {
    void *native;
};

struct td_device {
    td_stream *stream;
    void *blocks[BLOCKS];
    size_t bytes[BLOCKS];
    td_memory_stats stats;
};

struct td_fake {
    td_device *dev;
};

static int live;
static const char *message = "";

const char *td_status_name(td_status status)
{
    static const char *const names[] = {"TD_OK", "TD_BAD_ARGUMENT", "TD_NO_MEMORY", "TD_UNSUPPORTED"};

    return names[status];
}

const char *td_last_error(void)
{
    return message;
}

#ifndef FAKE_ID
#define FAKE_ID "1"
#endif

const td_build *td_build_info(void)
{
    static const td_build_module modules[] = {{"scale", "scale" FAKE_ID, ""}, {"early", "early", ""}};
    static const td_build build = {.version = "0.0.1",
                                   .commit = "0123456789",
                                   .dirty = true,
                                   .id = "fake" FAKE_ID,
                                   .compiler = "FAKE 1.0",
                                   .modules = modules,
                                   .module_count = 2};

    return &build;
}

#ifndef FAKE_INTERFACE
#define FAKE_INTERFACE "fake"
#endif
#ifndef FAKE_UNNAMED
const char *td_build_interface(void)
{
    return FAKE_INTERFACE;
}
#endif

td_status td_device_open(const char *name, td_device **out)
{
    (void)name;
    *out = calloc(1, sizeof **out);
    return *out ? TD_OK : TD_NO_MEMORY;
}

void td_device_close(td_device *dev)
{
    for (int i = 0; i < BLOCKS; i++)
        free(dev->blocks[i]);
    free(dev);
}

td_status td_device_alloc(td_device *dev, size_t bytes, void **out)
{
    int i = 0;

    while (i < BLOCKS && dev->blocks[i])
        i++;
    *out = i < BLOCKS ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
    if (!*out) {
        message = "no room";
        return TD_NO_MEMORY;
    }
    dev->blocks[i] = *out;
    dev->bytes[i] = bytes;
    dev->stats.live_blocks++;
    dev->stats.current_bytes += bytes;
    if (dev->stats.peak_bytes < dev->stats.current_bytes)
        dev->stats.peak_bytes = dev->stats.current_bytes;
    return TD_OK;
}

td_status td_device_free(td_device *dev, void *block)
{
    for (int i = 0; i < BLOCKS; i++) {
        if (dev->blocks[i] == block) {
            free(block);
            dev->blocks[i] = NULL;
            dev->stats.live_blocks--;
            dev->stats.current_bytes -= dev->bytes[i];
            return TD_OK;
        }
    }
    message = "no such block";
    return TD_BAD_ARGUMENT;
}

td_status td_device_memory(const td_device *dev, td_memory_stats *out)
{
    *out = dev->stats;
    return TD_OK;
}

td_status td_stream_wrap(td_device *dev, void *native, td_stream **out)
{
    (void)dev;
    *out = calloc(1, sizeof **out);
    if (!*out)
        return TD_NO_MEMORY;
    (*out)->native = native;
    return TD_OK;
}

void td_stream_destroy(td_stream *stream)
{
    free(stream);
}

td_status td_device_set_stream(td_device *dev, td_stream *stream)
{
    dev->stream = stream;
    return TD_OK;
}

int64_t td_fake_stream(td_device *dev)
{
    return dev->stream ? (int64_t)(intptr_t)dev->stream->native : 0;
}

#ifdef FAKE_OWN_THREADS
static int own_threads = 1;
#define omp_get_max_threads()        own_threads
#define omp_set_num_threads(threads) (own_threads = (threads))
#endif
int td_cpu_threads(void)
{
    return omp_get_max_threads();
}

td_status td_cpu_set_threads(int threads)
{
    omp_set_num_threads(threads);
    return TD_OK;
}

td_status td_fake_scale(td_device *dev, const td_fake_shape *shape, const float *x, float *y)
{
    (void)dev;
    if (!x || !y) {
        message = "x or y is NULL";
        return TD_BAD_ARGUMENT;
    }
    for (int64_t i = 0; i < shape->count; i++)
        y[i] = (shape->factor == 0.0f ? 0.5f : shape->factor) * x[i];
    return TD_OK;
}

td_status td_fake_describe(const td_fake_shape *shape, char *text, size_t bytes)
{
    snprintf(text, bytes, "%d %d %d %g %d %s %d %d", (int)shape->count, (int)shape->dtype, (int)shape->order,
             (double)shape->factor, (int)shape->causal, shape->attention ? shape->attention : "NULL",
             (int)shape->size.layers, (int)shape->size.heads);
    return TD_OK;
}

td_status td_fake_create(td_device *dev, td_fake **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return TD_NO_MEMORY;
    (*out)->dev = dev;
    live++;
    return TD_OK;
}

void td_fake_destroy(td_fake *fake)
{
    free(fake);
    live--;
}

int td_fake_live(void)
{
    return live;
}

td_status td_fake_each(int64_t count, td_fake_ready ready, void *user)
{
    td_status status = TD_OK;

    for (int64_t i = 0; i < count && status == TD_OK; i++)
        status = ready(user, i);
    return status;
}

td_status td_fake_fail(td_status status, bool crash)
{
    message = "as asked";
    if (crash)
        *(volatile int *)0 = 0;
    return status;
}
