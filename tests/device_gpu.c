/* The CUDA device: the tests of device.c whose results may differ on a GPU. */
#include "device/device.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/gpu.h"
#include "support/test.h"

#include <cuda_runtime_api.h>

static td_device *gpu;

TD_TEST(an_index_beyond_the_machine_is_refused)
{
    td_device *dev = gpu;

    td_assert_refused(td_device_open("cuda:9999", &dev), TD_BAD_ARGUMENT,
                      "device 'cuda:9999': this machine has");
    assert_null(dev);
    td_assert_ok(td_device_open("cuda:0", &dev));
    assert_string_equal(td_device_name(dev), "cuda:0");
    assert_int_equal(td_device_kind_of(dev), TD_DEVICE_CUDA);
    td_device_close(dev);
}

TD_TEST(bytes_travel_and_come_back)
{
    enum { BYTES = 100003 };
    unsigned char *sent = malloc(BYTES);
    void *block = td_gpu_block(gpu, NULL, BYTES), *copy = td_gpu_block(gpu, NULL, BYTES);

    for (size_t i = 0; i < BYTES; i++)
        sent[i] = (unsigned char)(i * 7 % 251);
    td_assert_ok(td_device_upload(gpu, block, sent, BYTES));
    td_assert_ok(td_device_copy(gpu, copy, block, BYTES));
    unsigned char *got = td_gpu_read(gpu, copy, BYTES);
    assert_memory_equal(got, sent, BYTES);
    free(got);
    td_assert_ok(td_device_fill(gpu, copy, 0x5A, BYTES));
    got = td_gpu_read(gpu, copy, BYTES);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(got[i], 0x5A);
    free(got);
    free(sent);
    td_gpu_free(gpu, block);
    td_gpu_free(gpu, copy);
}

/* Blocks of at least 2 MiB are mapped. Twelve blocks, one after the other, each of most of the GPU's memory,
 * show that a freed block is given back. */
TD_TEST(blocks_of_any_size_come_and_go)
{
    static const size_t sizes[] = {1, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, (6 << 20) + 5};
    enum { SIZES = sizeof sizes / sizeof *sizes, TIMES = 12 };
    void *blocks[SIZES], *most;
    size_t free_bytes, all_bytes;

    for (int i = 0; i < SIZES; i++) {
        td_assert_ok(td_device_alloc(gpu, sizes[i], &blocks[i]));
        assert_int_equal((uintptr_t)blocks[i] % 256, 0);
        td_assert_ok(td_device_fill(gpu, blocks[i], i + 1, sizes[i]));
    }
    for (int i = 0; i < SIZES; i++) {
        unsigned char *got = malloc(sizes[i]);

        td_assert_ok(td_device_download(gpu, got, blocks[i], sizes[i]));
        for (size_t b = 0; b < sizes[i]; b++)
            assert_int_equal(got[b], i + 1);
        free(got);
        td_assert_ok(td_device_free(gpu, blocks[i]));
    }
    assert_int_equal(cudaMemGetInfo(&free_bytes, &all_bytes), cudaSuccess);
    for (int i = 0; i < TIMES; i++) {
        td_assert_ok(td_device_alloc(gpu, free_bytes / 5 * 4, &most));
        td_assert_ok(td_device_fill(gpu, most, 0, free_bytes / 5 * 4));
        td_assert_ok(td_device_free(gpu, most));
    }
}

TD_TEST(what_does_not_fit_is_refused_and_the_rest_goes_on)
{
    td_memory_stats before, after;
    void *block = &before;

    td_assert_ok(td_device_memory(gpu, &before));
    td_assert_refused(td_device_alloc(gpu, (size_t)1 << 45, &block), TD_NO_MEMORY,
                      "no room for 35184372088832 bytes on cuda:0");
    assert_null(block);
    td_assert_ok(td_device_alloc(gpu, 1 << 20, &block));
    td_assert_ok(td_device_fill(gpu, block, 1, 1 << 20));
    td_assert_ok(td_device_synchronize(gpu));
    td_assert_ok(td_device_memory(gpu, &after));
    assert_int_equal(after.current_bytes, before.current_bytes + (1 << 20));
    assert_int_equal((uintptr_t)block % 256, 0);
    td_assert_ok(td_device_free(gpu, block));
}

/* Another stream waits for an event that follows a long queue on one stream. */
TD_TEST(a_stream_waits_for_the_event_of_another)
{
    enum { BYTES = 256 << 20, ROUNDS = 20 };
    td_stream *side = NULL;
    td_event *start = NULL, *stop = NULL;
    unsigned char last = 0;
    void *big;
    double ms = -1;

    td_assert_ok(td_device_alloc(gpu, BYTES, &big));
    td_assert_ok(td_stream_create(gpu, &side));
    td_assert_ok(td_event_create(gpu, &start));
    td_assert_ok(td_event_create(gpu, &stop));
    td_assert_refused(td_event_wait(stop), TD_BAD_STATE, "never recorded");

    td_assert_ok(td_event_record(start));
    for (int i = 1; i <= ROUNDS; i++)
        td_assert_ok(td_device_fill(gpu, big, i, BYTES));
    td_assert_ok(td_event_record(stop));
    td_assert_ok(td_device_set_stream(gpu, side));
    td_assert_ok(td_event_wait(stop));
    td_assert_ok(td_device_download(gpu, &last, (char *)big + BYTES - 1, 1));
    assert_int_equal(last, ROUNDS);
    td_assert_ok(td_device_set_stream(gpu, NULL));
    td_assert_ok(td_event_elapsed_ms(start, stop, &ms));
    assert_true(ms > 0.1); /* 5 GiB take longer than this on any GPU */

    td_event_destroy(start);
    td_event_destroy(stop);
    td_stream_destroy(side);
    td_assert_ok(td_device_free(gpu, big));
}

