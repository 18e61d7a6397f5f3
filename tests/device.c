#include "support/device_kit.h"

#include "base/clock.h"
#include "device/block_listener.h"
#include "device/state.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <limits.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the nth allocation of the host fails ---- */

void *__real_calloc(size_t count, size_t bytes);

int64_t fail_in;

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fail_in > 0 && --fail_in == 0 ? NULL : __real_calloc(count, bytes);
}

int open_cpu(void **state)
{
    return td_device_open("cpu", (td_device **)state) == TD_OK ? 0 : -1;
}

int close_cpu(void **state)
{
    fail_in = 0;
    td_device_close(*state);
    return 0;
}

static td_memory_stats memory_of(const td_device *dev)
{
    td_memory_stats stats;

    memset(&stats, 0xFF, sizeof stats);
    td_assert_ok(td_device_memory(dev, &stats));
    return stats;
}

/* ---- opening ---- */

TD_TEST(the_cpu_opens_under_its_name)
{
    td_device *dev = *state;

    assert_int_equal(td_device_kind_of(dev), TD_DEVICE_CPU);
    assert_string_equal(td_device_name(dev), "cpu");
    td_assert_ok(td_device_synchronize(dev));
    td_device_close(NULL);
}

TD_TEST(names_that_open_nothing_are_refused)
{
    static const struct {
        const char *name, *words;
    } rows[] = {
        {NULL, "name is NULL"},
        {"", "name is ''"},
        {"CPU", "name is 'CPU'"},
        {"cpu:0", "name is 'cpu:0'"},
        {"gpu", "name is 'gpu'"},
        {"cuda:", "name is 'cuda:'"},
        {"cuda:x", "name is 'cuda:x'"},
        {"cuda:-1", "cuda:<index>"},
        {"cuda:1x", "needs cpu, cuda or cuda:<index>"},
        {"cudax", "name is 'cudax'"},
        {"cuda:99999999999", "name is 'cuda:99999999999'"},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        td_device *dev = (td_device *)&dev; /* open must overwrite it */

        td_assert_refused(td_device_open(rows[i].name, &dev), TD_BAD_ARGUMENT, rows[i].words);
        assert_null(dev);
    }
}

TD_TEST(a_build_without_cuda_says_so)
{
#ifdef TANDEM_HAVE_CUDA
    skip();
#endif
    td_device *dev = (td_device *)&dev;

    td_assert_refused(td_device_open("cuda", &dev), TD_UNSUPPORTED, "device 'cuda'");
    assert_null(dev);
    td_assert_refused(td_device_open("cuda:3", &dev), TD_UNSUPPORTED, "has no CUDA");
}

TD_TEST(devices_are_counted)
{
    int count = -1;

    td_assert_ok(td_device_count(TD_DEVICE_CPU, &count));
    assert_int_equal(count, 1);
    count = -1;
    const td_status status = td_device_count(TD_DEVICE_CUDA, &count);
    if (status == TD_OK)
        assert_true(count >= 0);
    else
        assert_int_equal(count, -1); /* no CUDA in this build, or no driver: count does not change */
    td_assert_refused(td_device_count((td_device_kind)7, &count), TD_BAD_ARGUMENT, "kind is 7");
}

TD_TEST(open_undoes_itself_at_every_allocation)
{
    int64_t nth = 0;
    td_status status;

    do {
        td_device *dev = (td_device *)&dev;

        fail_in = ++nth;
        status = td_device_open("cpu", &dev);
        fail_in = 0;
        assert_true(status == TD_OK || (status == TD_NO_MEMORY && !dev));
        if (status == TD_OK)
            td_device_close(dev);
    } while (status != TD_OK);
    assert_true(nth > 1);
}

/* ---- blocks ---- */

