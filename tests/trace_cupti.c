/* A GPU's trace without a GPU: a double of CUPTI (support/fake_cupti.h) records what the test gives it.
 * trace_gpu.c tests the real CUPTI. */
#include "trace/trace.h"

#include "device/listen.h"
#include "support/compare.h"
#include "support/fake_cupti.h"
#include "support/file_kit.h"
#include "support/test.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cjson/cJSON.h>

/* ---- the doubles ---- */

/* If true, the device says that it is a GPU. Only the trace asks during that time. */
static bool pretend;
td_device_kind __real_td_device_kind_of(const td_device *of);
td_device_kind __wrap_td_device_kind_of(const td_device *of)
{
    return pretend ? TD_DEVICE_CUDA : __real_td_device_kind_of(of);
}

/* The place of the library. 0: it is loaded; 1: found by its name; 2: in the toolkit's folder; 3: missing. */
static int found_at;
static const char *lacks; /* a function that is missing; NULL: none */
void *__real_dlopen(const char *file, int flags);
void *__wrap_dlopen(const char *file, int flags)
{
    if (!file || !strstr(file, "libcupti.so.13"))
        return __real_dlopen(file, flags);
    const int place = flags & RTLD_NOLOAD ? 0 : file[0] == '/' ? 2 : 1;
    return place == found_at ? __real_dlopen(FAKE_CUPTI, RTLD_NOW | RTLD_LOCAL)
                             : __real_dlopen("/nowhere/libcupti.so.13", RTLD_NOW);
}

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    return lacks && strcmp(name, lacks) == 0 ? NULL : __real_dlsym(library, name);
}

/* ---- fixtures ---- */

static td_device *dev;
static fake_cupti *fake;
static td_trace *trace;

static int set_up(void **unused)
{
    void *library = __real_dlopen(FAKE_CUPTI, RTLD_NOW | RTLD_LOCAL);
    fake_cupti *(*reset)(void) = NULL;

    (void)unused;
    if (!library)
        return -1;
    *(void **)&reset = __real_dlsym(library, "fake_cupti_reset");
    fake = reset();
    found_at = 0;
    lacks = NULL;
    trace = NULL;
    return td_device_open("cpu", &dev) == TD_OK ? 0 : -1;
}

static int tear_down(void **unused)
{
    (void)unused;
    td_trace_destroy(trace);
    td_device_close(dev);
    return fake->subscriptions == 0 && fake->enabled <= 0 ? 0 : -1;
}

static void begin(void)
{
    pretend = true;
    td_assert_ok(td_trace_begin(dev, &trace));
    pretend = false;
}

static td_trace_info end(void)
{
    td_trace_info info;

    td_assert_ok(td_trace_end(trace));
    td_assert_ok(td_trace_info_of(trace, &info));
    return info;
}

static void push(const char *label)
{
    td_assert_ok(td_device_push_label(dev, label));
}

static void pop(void)
{
    td_assert_ok(td_device_pop_label(dev));
}

/* A launch: a call of the runtime that takes ten ticks of the clock, in this thread or in another. */
static void call_from(uint32_t correlation, CUpti_CallbackId id, uint32_t thread)
{
    const CUpti_ActivityAPI record = {.kind = CUPTI_ACTIVITY_KIND_RUNTIME,
                                      .cbid = id,
                                      .start = fake->now,
                                      .end = fake->now + 10,
                                      .threadId = thread,
                                      .correlationId = correlation};

    fake->now += 10;
    assert_true(fake->put(&record, sizeof record));
}

/* A launch in this thread. */
static void launch(uint32_t correlation, CUpti_CallbackId id)
{
    fake->launch(id, correlation);
    call_from(correlation, id, (uint32_t)gettid());
}

static void call(uint32_t correlation)
{
    launch(correlation, CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_v13000);
}

static void *launch_apart(void *correlation)
{
    fake->launch(CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_v13000, *(uint32_t *)correlation);
    return NULL;
}