TD_TEST(a_graph_replays_what_was_captured)
{
    td_graph *graph = NULL;
    unsigned char *got;
    void *from = td_gpu_block(gpu, NULL, 1000), *to = td_gpu_block(gpu, NULL, 1000);

    td_assert_refused(td_graph_end(gpu, &graph), TD_BAD_STATE, "no capture is running");
    td_assert_ok(td_graph_begin(gpu));
    td_assert_refused(td_graph_begin(gpu), TD_BAD_STATE, "a capture is running");
    td_assert_ok(td_device_copy(gpu, to, from, 1000));
    td_assert_ok(td_graph_end(gpu, &graph));
    for (int round = 1; round <= 2; round++) {
        td_assert_ok(td_device_fill(gpu, from, round, 1000));
        td_assert_ok(td_graph_launch(graph));
        got = td_gpu_read(gpu, to, 1000);
        for (int i = 0; i < 1000; i++)
            assert_int_equal(got[i], round);
        free(got);
    }
    td_graph_destroy(graph);

    /* Fills keep their order between the copies, at any size and address. */
    static const struct {
        size_t at, bytes;
    } fills[] = {{0, 4}, {6, 3}, {13, 1}, {16, 1000}, {2048, 100000}, {200001, 70001}};
    const size_t all = 300000;
    void *before = td_gpu_block(gpu, NULL, all), *block = td_gpu_block(gpu, NULL, all),
         *after = td_gpu_block(gpu, NULL, all);
    td_assert_ok(td_graph_begin(gpu));
    for (size_t i = 0; i < sizeof fills / sizeof *fills; i++)
        td_assert_ok(td_device_fill(gpu, (char *)block + fills[i].at, 20 + (int)i, fills[i].bytes));
    td_assert_ok(td_device_copy(gpu, before, block, all));
    for (size_t i = 0; i < sizeof fills / sizeof *fills; i++)
        td_assert_ok(td_device_fill(gpu, (char *)block + fills[i].at, 40 + (int)i, fills[i].bytes));
    td_assert_ok(td_device_copy(gpu, after, block, all));
    td_assert_ok(td_graph_end(gpu, &graph));
    for (int round = 1; round <= 2; round++) {
        td_assert_ok(td_device_fill(gpu, block, round, all));
        td_assert_ok(td_graph_launch(graph));
        for (int which = 0; which < 2; which++) {
            got = td_gpu_read(gpu, which ? after : before, all);
            for (size_t i = 0; i < all; i++) {
                int expected = round;

                for (size_t f = 0; f < sizeof fills / sizeof *fills; f++)
                    if (i >= fills[f].at && i < fills[f].at + fills[f].bytes)
                        expected = 20 + 20 * which + (int)f;
                assert_int_equal(got[i], expected);
            }
            free(got);
        }
    }
    td_graph_destroy(graph);

    /* A capture does not allow waits. The capture fails, and the device still works. */
    td_assert_ok(td_graph_begin(gpu));
    assert_int_not_equal(td_device_synchronize(gpu), TD_OK);
    assert_int_not_equal(td_graph_end(gpu, &graph), TD_OK);
    assert_null(graph);
    td_assert_ok(td_device_fill(gpu, to, 9, 1000));
    got = td_gpu_read(gpu, to, 1000);
    assert_int_equal(got[999], 9);
    free(got);
    td_gpu_free(gpu, from);
    td_gpu_free(gpu, to);
}

/* A caller may pass CUDA's default stream. */
TD_TEST(a_callers_stream_is_used)
{
    td_stream *wrapped = NULL;
    void *block = td_gpu_block(gpu, NULL, 64);

    td_assert_ok(td_device_synchronize(gpu));
    td_assert_ok(td_stream_wrap(gpu, NULL, &wrapped));
    td_assert_ok(td_device_set_stream(gpu, wrapped));
    td_assert_ok(td_device_fill(gpu, block, 3, 64));
    unsigned char *got = td_gpu_read(gpu, block, 64);
    assert_int_equal(got[63], 3);
    free(got);
    td_assert_ok(td_device_set_stream(gpu, NULL));
    td_stream_destroy(wrapped);
    td_gpu_free(gpu, block);
}

/* Needs a second GPU. A thread whose current GPU is the first works on the second. tests/cuda_double.c tests
 * every call. */
TD_TEST(the_threads_gpu_stays_current)
{
    int count = 0, current = -1;
    char name[24];
    td_device *other;
    void *block;

    assert_int_equal(cudaGetDeviceCount(&count), cudaSuccess);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    snprintf(name, sizeof name, "cuda:%d", count - 1);
    td_assert_ok(td_device_open(name, &other));
    td_assert_ok(td_device_alloc(other, 64, &block));
    td_assert_ok(td_device_fill(other, block, 1, 64));
    td_assert_ok(td_device_synchronize(other));
    assert_int_equal(cudaGetDevice(&current), cudaSuccess);
    assert_int_equal(current, 0);
    td_device_close(other);
    assert_int_equal(cudaGetDevice(&current), cudaSuccess);
    assert_int_equal(current, 0);
}

int main(void)
{
    gpu = td_gpu_open();
    const int failed = td_run_tests("device on a GPU", NULL, NULL);
    td_device_close(gpu);
    return failed;
}