TD_TEST(blocks_are_aligned_and_counted)
{
    static const size_t sizes[] = {0, 1, 255, 256, 257, 4096, 100003, (2 << 20) - 1, 2 << 20, (6 << 20) + 5};
    enum { BLOCKS = sizeof sizes / sizeof sizes[0] };
    td_device *dev = *state;
    void *blocks[BLOCKS];
    size_t total = 0;

    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = NULL;
        td_assert_ok(td_device_alloc(dev, sizes[i], &blocks[i]));
        assert_non_null(blocks[i]);
        assert_int_equal((uintptr_t)blocks[i] % 256, 0);
        memset(blocks[i], i + 1, sizes[i]);
        total += sizes[i];
        td_memory_stats stats = memory_of(dev);
        assert_int_equal(stats.current_bytes, total);
        assert_int_equal(stats.peak_bytes, total);
        assert_int_equal(stats.live_blocks, i + 1);
        assert_int_equal(stats.allocations, i + 1);
    }
    for (int i = 0; i < BLOCKS; i++) { /* writing to one block has changed no other block */
        const unsigned char *bytes = blocks[i];

        for (size_t b = 0; b < sizes[i]; b++)
            assert_int_equal(bytes[b], i + 1);
    }
    for (int i = 0; i < BLOCKS; i++) {
        td_assert_ok(td_device_free(dev, blocks[i]));
        total -= sizes[i];
        assert_int_equal(memory_of(dev).current_bytes, total);
    }
    assert_int_equal(memory_of(dev).live_blocks, 0);
    td_assert_ok(td_device_free(dev, NULL));
    assert_int_equal(memory_of(dev).allocations, BLOCKS);
}

TD_TEST(empty_blocks_have_addresses_of_their_own)
{
    td_device *dev = *state;
    void *a, *b;

    td_assert_ok(td_device_alloc(dev, 0, &a));
    td_assert_ok(td_device_alloc(dev, 0, &b));
    assert_true(a && b && a != b);
    td_assert_ok(td_device_free(dev, a));
    td_assert_ok(td_device_free(dev, b));
}

/* ---- listeners of blocks ---- */

typedef struct counter {
    td_block_listener listener;
    td_device *dev;
    int calls;
} counter;

/* The block still exists during the call. */
static void count_call(td_block_listener *listener)
{
    counter *c = (counter *)listener;
    void *block = NULL;
    size_t bytes = 0;

    c->calls++;
    listener->next = NULL; /* the device no longer reads it */
    memset((void *)listener->block, 1, 100);
    td_device_unwatch_block(c->dev, listener); /* it has been removed already, so this has no effect */
    assert_false(td_device_block_around(c->dev, listener->block, 1, &block, &bytes));
}

TD_TEST(listeners_are_called_before_their_block_is_freed)
{
    td_device *dev = *state;
    void *blocks[2], *found = NULL;
    size_t bytes = 0;

    for (int i = 0; i < 2; i++)
        td_assert_ok(td_device_alloc(dev, 1000, &blocks[i]));
    char *const first = blocks[0];
    assert_true(td_device_block_around(dev, first + 10, 990, &found, &bytes));
    assert_true(found == first && bytes == 1000);
    assert_true(td_device_block_around(dev, first + 1000, 0, &found, &bytes));
    assert_false(td_device_block_around(dev, first + 10, 991, &found, &bytes));
    assert_false(td_device_block_around(dev, first + 10, SIZE_MAX, &found, &bytes));
    assert_false(td_device_block_around(dev, &bytes, 1, &found, &bytes));

    counter all[4];
    for (int i = 0; i < 4; i++) {
        all[i] = (counter){{blocks[i / 3], count_call, NULL}, dev, 0};
        td_device_watch_block(dev, &all[i].listener);
    }
    td_device_unwatch_block(dev, &all[1].listener);
    td_assert_ok(td_device_free(dev, blocks[0]));
    assert_true(all[0].calls == 1 && all[1].calls == 0 && all[2].calls == 1 && all[3].calls == 0);
    td_assert_ok(td_device_free(dev, blocks[1]));
    assert_true(all[0].calls == 1 && all[3].calls == 1);
}

TD_TEST(the_peak_is_the_largest_since_the_reset)
{
    td_device *dev = *state;
    void *a, *b, *c;

    td_assert_ok(td_device_alloc(dev, 1000, &a));
    td_assert_ok(td_device_alloc(dev, 500, &b));
    td_assert_ok(td_device_free(dev, a));
    td_assert_ok(td_device_alloc(dev, 700, &c));
    assert_int_equal(memory_of(dev).peak_bytes, 1500);
    assert_int_equal(memory_of(dev).current_bytes, 1200);
    td_assert_ok(td_device_reset_peak(dev));
    assert_int_equal(memory_of(dev).peak_bytes, 1200);
    td_assert_ok(td_device_free(dev, b));
    assert_int_equal(memory_of(dev).peak_bytes, 1200);
    td_assert_ok(td_device_alloc(dev, 600, &b));
    assert_int_equal(memory_of(dev).peak_bytes, 1300);
}