static void kernel(const char *name, uint32_t correlation, uint64_t begin_ns, uint64_t end_ns, uint64_t node)
{
    const CUpti_ActivityKernel10 record = {.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                           .start = begin_ns,
                                           .end = end_ns,
                                           .deviceId = 1,
                                           .contextId = 2,
                                           .streamId = 7,
                                           .gridX = 11,
                                           .gridY = 12,
                                           .gridZ = 13,
                                           .blockX = 64,
                                           .blockY = 2,
                                           .blockZ = 1,
                                           .registersPerThread = 40,
                                           .staticSharedMemory = 100,
                                           .dynamicSharedMemory = 28,
                                           .correlationId = correlation,
                                           .name = name,
                                           .graphNodeId = node,
                                           .graphId = node ? 3 : 0,
                                           .clusterX = 2,
                                           .clusterY = 1,
                                           .clusterZ = 1};

    assert_true(fake->put(&record, sizeof record));
}

/* An operation that launches a kernel. The kernel runs `later` ticks after its launch. */
static void operate(const char *name, td_op_class op_class, double flops, const char *kernel_name,
                    uint32_t correlation, uint64_t later, uint64_t takes)
{
    td_device_begin_operation(dev, &(td_operation){name, op_class, flops, 2 * flops});
    const uint64_t at = fake->now + later;
    call(correlation);
    td_device_end_operation(dev);
    kernel(kernel_name, correlation, at, at + takes, 0);
}

/* ---- attribution ---- */

static const td_trace_activity *activities(int64_t want)
{
    const td_trace_activity *all;
    int64_t count;

    td_assert_ok(td_trace_activities(trace, &all, &count));
    assert_int_equal(count, want);
    return all;
}

TD_BODY(kernels_belong_to_the_range_that_launched_them)
{
    const td_trace_range *ranges;
    td_trace_total forward, all;
    int64_t count;

    begin();
    assert_true(fake->system_threads && fake->zeroed && fake->callbacks >= 8);
    push("warmup");
    operate("gemm", TD_OP_MATMUL, 10, "nvjet_sm90_tst_128x128_TNT", 1, 0, 50);
    pop();
    for (uint32_t step = 0; step < 3; step++) {
        push("step");
        push("forward");
        operate("gemm", TD_OP_MATMUL, 10, "nvjet_sm90_tst_128x128_TNT", 10 + 10 * step, 1000, 50);
        push("loss");
        operate("cross_entropy_forward", TD_OP_REDUCTION, 0, "td_softmax_cross_entropy", 11 + 10 * step, 1050,
                20);
        pop();
        pop();
        push("backward");
        push("optimizer");
        operate("adamw_update", TD_OP_OPTIMIZER, 0, "td_optimizer_adamw", 12 + 10 * step, 1200, 30);
        pop();
        call(13 + 10 * step); /* a kernel outside of all operations: its name decides */
        kernel("_ZN7cutlass6KernelI4gemmEEvT_", 13 + 10 * step, fake->now + 2000, fake->now + 2040, 0);
        pop();
        pop();
        fake->now += 10000;
    }
    const td_trace_info info = end();
    assert_true(info.gpu);
    assert_string_equal(info.cupti, "");
    assert_int_equal(info.cupti_version, 130001);
    assert_int_equal(info.steps, 3);
    assert_int_equal(info.activities, 12);
    assert_int_equal(info.unattributed, 0);
    assert_int_equal(info.dropped + info.without_times, 0);

    const td_trace_activity *a = activities(13);
    td_assert_ok(td_trace_ranges(trace, &ranges, &count));
    assert_int_equal(a[0].step, -1); /* warm-up */
    assert_int_equal(a[1].step, 0);
    assert_int_equal(a[1].phase, TD_TRACE_FORWARD);
    assert_int_equal(a[1].op_class, TD_OP_MATMUL);
    assert_string_equal(ranges[a[1].range].name, "gemm");
    assert_int_equal(a[2].phase, TD_TRACE_LOSS);
    /* the operation declares it; the name does not matter */
    assert_int_equal(a[2].op_class, TD_OP_REDUCTION);
    assert_int_equal(a[3].phase, TD_TRACE_OPTIMIZER); /* during the backward pass */
    assert_int_equal(a[4].phase, TD_TRACE_BACKWARD);
    assert_int_equal(a[4].op_class, TD_OP_MATMUL); /* by its name */
    assert_string_equal(a[4].name, "cutlass::Kernel<gemm>");
    assert_int_equal(a[12].step, 2);
    assert_int_equal(a[1].stream, 7);
    assert_int_equal(a[1].registers, 40);
    assert_int_equal(a[1].cluster[0], 2);
    assert_true(a[1].call >= 0);

    td_assert_ok(td_trace_total_of(trace, 1u << TD_TRACE_FORWARD | 1u << TD_TRACE_LOSS, &forward));
    assert_true(forward.activities == 2 && forward.operations[TD_OP_MATMUL] == 1);
    assert_true(forward.flops[TD_OP_MATMUL] == 10);
    assert_true(forward.sum_ms == 70 / 1e6 && forward.by_class_ms[TD_OP_MATMUL] == 50 / 1e6);
    assert_true(forward.busy_ms == 70 / 1e6 && forward.window_ms > forward.busy_ms);
    td_assert_ok(td_trace_total_of(trace, TD_TRACE_ALL_PHASES, &all));
    assert_true(all.activities == 4 && all.sum_ms == 140 / 1e6);
}

