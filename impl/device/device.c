#include "device/device.h"

#include "base/check.h"
#include "device/inside.h"
#include "device/sms.h"
#include "device/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* *index = the number after "name:", 0 for "name" alone, or -1 if `text` is neither. */
static int parse_index(const char *text, const char *name)
{
    size_t length = strlen(name);
    int index = 0;

    if (strncmp(text, name, length) != 0)
        return -1;
    text += length;
    if (*text == '\0')
        return 0;
    if (*text++ != ':' || *text == '\0')
        return -1;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || index > 9999)
            return -1;
        index = 10 * index + (*text - '0');
    }
    return index;
}

td_status td_device_count(td_device_kind kind, int *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(kind == TD_DEVICE_CPU || kind == TD_DEVICE_CUDA, "kind is %d, needs to be a td_device_kind",
             (int)kind);
    if (kind == TD_DEVICE_CPU)
        return td_backend_cpu.count(out);
#ifdef TANDEM_HAVE_CUDA
    status = td_backend_cuda.count(out);
#else
    status = td_fail(TD_UNSUPPORTED, "device 'cuda': this build of tandem has no CUDA (TANDEM_CUDA=ON)");
#endif
cleanup:
    return status;
}

td_status td_device_open(const char *name, td_device **out)
{
    td_status status = TD_OK;
    td_device *dev = NULL;
    const td_backend *backend = NULL;
    int index = 0;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(name, "name is NULL");
    if (strcmp(name, "cpu") == 0) {
        backend = &td_backend_cpu;
    } else {
        index = parse_index(name, "cuda");
        TD_CHECK(index >= 0, "name is '%s', needs cpu, cuda or cuda:<index>", name);
#ifdef TANDEM_HAVE_CUDA
        backend = &td_backend_cuda;
#else
        status =
            td_fail(TD_UNSUPPORTED, "device '%s': this build of tandem has no CUDA (TANDEM_CUDA=ON)", name);
        goto cleanup;
#endif
    }

    dev = calloc(1, sizeof *dev);
    TD_FAIL_IF(!dev, TD_NO_MEMORY, "no memory for device '%s'", name);
    TD_TRY(backend->open(index, &dev->context));
    dev->backend = backend;
    if (backend->kind == TD_DEVICE_CPU)
        snprintf(dev->name, sizeof dev->name, "%s", backend->name);
    else
        snprintf(dev->name, sizeof dev->name, "%s:%d", backend->name, index);

    *out = dev;
    dev = NULL;
cleanup:
    td_device_close(dev);
    return status;
}

void td_device_close(td_device *dev)
{
    if (!dev)
        return;
    td_device_dismiss(dev->guests);
    while (dev->kept) {
        td_kept *const newest = dev->kept;

        dev->kept = newest->before;
        newest->destroy(newest->state);
        free(newest);
    }
    if (dev->backend) {
        for (size_t i = 0; i < dev->blocks.capacity; i++)
            if (dev->blocks.slots[i].address)
                dev->backend->free(dev->context, dev->blocks.slots[i].address, dev->blocks.slots[i].bytes);
        dev->backend->close(dev->context);
    }
    td_blocks_deinit(&dev->blocks);
    td_history_deinit(&dev->history);
    free(dev);
}

void td_device_reserve_sms(td_device *dev, td_sm_owner owner, int32_t sms)
{
    dev->reserved_sms[owner] = sms;
}

int32_t td_device_reserved_sms(const td_device *dev)
{
    int32_t sum = 0;

    for (int owner = 0; owner < TD_SM_OWNERS; owner++)
        sum += dev->reserved_sms[owner];
    return sum;
}

int32_t td_device_sms(td_device *dev)
{
    return dev->backend->sms ? dev->backend->sms(dev->context) : 0;
}

td_gpu_clock td_device_clock(td_device *dev)
{
    return dev->backend->clock ? dev->backend->clock(dev->context) : (td_gpu_clock){0};
}

void *td_device_state(const td_device *dev, const void *key)
{
    for (const td_kept *one = dev->kept; one; one = one->before)
        if (one->key == key)
            return one->state;
    return NULL;
}

td_status td_device_keep(td_device *dev, const void *key, void *state, void (*destroy)(void *state))
{
    td_kept *const one = calloc(1, sizeof *one);

    if (!one)
        return td_fail(TD_NO_MEMORY, "no memory to store state with device '%s'", dev->name);
    *one = (td_kept){.key = key, .state = state, .destroy = destroy, .before = dev->kept};
    dev->kept = one;
    return TD_OK;
}

td_device_kind td_device_kind_of(const td_device *dev)
{
    return dev->backend->kind;
}

const char *td_device_model(const td_device *dev)
{
    return dev->backend->model(dev->context);
}

const char *td_device_name(const td_device *dev)
{
    return dev->name;
}

/** Runs a copy or a fill of the backend and tells listeners of it. */
#define MOVE(dev, what, bytes, call)                                                                         \
    (td_device_begin_operation(dev, &(td_operation){what, TD_OP_MEMORY, 0, (double)(bytes)}),                \
     td_operation_done(dev, (call)))

/* ---- blocks ---- */