TD_TEST(only_live_blocks_of_the_device_are_freed)
{
    td_device *dev = *state, *other;
    unsigned char *block;
    void *theirs;

    td_assert_ok(td_device_open("cpu", &other));
    td_assert_ok(td_device_alloc(dev, 4096, (void **)&block));
    td_assert_ok(td_device_alloc(other, 10, &theirs));
    td_assert_refused(td_device_free(dev, block + 256), TD_BAD_ARGUMENT, "is not a live block of cpu");
    td_assert_refused(td_device_free(dev, block + 4096), TD_BAD_ARGUMENT, "is not a live block of cpu");
    td_assert_refused(td_device_free(dev, theirs), TD_BAD_ARGUMENT, "is not a live block of cpu");
    assert_int_equal(memory_of(dev).live_blocks, 1);
    td_assert_ok(td_device_free(dev, block));
    td_assert_refused(td_device_free(dev, block), TD_BAD_ARGUMENT, "is not a live block of cpu"); /* twice */
    assert_int_equal(memory_of(dev).current_bytes, 0);
    td_device_close(other); /* one block was not freed; the leak checker sees whether close frees it */
}

/* Thousands of blocks are freed in a random order, with new blocks in between, so that every chain of the
 * table gets and loses entries. */
TD_TEST(any_order_of_allocs_and_frees_keeps_the_counts)
{
    enum { SLOTS = 3000, STEPS = 30000 };
    td_device *dev = *state;
    int64_t *choice = td_draw_tokens("device: any order", 0, STEPS, SLOTS);
    void **block = calloc(SLOTS, sizeof *block);
    size_t *bytes = calloc(SLOTS, sizeof *bytes), total = 0, peak = 0;
    int64_t live = 0, allocations = 0;

    assert_true(block && bytes);
    for (int i = 0; i < STEPS; i++) {
        int64_t s = choice[i];

        if (block[s]) {
            assert_int_equal(*(int64_t *)block[s], s);
            td_assert_ok(td_device_free(dev, block[s]));
            block[s] = NULL;
            total -= bytes[s];
            live--;
        } else {
            bytes[s] = 8 + (size_t)(choice[(i + 1) % STEPS] % 700);
            td_assert_ok(td_device_alloc(dev, bytes[s], &block[s]));
            *(int64_t *)block[s] = s;
            total += bytes[s];
            live++;
            allocations++;
        }
        peak = total > peak ? total : peak;
    }
    td_memory_stats stats = memory_of(dev);
    assert_int_equal(stats.current_bytes, total);
    assert_int_equal(stats.peak_bytes, peak);
    assert_int_equal(stats.live_blocks, live);
    assert_int_equal(stats.allocations, allocations);
    assert_true(live > 1000);
    for (int s = 0; s < SLOTS; s++)
        td_assert_ok(td_device_free(dev, block[s]));
    assert_int_equal(memory_of(dev).live_blocks, 0);
    free(block);
    free(bytes);
    td_fence_free(choice);
}

/* ---- allocations that fail ---- */

TD_TEST(no_memory_names_the_request_and_the_use)
{
    td_device *dev = *state;
    void *block, *huge = &huge;

    td_assert_ok(td_device_alloc(dev, 12345, &block));
    td_assert_refused(td_device_alloc(dev, SIZE_MAX, &huge), TD_NO_MEMORY,
                      "18446744073709551615 bytes on cpu");
    assert_null(huge);
    td_assert_refused(td_device_alloc(dev, SIZE_MAX / 2 + 1, &huge), TD_NO_MEMORY, "12345 bytes in 1 blocks");
    assert_int_equal(memory_of(dev).live_blocks, 1);
    assert_int_equal(memory_of(dev).peak_bytes, 12345);
    assert_int_equal(memory_of(dev).allocations, 1);
}