/* A table counts the time in which kernels of one name overlap once. It shows in which part nothing else ran,
 * also no kernel of another phase. A dependent launch waits next to the kernel before it. */
TD_BODY(tables_count_overlapping_kernels_once)
{
    td_trace_kernel rows[4];
    td_trace_total total;
    int64_t count;

    begin();
    push("step");
    push("backward");
    const uint64_t at = fake->now + 1000;
    call(1);
    kernel("nvjet_gemm", 1, at + 50, at + 150, 0);
    kernel("nvjet_gemm", 1, at + 100, at + 190, 0);
    kernel("td_elem_waits", 1, at + 140, at + 200, 0);
    push("optimizer");
    call(2);
    kernel("td_optimizer_adamw", 2, at, at + 100, 0);
    pop();
    pop();
    pop();
    (void)end();
    td_assert_ok(td_trace_kernels(trace, 1u << TD_TRACE_BACKWARD, 4, rows, &count));
    assert_int_equal(count, 2);
    assert_string_equal(rows[0].name, "nvjet_gemm"); /* 50 to 190, alone 100 to 140 */
    assert_true(rows[0].total_ns == 140 && rows[0].alone_ns == 40 && rows[0].share == 140. / 150);
    assert_true(rows[0].ns.mean == 95);
    assert_true(rows[1].total_ns == 60 && rows[1].alone_ns == 10 && rows[1].share == 60. / 150);
    td_assert_ok(td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 4, rows, &count));
    assert_int_equal(count, 3);
    assert_true(rows[1].total_ns == 100 && rows[1].alone_ns == 50 && rows[1].share == 0.5);
    td_assert_ok(td_trace_total_of(trace, 1u << TD_TRACE_BACKWARD, &total));
    assert_true(total.by_class_ms[TD_OP_MATMUL] == 140 / 1e6 && total.busy_ms == 150 / 1e6);
    assert_true(total.sum_ms == 250 / 1e6);
}