td_status td_device_alloc(td_device *dev, size_t bytes, void **out)
{
    td_status status = TD_OK;
    void *block = NULL;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");

    TD_FAIL_IF(dev->fail_in > 0 && --dev->fail_in == 0, TD_NO_MEMORY,
               "%zu bytes refused on %s, as td_device_fail_allocation asked", bytes, dev->name);
    TD_TRY(td_blocks_reserve(&dev->blocks));
    /* C allows no object larger than PTRDIFF_MAX; for smaller sizes the backend decides. */
    status = bytes <= PTRDIFF_MAX ? dev->backend->alloc(dev->context, bytes, &block) : TD_NO_MEMORY;
    if (status == TD_NO_MEMORY)
        td_fail(status, "no room for %zu bytes on %s: %zu bytes in %" PRId64 " blocks are in use", bytes,
                dev->name, dev->memory.current_bytes, dev->memory.live_blocks);
    TD_TRY(status);
    td_blocks_add(&dev->blocks, block, bytes);
    dev->memory.current_bytes += bytes;
    dev->memory.live_blocks++;
    dev->memory.allocations++;
    if (dev->memory.peak_bytes < dev->memory.current_bytes)
        dev->memory.peak_bytes = dev->memory.current_bytes;
    td_device_note(dev, TD_MEMORY_ALLOC, block, bytes, NULL);
    *out = block;
cleanup:
    if (status == TD_NO_MEMORY)
        td_device_note(dev, TD_MEMORY_OOM, NULL, bytes, NULL);
    return status;
}

bool td_device_block_around(const td_device *dev, const void *at, size_t bytes, void **block,
                            size_t *block_bytes)
{
    const td_block *const found = td_blocks_around(&dev->blocks, at, bytes);

    if (!found)
        return false;
    *block = found->address;
    *block_bytes = found->bytes;
    return true;
}

void td_device_watch_block(td_device *dev, td_block_listener *listener)
{
    listener->next = dev->block_listeners;
    dev->block_listeners = listener;
}

void td_device_unwatch_block(td_device *dev, td_block_listener *listener)
{
    td_block_listener **at = &dev->block_listeners;

    while (*at && *at != listener)
        at = &(*at)->next;
    if (*at)
        *at = listener->next;
}

/** Tells all listeners of the block that it is about to be freed. */
static void end_block(td_device *dev, const void *block)
{
    td_block_listener **at = &dev->block_listeners;

    while (*at) {
        td_block_listener *const listener = *at;

        if (listener->block != block) {
            at = &listener->next;
            continue;
        }
        *at = listener->next;
        listener->freed(listener);
    }
}

td_status td_device_free(td_device *dev, void *block)
{
    td_status status = TD_OK;
    size_t bytes = 0;

    TD_CHECK(dev, "dev is NULL");
    if (!block)
        return TD_OK;
    TD_CHECK(td_blocks_remove(&dev->blocks, block, &bytes), "block %p is not a live block of %s", block,
             dev->name);
    end_block(dev, block);
    dev->memory.current_bytes -= bytes;
    dev->memory.live_blocks--;
    td_device_note(dev, TD_MEMORY_FREE, block, bytes, NULL);
    dev->backend->free(dev->context, block, bytes);
cleanup:
    return status;
}

/* ---- copies ---- */

static td_status check_copy(const td_device *dev, const void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(src || bytes == 0, "src is NULL, bytes is %zu", bytes);
cleanup:
    return status;
}

td_status td_device_copy(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_TRY(check_copy(dev, dst, src, bytes));
    if (bytes > 0)
        TD_TRY(MOVE(dev, "copy", bytes, dev->backend->copy(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_upload(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_TRY(check_copy(dev, dst, src, bytes));
    if (bytes > 0)
        TD_TRY(MOVE(dev, "upload", bytes, dev->backend->upload(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_download(td_device *dev, void *dst, const void *src, size_t bytes)
{
    td_status status = TD_OK;

    TD_TRY(check_copy(dev, dst, src, bytes));
    if (bytes > 0)
        TD_TRY(MOVE(dev, "download", bytes, dev->backend->download(dev->context, dst, src, bytes)));
cleanup:
    return status;
}

td_status td_device_alloc_host(td_device *dev, size_t bytes, void **out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(dev, "dev is NULL");
    status = bytes <= PTRDIFF_MAX ? dev->backend->alloc_host(dev->context, bytes, out) : TD_NO_MEMORY;
    if (status == TD_NO_MEMORY)
        td_fail(status, "no room for %zu bytes of host memory for %s", bytes, dev->name);
cleanup:
    return status;
}

void td_device_free_host(td_device *dev, void *block)
{
    if (block)
        dev->backend->free_host(dev->context, block);
}

td_status td_device_fill(td_device *dev, void *dst, int value, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(dst || bytes == 0, "dst is NULL, bytes is %zu", bytes);
    TD_CHECK(value >= 0 && value <= 255, "value is %d, needs 0 to 255", value);
    if (bytes > 0)
        TD_TRY(MOVE(dev, "fill", bytes, dev->backend->fill(dev->context, dst, value, bytes)));
cleanup:
    return status;
}

td_status td_device_synchronize(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(dev->backend->synchronize(dev->context));
cleanup:
    return status;
}

/* ---- memory accounting ---- */

td_status td_device_memory(const td_device *dev, td_memory_stats *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, out);
    *out = dev->memory;
cleanup:
    return status;
}

td_status td_device_reset_peak(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    dev->memory.peak_bytes = dev->memory.current_bytes;
cleanup:
    return status;
}

td_status td_device_fail_allocation(td_device *dev, int64_t nth)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(nth >= 0, "nth is %" PRId64 ", needs at least 0", nth);
    dev->fail_in = nth;
cleanup:
    return status;
}