TD_TEST(the_nth_allocation_fails_once_when_asked_to)
{
    td_device *dev = *state;
    void *block;

    for (int nth = 1; nth <= 3; nth++) {
        td_assert_ok(td_device_fail_allocation(dev, nth));
        for (int i = 1; i <= 4; i++) {
            block = &block;
            if (i == nth) {
                td_assert_refused(td_device_alloc(dev, 77, &block), TD_NO_MEMORY, "77 bytes refused on cpu");
                assert_null(block);
            } else {
                td_assert_ok(td_device_alloc(dev, 77, &block));
            }
        }
    }
    assert_int_equal(memory_of(dev).live_blocks, 9);
    td_assert_ok(td_device_fail_allocation(dev, 1));
    td_assert_ok(td_device_fail_allocation(dev, 0)); /* the failure is cancelled */
    td_assert_ok(td_device_alloc(dev, 77, &block));
}

TD_TEST(a_table_that_cannot_grow_fails_the_allocation_alone)
{
    td_device *dev = *state;
    int64_t failed = 0;

    for (int i = 0; i < 1000; i++) {
        void *block = &block;

        fail_in = 1;
        td_status status = td_device_alloc(dev, 16, &block);
        fail_in = 0;
        if (status == TD_OK)
            continue;
        failed++;
        assert_int_equal(status, TD_NO_MEMORY);
        assert_null(block);
        assert_int_equal(memory_of(dev).live_blocks, i);
        td_assert_ok(td_device_alloc(dev, 16, &block));
    }
    assert_in_range(failed, 3, 20); /* the table doubles its size, and each time its allocation fails once */
    assert_int_equal(memory_of(dev).live_blocks, 1000);
}

/* ---- copies ---- */

TD_TEST(copies_move_exactly_the_bytes)
{
    static const size_t sizes[] = {0, 1, 1000, (1 << 20) + 3};
    td_device *dev = *state;

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        size_t bytes = sizes[s];
        unsigned char *host = td_fence_alloc(bytes), *back = td_fence_alloc(bytes);
        unsigned char *a, *b;

        td_assert_ok(td_device_alloc(dev, bytes + 2, (void **)&a));
        td_assert_ok(td_device_alloc(dev, bytes + 2, (void **)&b));
        for (size_t i = 0; i < bytes; i++)
            host[i] = (unsigned char)(i * 31 + 7);
        td_assert_ok(td_device_fill(dev, a, 0xA5, bytes + 2));
        td_assert_ok(td_device_fill(dev, b, 0, bytes + 2));
        td_assert_ok(td_device_upload(dev, a + 1, host, bytes));
        td_assert_ok(td_device_copy(dev, b + 1, a + 1, bytes));
        td_assert_ok(td_device_download(dev, back, b + 1, bytes));
        td_assert_ok(td_device_synchronize(dev));
        assert_true(bytes == 0 || memcmp(back, host, bytes) == 0);
        assert_true(a[0] == 0xA5 && a[bytes + 1] == 0xA5 && b[0] == 0 && b[bytes + 1] == 0);
        td_assert_ok(td_device_free(dev, a));
        td_assert_ok(td_device_free(dev, b));
        td_fence_free(host);
        td_fence_free(back);
    }
}

/* ---- time ---- */

TD_TEST(events_measure_what_lies_between_them)
{
    td_device *dev = *state;
    td_event *start, *stop;
    double ms = -1;
    int64_t from, to;

    td_assert_ok(td_event_create(dev, &start));
    td_assert_ok(td_event_create(dev, &stop));
    from = td_clock_ns();
    td_assert_ok(td_event_record(start));
    int64_t inner = td_clock_ns();
    while (td_clock_ns() - inner < 3000000)
        ;
    td_assert_ok(td_event_record(stop));
    to = td_clock_ns();
    td_assert_ok(td_event_elapsed_ms(start, stop, &ms));
    assert_true(ms >= 3.0 && ms <= (double)(to - from) / 1e6);
    td_assert_ok(td_event_elapsed_ms(start, start, &ms));
    assert_true(ms == 0);
    td_assert_ok(td_event_record(start)); /* an event can be recorded again */
    td_assert_ok(td_event_elapsed_ms(stop, start, &ms));
    assert_true(ms >= 0);
    td_event_destroy(start);
    td_event_destroy(stop);
    td_event_destroy(NULL);
}