/* The kernels of a replay only have the id of the launch. The node of each kernel determines its range. */
TD_BODY(nodes_of_graphs_belong_to_the_range_that_they_were_captured_in)
{
    const td_trace_range *ranges;
    td_trace_attention attention;
    td_trace_label labels[8];
    td_trace_total total;
    int64_t count;

    begin();
    fake->node(99, 0); /* captured outside of all ranges */
    push("warmup");
    push("forward");
    push("scaled dot product attention");
    push("computing attention scores");
    td_device_begin_operation(dev, &(td_operation){"gemm", TD_OP_MATMUL, 800, 80});
    fake->node(101, 0);
    td_device_end_operation(dev);
    pop();
    push("computing softmax");
    td_device_begin_operation(dev, &(td_operation){"softmax_forward", TD_OP_SOFTMAX, 40, 20});
    fake->node(102, 0);
    td_device_end_operation(dev);
    pop();
    pop();
    pop();
    /* Instantiation clones the nodes, also those that were never seen. CUPTI first reports a new node. If the
     * captured graph has lost a node, that node's id is lower than the clone's, and another clone may have
     * it. */
    fake->node(200, 0);
    fake->node(201, 101);
    fake->node(201, 0);
    fake->node(202, 102);
    fake->node(202, 0);
    fake->node(203, 99);
    fake->node(UINT64_MAX, 101); /* a node without an id */
    fake->node(204, UINT64_MAX);
    pop();
    for (uint32_t step = 0; step < 2; step++) {
        push("step");
        push("forward");
        const uint64_t at = fake->now;
        launch(50 + step, CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000);
        pop();
        pop();
        kernel("first", 50 + step, at + 100, at + 140, 201);
        kernel("second", 50 + step, at + 150, at + 170, 202);
        kernel("third", 50 + step, at + 180, at + 190, 203);
        fake->now += 1000;
    }
    (void)end();
    const td_trace_activity *a = activities(6);
    td_assert_ok(td_trace_ranges(trace, &ranges, &count));
    assert_string_equal(ranges[a[0].range].name, "gemm");
    assert_int_equal(a[0].part, TD_TRACE_SCORES);
    assert_int_equal(a[0].op_class, TD_OP_MATMUL);
    assert_int_equal(a[0].phase, TD_TRACE_FORWARD);
    assert_int_equal(a[0].step, 0);
    assert_int_equal(a[4].step, 1);
    assert_int_equal(a[4].part, TD_TRACE_SOFTMAX);
    assert_string_equal(ranges[a[2].range].name, "forward"); /* the launch's range, because none is better */
    assert_int_equal(a[2].part, TD_TRACE_NO_ATTENTION);

    td_assert_ok(td_trace_attention_of(trace, &attention));
    assert_true(attention.ms[TD_TRACE_SCORES] == 40 / 1e6 && attention.flops[TD_TRACE_SCORES] == 800);
    assert_true(attention.ms[TD_TRACE_SOFTMAX] == 20 / 1e6 && attention.bytes[TD_TRACE_SOFTMAX] == 20);
    assert_true(attention.ms[TD_TRACE_VALUES] == 0 && attention.ms[TD_TRACE_FUSED] == 0);
    td_assert_ok(td_trace_total_of(trace, 1u << TD_TRACE_FORWARD, &total));
    assert_true(total.operations[TD_OP_MATMUL] == 1 && total.flops[TD_OP_MATMUL] == 800);
    assert_true(total.activities == 3 && total.window_ms == 90 / 1e6 && total.busy_ms == 70 / 1e6);
    td_assert_ok(td_trace_labels(trace, 8, labels, &count));
    assert_int_equal(count, 4);
    assert_string_equal(labels[0].name, "forward");
    assert_string_equal(labels[1].name, "scaled dot product attention");
    assert_int_equal(labels[1].instances, 2); /* one capture, two replays */
    assert_true(labels[1].total_ns == 2 * 70 && labels[1].host_total_ns == 0);
    assert_int_equal(labels[1].activities, 4);
}

TD_BODY(a_fill_that_became_a_kernel_belongs_to_what_its_stream_runs_next)
{
    const td_trace_range *ranges;
    int64_t count;

    begin();
    push("warmup");
    push("backward");
    td_device_begin_operation(dev, &(td_operation){"gemm", TD_OP_MATMUL, 800, 80});
    fake->node(101, 0);
    td_device_end_operation(dev);
    pop();
    fake->node(102, 0); /* when the capture ends */
    fake->node(103, 0);
    for (uint64_t clone = 201; clone <= 203; clone++)
        fake->node(clone, clone - 100);
    pop();
    push("step");
    const uint64_t at = fake->now;
    launch(50, CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000);
    pop();
    kernel("td_fill", 50, at + 100, at + 101, 202);
    kernel("td_fill", 50, at + 102, at + 103, 203);
    kernel("first", 50, at + 104, at + 140, 201);
    kernel("td_fill", 50, at + 150, at + 151, 203); /* nothing follows */
    (void)end();
    const td_trace_activity *a = activities(4);
    td_assert_ok(td_trace_ranges(trace, &ranges, &count));
    for (int i = 0; i < 3; i++) {
        assert_string_equal(ranges[a[i].range].name, "gemm");
        assert_int_equal(a[i].phase, TD_TRACE_BACKWARD);
        assert_int_equal(a[i].op_class, i < 2 ? TD_OP_MEMORY : TD_OP_MATMUL);
    }
    assert_string_equal(ranges[a[3].range].name, "warmup");
}

TD_BODY(copies_and_fills_are_there)
{
    CUpti_ActivityMemcpy6 copy = {.kind = CUPTI_ACTIVITY_KIND_MEMCPY,
                                  .bytes = 4096,
                                  .start = 5000,
                                  .end = 5100,
                                  .correlationId = 77, /* an id of the driver, which has no record */
                                  .runtimeCorrelationId = 5};
    const CUpti_ActivityMemcpyPtoP4 peer = {
        .kind = CUPTI_ACTIVITY_KIND_MEMCPY2, .bytes = 64, .start = 5700, .end = 5800, .correlationId = 5};
    const CUpti_ActivityMemset4 fill = {
        .kind = CUPTI_ACTIVITY_KIND_MEMSET, .bytes = 32, .start = 5900, .end = 6000, .correlationId = 5};
    const CUpti_ActivitySynchronization2 other = {.kind = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION};
    static const uint8_t kinds[] = {CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, CUPTI_ACTIVITY_MEMCPY_KIND_DTOH,
                                    CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, CUPTI_ACTIVITY_MEMCPY_KIND_PTOP,
                                    CUPTI_ACTIVITY_MEMCPY_KIND_HTOH};
    static const char *const names[] = {"[CUDA memcpy Host-to-Device]",
                                        "[CUDA memcpy Device-to-Host]",
                                        "[CUDA memcpy Device-to-Device]",
                                        "[CUDA memcpy Peer-to-Peer]",
                                        "[CUDA memcpy]",
                                        "[CUDA memcpy Peer-to-Peer]",
                                        "[CUDA memset]"};

    begin();
    push("forward");
    td_device_begin_operation(dev, &(td_operation){"gemm", TD_OP_MATMUL, 0, 0}); /* declares only kernels */
    call(5);
    td_device_end_operation(dev);
    pop();
    for (int i = 0; i < 5; i++) {
        copy.copyKind = kinds[i];
        assert_true(fake->put(&copy, sizeof copy));
        copy.start += 110;
        copy.end += 110;
    }
    assert_true(fake->put(&peer, sizeof peer));
    assert_true(fake->put(&fill, sizeof fill));
    assert_true(fake->put(&other, sizeof other));
    const td_trace_info info = end();
    assert_int_equal(info.steps, 1); /* no label marks the begin of a step */
    const td_trace_activity *a = activities(7);
    for (int i = 0; i < 7; i++) {
        assert_string_equal(a[i].name, names[i]);
        assert_int_equal(a[i].op_class, TD_OP_MEMORY);
        assert_int_equal(a[i].phase, TD_TRACE_FORWARD);
        assert_int_equal(a[i].step, 0);
    }
    assert_int_equal(a[0].bytes, 4096);
    assert_int_equal(a[6].kind, TD_TRACE_FILL);
}