TD_TEST(host_memory_and_copies)
{
    td_device *dev = *state;
    void *host, *block, *none = &none;

    td_assert_ok(td_device_alloc_host(dev, 100, &host));
    td_assert_ok(td_device_alloc(dev, 100, &block));
    memset(host, 7, 100);
    td_assert_ok(td_device_upload(dev, block, host, 100));
    memset(host, 0, 100);
    td_assert_ok(td_device_download(dev, host, block, 99));
    assert_int_equal(((char *)host)[98], 7);
    assert_int_equal(((char *)host)[99], 0);
    td_assert_refused(td_device_alloc_host(dev, SIZE_MAX, &none), TD_NO_MEMORY,
                      "bytes of host memory for cpu");
    assert_null(none);
    td_device_free_host(dev, NULL);
    td_device_free_host(dev, host);
    td_assert_ok(td_device_free(dev, block));
}

TD_TEST(an_event_without_memory_is_null)
{
    td_event *none = (td_event *)&none;

    fail_in = 1;
    const td_status status = td_event_create(*state, &none);
    fail_in = 0;
    assert_int_equal(status, TD_NO_MEMORY);
    assert_null(none);
}

/* ---- threads ---- */

static int count_threads(void)
{
    int count = 0;

#pragma omp parallel reduction(+ : count)
    count++;
    return count;
}

TD_TEST(a_child_of_fork_has_one_thread_and_does_not_hang)
{
    const int before = td_cpu_threads();
    int ended;

    td_assert_ok(td_cpu_set_threads(2));
    assert_int_equal(count_threads(), 2); /* OpenMP's threads now exist and wait for work */
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        const bool right = td_cpu_threads() == 1 && count_threads() == 1 &&
                           td_cpu_set_threads(2) == TD_BAD_STATE && td_cpu_set_threads(1) == TD_OK;
        exit(right ? 0 : 1);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    assert_int_equal(count_threads(), 2); /* the parent's number of threads does not change */
    td_assert_ok(td_cpu_set_threads(before));
}

TD_TEST(the_number_of_threads_is_openmps)
{
    int before = td_cpu_threads();

    assert_int_equal(before, omp_get_max_threads());
    td_assert_ok(td_cpu_set_threads(3));
    assert_int_equal(td_cpu_threads(), 3);
    assert_int_equal(omp_get_max_threads(), 3);
    assert_int_equal(td_cpu_threads(), 3);
    td_assert_ok(td_cpu_set_threads(TD_CPU_MOST_THREADS));
    assert_int_equal(td_cpu_threads(), TD_CPU_MOST_THREADS);
    td_assert_ok(td_cpu_set_threads(before));
}

/* ---- state that modules keep with a device ---- */

static int destroyed[3];
static int destroyed_count;

static void note_destroyed(void *state)
{
    destroyed[destroyed_count++] = *(int *)state;
}

TD_TEST(state_has_a_key_and_is_freed_with_the_device)
{
    static const char keys[3];
    int values[] = {10, 11, 12};
    td_device *dev;

    destroyed_count = 0;
    td_assert_ok(td_device_open("cpu", &dev));
    assert_null(td_device_state(dev, &keys[0]));
    fail_in = 1;
    td_assert_refused(td_device_keep(dev, &keys[0], &values[0], note_destroyed), TD_NO_MEMORY, "no memory");
    assert_null(td_device_state(dev, &keys[0]));
    for (int i = 0; i < 3; i++)
        td_assert_ok(td_device_keep(dev, &keys[i], &values[i], note_destroyed));
    for (int i = 0; i < 3; i++)
        assert_ptr_equal(td_device_state(dev, &keys[i]), &values[i]);
    td_device_close(dev);
    assert_int_equal(destroyed_count, 3);
    for (int i = 0; i < 3; i++) /* The last state is destroyed first, because it may use earlier ones. */
        assert_int_equal(destroyed[i], 12 - i);
}

int main(void)
{
    return td_run_each("device", open_cpu, close_cpu, NULL, NULL) + device_history_group();
}