TD_BODY(what_nobody_launched_in_a_range_is_counted)
{
    begin();
    push("step");
    pthread_t another;
    uint32_t first = 1;
    assert_int_equal(pthread_create(&another, NULL, launch_apart, &first), 0);
    assert_int_equal(pthread_join(another, NULL), 0);
    call_from(1, CUPTI_RUNTIME_TRACE_CBID___cudaLaunchKernel_v13000, 1);
    kernel("theirs", 1, fake->now, fake->now + 5, 0);
    kernel("of a call that is not known", 2, fake->now, fake->now + 5, 0);
    push("forward");
    fake->now += 100;
    pop();
    pop();
    kernel("after the step", 3, fake->now + 50, fake->now + 60, 0);
    kernel("without times", 4, 0, 0, 0);
    kernel(NULL, 5, fake->now + 100, fake->now + 110, 0);
    fake->dropped = 12;
    fake->no_names = true;
    const td_trace_info info = end();
    assert_int_equal(info.activities, 2);
    assert_int_equal(info.unattributed, 2);
    assert_int_equal(info.without_times, 1);
    assert_int_equal(info.dropped, 12);
    const td_trace_activity *a = activities(4);
    assert_int_equal(a[0].phase, TD_TRACE_ELSEWHERE);
    assert_int_equal(a[0].range, -1);
    assert_int_equal(a[2].step, -1);
    assert_string_equal(a[3].name, "a kernel without a name");
}

/* More records than a buffer holds, and more than all buffers hold. */
TD_BODY(many_records_come_in_many_buffers)
{
    enum { MANY = 40000 };

    begin();
    push("step");
    call(1);
    for (uint64_t i = 0; i < MANY; i++)
        kernel(i % 2 ? "nvjet_a" : "cublasLt::splitKreduce_kernel", 1, 2000 + 10 * i, 2005 + 10 * i, 0);
    pop();
    const td_trace_info info = end();
    td_trace_kernel rows[3];
    td_trace_total total;
    int64_t count;

    assert_int_equal(info.activities, MANY);
    (void)activities(MANY);
    td_assert_ok(td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 3, rows, &count));
    assert_int_equal(count, 2);
    assert_int_equal(rows[0].instances, MANY / 2);
    assert_int_equal(rows[0].op_class, TD_OP_MATMUL);
    td_assert_ok(td_trace_total_of(trace, TD_TRACE_ALL_PHASES, &total));
    assert_true(total.activities == MANY && total.by_class[TD_OP_MATMUL] == MANY / 2.0);
}

TD_BODY(tens_of_thousands_of_nodes_are_found)
{
    enum { MANY = 30000 };

    begin();
    push("step");
    push("forward");
    for (uint64_t i = 1; i <= MANY; i++)
        fake->node(i, 0);
    pop();
    push("backward");
    for (uint64_t i = 1; i <= MANY; i += 100)
        fake->node(MANY + i, i);
    call(1);
    for (uint64_t i = 1; i <= MANY; i += 100)
        kernel("k", 1, 5000 + 10 * i, 5001 + 10 * i, MANY + i);
    pop();
    pop();
    (void)end();
    const td_trace_activity *a = activities(MANY / 100);
    for (int i = 0; i < MANY / 100; i++)
        assert_int_equal(a[i].phase, TD_TRACE_FORWARD);
}

/* ---- missing functions and records ---- */

static void check_without(const char *words)
{
    const td_trace_activity *all;
    td_trace_total total;
    int64_t count;

    begin();
    push("step");
    push("forward");
    pop();
    pop();
    const td_trace_info info = end();
    assert_false(info.gpu);
    if (!strstr(info.cupti, words))
        fail_msg("'%s' has no '%s'", info.cupti, words);
    td_assert_ok(td_trace_activities(trace, &all, &count));
    assert_int_equal(count, 0);
    td_assert_ok(
        td_trace_total_of(trace, 1u << TD_TRACE_FORWARD, &total)); /* the host's ranges are recorded */
    assert_true(total.host_ms > 0 && total.window_ms == 0);
    td_trace_destroy(trace);
    trace = NULL;
}

TD_BODY(without_cupti_the_trace_goes_on_and_says_why)
{
    static const struct {
        CUptiResult subscribes, registers, enables, enables_callback;
        uint32_t version;
        const char *other, *words;
    } answers[] = {
        {.subscribes = CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED,
         .version = 130001,
         .other = "CUPTI for Kineto",
         .words = "another profiler is attached: CUPTI for Kineto"},
        {.subscribes = CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED,
         .version = 130001,
         .words = "another profiler is attached: it uses CUPTI"},
        {.subscribes = CUPTI_ERROR_NOT_INITIALIZED,
         .version = 130001,
         .words = "CUPTI_ERROR_OF_THE_FAKE (15)"},
        {.subscribes = CUPTI_ERROR_UNKNOWN, .version = 130001, .words = "without a name (999)"},
        {.registers = CUPTI_ERROR_INVALID_PARAMETER, .version = 130001, .words = "does not record"},
        {.enables = CUPTI_ERROR_NOT_COMPATIBLE, .version = 130001, .words = "does not record"},
        {.enables_callback = CUPTI_ERROR_INVALID_PARAMETER, .version = 130001, .words = "does not record"},
        {.version = 130000, .words = "version 130000, needs at least 130001"},
    };

    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        fake->subscribes = answers[i].subscribes;
        fake->registers = answers[i].registers;
        fake->enables = answers[i].enables;
        fake->enables_callback = answers[i].enables_callback;
        fake->version = answers[i].version;
        fake->other = answers[i].other;
        td_in_case("answer %d", (int)i);
        check_without(answers[i].words);
        assert_int_equal(fake->subscriptions, 0);
        fake->enabled = 0; /* activities that failed are disabled too */
    }
    found_at = 3;
    check_without("CUPTI cannot be loaded");
    found_at = 0;
    lacks = "cuptiGetGraphNodeId";
    check_without("libcupti.so.13 has no cuptiGetGraphNodeId");
}

TD_BODY(the_library_is_looked_for_in_order)
{
    for (found_at = 0; found_at < 3; found_at++) {
        begin();
        assert_true(end().gpu);
        td_trace_destroy(trace);
        trace = NULL;
    }
}

TD_BODY(a_second_trace_has_no_kernels)
{
    td_trace *second;
    td_trace_info info;

    begin();
    pretend = true;
    td_assert_ok(td_trace_begin(dev, &second));
    pretend = false;
    td_assert_ok(td_trace_end(second));
    td_assert_ok(td_trace_info_of(second, &info));
    assert_false(info.gpu);
    assert_non_null(strstr(info.cupti, "another trace of this process is running"));
    td_trace_destroy(second);
    assert_true(end().gpu);
    td_trace_destroy(trace); /* now the listener is free again */
    begin();
    assert_true(end().gpu);
}

TD_BODY(a_flush_that_fails_is_an_error)
{
    begin();
    fake->flushes = CUPTI_ERROR_INVALID_OPERATION;
    td_assert_refused(td_trace_end(trace), TD_LIBRARY_ERROR, "CUPTI_ERROR_OF_THE_FAKE");
    td_assert_refused(td_trace_end(trace), TD_BAD_STATE, "has ended already");
}

/* ---- the file ---- */

static const cJSON *field(const cJSON *object, const char *key)
{
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(object, key);

    if (!value)
        fail_msg("no '%s'", key);
    return value;
}

/* Kernels of one stream that overlap each other get separate lanes. An arrow leads from each launch to its
 * kernel. */
TD_BODY(the_file_has_lanes_and_arrows)
{
    int kernels = 0, beside = 0, arrows = 0, launches = 0;
    size_t bytes;

    begin();
    push("step");
    push("a \"label\"\\");
    call(1);
    launch(2, CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000);
    const CUpti_ActivityAPI driver = {.kind = CUPTI_ACTIVITY_KIND_DRIVER,
                                      .cbid = CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz,
                                      .start = fake->now,
                                      .end = fake->now + 1,
                                      .threadId = (uint32_t)gettid(),
                                      .correlationId = 3};
    fake->launch(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel_ptsz, 3);
    assert_true(fake->put(&driver, sizeof driver));
    pop();
    pop();
    kernel("one", 1, 4000, 4100, 0);
    kernel("two", 2, 4050, 4150, 9);
    kernel("three", 3, 4100, 4200, 0);
    (void)end();
    td_assert_ok(td_trace_write_json(trace, file_path));
    td_assert_ok(td_trace_write_timeline(trace, file_path));
    td_assert_ok(td_trace_write_json(trace, file_path));
    char *text = file_read(file_path, &bytes);
    cJSON *all = cJSON_ParseWithLength(text, bytes);
    assert_non_null(all);
    for (const cJSON *event = field(all, "traceEvents")->child; event; event = event->next) {
        const char *kind = field(event, "ph")->valuestring, *name = field(event, "name")->valuestring;
        const cJSON *category = cJSON_GetObjectItem(event, "cat");

        if (*kind == 'X' && strcmp(category->valuestring, "kernel") == 0) {
            const cJSON *args = field(event, "args");

            kernels++;
            assert_int_equal(field(event, "pid")->valueint, 2); /* GPU 1 */
            assert_int_equal(field(args, "registers per thread")->valueint, 40);
            assert_int_equal(field(args, "shared memory")->valueint, 128);
            assert_int_equal(cJSON_GetArraySize(field(args, "grid")), 3);
            assert_string_equal(cJSON_GetArrayItem(field(args, "ranges"), 1)->valuestring, "a \"label\"\\");
            assert_int_equal(field(event, "tid")->valueint, strcmp(name, "two") == 0 ? 701 : 700);
            beside += strcmp(name, "two") == 0;
            assert_true((cJSON_GetObjectItem(args, "graph node id") != NULL) == (strcmp(name, "two") == 0));
        }
        arrows += *kind == 's';
        if (category && strncmp(category->valuestring, "cuda_", 5) == 0) {
            static const char *const names[] = {"cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel"};

            assert_string_equal(name, names[launches]);
            launches++;
        }
    }
    assert_int_equal(kernels, 3);
    assert_int_equal(beside, 1);
    assert_int_equal(arrows, 3);
    assert_int_equal(launches, 3);
    cJSON_Delete(all);
    free(text);
}

static int set_up_folder(void **state)
{
    return set_up(state) == 0 ? file_folder_make(state) : -1;
}

static int tear_down_folder(void **state)
{
    const int left = file_folder_remove(state);

    return tear_down(state) == 0 ? left : -1;
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(kernels_belong_to_the_range_that_launched_them),
        TEST(tables_count_overlapping_kernels_once),
        TEST(nodes_of_graphs_belong_to_the_range_that_they_were_captured_in),
        TEST(a_fill_that_became_a_kernel_belongs_to_what_its_stream_runs_next),
        TEST(copies_and_fills_are_there),
        TEST(what_nobody_launched_in_a_range_is_counted),
        TEST(many_records_come_in_many_buffers),
        TEST(tens_of_thousands_of_nodes_are_found),
        TEST(without_cupti_the_trace_goes_on_and_says_why),
        TEST(the_library_is_looked_for_in_order),
        TEST(a_second_trace_has_no_kernels),
        TEST(a_flush_that_fails_is_an_error),
        cmocka_unit_test_setup_teardown(the_file_has_lanes_and_arrows, set_up_folder, tear_down_folder),
    };
    return cmocka_run_group_tests_name("CUPTI", tests, NULL, NULL);
}
