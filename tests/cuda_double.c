/* The CUDA device without a GPU: tests/support/cuda_double.h replaces the CUDA runtime and the kernels. */
#include "support/cuda_double.h"
#include "device/clock.h"
#include "device/device.h"
#include "device/sms.h"
#include "flash/flash.h"
#include "ops/ops.h"
#include "support/compare.h"
#include "support/nvml_double.h"
#include "support/test.h"

#include <inttypes.h>

enum { CALLERS = TD_DOUBLE_CALLERS, OURS = TD_DOUBLE_OURS };

/* ---- the calling thread's GPU ---- */

static td_device *gpu;

static int open_gpu(void **state)
{
    (void)state;
    td_double.current = CALLERS;
    td_double.calls = td_double.elsewhere = td_double.times_set = td_double.streams_made = 0;
    td_double.copies_made = 0;
    td_double.probe_says = td_double.flash_says = cudaSuccess;
    td_assert_ok(td_device_open("cuda:1", &gpu));
    return 0;
}

static int close_gpu(void **state)
{
    (void)state;
    td_device_close(gpu);
    assert_int_equal(td_double.handles, 0);
    assert_int_equal(td_double.descriptions, 0);
    return 0;
}

/* Fails unless every call since the last check used the device's GPU, and the thread's own GPU is current
 * again. */
static void check_gpu(const char *what)
{
    if (td_double.calls == 0)
        fail_msg("%s reached no GPU", what);
    if (td_double.elsewhere > 0)
        fail_msg("%s called %s with GPU %d current", what, td_double.where, td_double.current);
    if (td_double.current != CALLERS)
        fail_msg("%s left GPU %d current", what, td_double.current);
    td_double.calls = 0;
}

#define KEEPS_GPU(call)                                                                                      \
    do {                                                                                                     \
        td_assert_ok(call);                                                                                  \
        check_gpu(#call);                                                                                    \
    } while (0)

/* An address in the memory of a GPU, where the host cannot read: for hyperparameters and state. */
static void *const there = (void *)(uintptr_t)256;

TD_BODY(every_call_leaves_the_threads_gpu_current)
{
    const td_attention_shape attention = {.batch = 1, .heads = 1, .seq = 8, .head_dim = 16, .dtype = TD_BF16};
    const td_gemm_shape gemm = {
        .batch = 1, .m = 4, .n = 4, .k = 4, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    td_update_tensors tensors = {.count = 4, .dtype = TD_F32};
    td_attention_sizes sizes;
    td_stream *stream;
    td_event *event;
    td_graph *graph;
    size_t bytes;
    void *block, *host, *work;

    check_gpu("td_device_open");
    KEEPS_GPU(td_device_alloc(gpu, 4096, &block));
    KEEPS_GPU(td_device_alloc_host(gpu, 64, &host));
    KEEPS_GPU(td_device_copy(gpu, block, (char *)block + 64, 64));
    KEEPS_GPU(td_device_upload(gpu, block, host, 64));
    KEEPS_GPU(td_device_download(gpu, host, block, 64));
    KEEPS_GPU(td_device_fill(gpu, block, 0, 64));
    KEEPS_GPU(td_device_synchronize(gpu));

    KEEPS_GPU(td_stream_create(gpu, &stream));
    KEEPS_GPU(td_event_create(gpu, &event));
    KEEPS_GPU(td_event_record(event));
    KEEPS_GPU(td_event_wait(event));
    td_event_destroy(event);
    assert_int_equal(td_double.current, CALLERS);
    KEEPS_GPU(td_graph_begin(gpu));
    KEEPS_GPU(td_graph_end(gpu, &graph));
    KEEPS_GPU(td_graph_launch(graph));
    td_graph_destroy(graph);
    assert_int_equal(td_double.current, CALLERS);
    td_stream_destroy(stream);
    check_gpu("td_stream_destroy");

    KEEPS_GPU(td_rope_table(gpu, 4, 16, 10000.0, block, block));
    KEEPS_GPU(
        td_softmax_forward(gpu, &(td_softmax_shape){.rows = 1, .cols = 4, .dtype = TD_F32}, block, block));
    KEEPS_GPU(td_update_begin(gpu, there, 1.0f));
    KEEPS_GPU(td_update_clip(gpu, 1.0f, there, there));
    KEEPS_GPU(td_assign(gpu, there, &gemm, 8));
    tensors.p = tensors.m = tensors.v = block;
    tensors.g = block;
    KEEPS_GPU(td_adamw_update(gpu, there, there, &tensors));
    KEEPS_GPU(td_sgd_update(gpu, there, there, &tensors));
    td_assert_ok(td_gemm_work_bytes(gpu, &gemm, &bytes));
    KEEPS_GPU(td_device_alloc(gpu, bytes, &work));
    KEEPS_GPU(td_gemm(gpu, &gemm, block, block, block, work));
    td_assert_ok(td_flash_sizes(gpu, &attention, &sizes));
    assert_int_equal(td_double.current, CALLERS);
    KEEPS_GPU(td_flash_forward(gpu, &attention, block, block, block, block, block, work));
    KEEPS_GPU(td_flash_backward(gpu, &attention, block, block, block, block, block, block, block, block,
                                block, work));

    td_device_free_host(gpu, host);
    check_gpu("td_device_free_host");
    KEEPS_GPU(td_device_free(gpu, block));
    td_device_close(gpu);
    check_gpu("td_device_close");
    gpu = NULL;
}

/* A copy between host and device has ended when the call returns. */
TD_BODY(copies_end_before_the_call_returns)
{
    char source[64], back[64], old[64];
    void *block;

    td_assert_ok(td_device_alloc(gpu, sizeof source, &block));
    memset(source, 1, sizeof source);
    td_assert_ok(td_device_upload(gpu, block, source, sizeof source));
    memset(source, 2, sizeof source); /* the caller may change it again */
    td_assert_ok(td_device_download(gpu, back, block, sizeof back));
    memset(old, 1, sizeof old);
    assert_memory_equal(back, old, sizeof back);
    td_assert_ok(td_device_free(gpu, block));
}

TD_BODY(a_refused_product_leaves_it_current_too)
{
    const td_gemm_shape shape = {
        .batch = 1, .m = 4, .n = 4, .k = 4, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    float block[16];

    td_assert_refused(td_gemm(gpu, &shape, block, block, block, (char *)NULL + 8), TD_BAD_ARGUMENT,
                      "work is 0x8, needs a multiple of");
    assert_int_equal(td_double.current, CALLERS);
}

TD_BODY(a_thread_on_the_same_gpu_is_left_alone)
{
    td_double.current = OURS;
    td_double.times_set = 0;
    td_assert_ok(td_device_synchronize(gpu));
    td_assert_ok(td_rope_table(gpu, 4, 16, 10000.0, (float[64]){0}, (float[64]){0}));
    assert_int_equal(td_double.times_set, 0);
    assert_int_equal(td_double.current, OURS);
}

TD_BODY(a_gpu_without_kernels_is_refused)
{
    const struct {
        cudaError_t probe;
        td_status status;
        const char *words;
    } cases[] = {
        {cudaErrorNoKernelImageForDevice, TD_UNSUPPORTED,
         "not built for this GPU, double 1 of compute capability 8.6"},
        {cudaErrorUnsupportedPtxVersion, TD_UNSUPPORTED, "update the driver, or build for this GPU"},
        {cudaErrorJitCompilerNotFound, TD_LIBRARY_ERROR, "loading the kernels"},
    };
    td_device *dev;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_double.current = CALLERS;
        td_double.probe_says = cases[i].probe;
        dev = (td_device *)&td_double.current;
        td_assert_refused(td_device_open("cuda:1", &dev), cases[i].status, cases[i].words);
        assert_null(dev);
        assert_int_equal(td_double.current, CALLERS);
    }
}

TD_BODY(flash_tiles_beyond_a_blocks_memory_are_refused)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 8, .head_dim = 128, .dtype = TD_F32, .tf32 = true};
    static _Alignas(256) float x[8 * 128];

    td_double.flash_says = cudaErrorLaunchOutOfResources;
    td_assert_refused(td_flash_forward(gpu, &shape, x, x, x, x, x, x), TD_UNSUPPORTED,
                      "forward: head_dim is 128, whose tiles of tf32 need more shared memory");
    td_assert_refused(td_flash_backward(gpu, &shape, x, x, x, x, x, x, x, x, x, x), TD_UNSUPPORTED,
                      "backward: head_dim is 128, whose tiles of tf32 need more shared memory");
    assert_int_equal(td_double.current, CALLERS);
}

/* ---- updates ---- */

TD_BODY(updates_are_launched_with_their_types)
{
    static float x[4];
    static const struct {
        /* the dtypes that are given, and the dtype of the gradients that follows */
        td_dtype dtype, grad_dtype, grad;
        bool planes;
    } cases[] = {
        {TD_F32, 0, TD_F32, false},     {TD_F16, 0, TD_F16, false},       {TD_F32, TD_BF16, TD_BF16, false},
        {TD_F32, TD_F16, TD_F16, true}, {TD_F32, TD_BF16, TD_BF16, true},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sgd = 0; sgd < 2; sgd++) {
            const td_update_tensors given = {.count = 4,
                                             .dtype = cases[i].dtype,
                                             .grad_dtype = cases[i].grad_dtype,
                                             .p = x,
                                             .g = x,
                                             .m = x,
                                             .v = x,
                                             .low = cases[i].planes ? x : NULL};

            memset(&td_double.launched, 0xFF, sizeof td_double.launched);
            if (sgd)
                td_assert_ok(td_sgd_update(gpu, there, there, &given));
            else
                td_assert_ok(td_adamw_update(gpu, there, there, &given));
            assert_int_equal(td_double.launched.dtype, cases[i].dtype);
            assert_int_equal(td_double.launched.grad_dtype, cases[i].grad);
            assert_ptr_equal(td_double.launched.low, given.low);
        }
}

/* An update next to GEMMs runs on its SMs if there is a kernel for it. */
TD_BODY(updates_are_launched_on_their_sms)
{
    static _Alignas(16) float x[8];
    static const struct {
        bool built;
        int32_t sms;
        int shift, on; /* of the gradients' address, in floats; the SMs of the launch */
    } cases[] = {{true, 20, 0, 20}, {true, 0, 0, 0}, {true, 20, 1, 0}, {false, 20, 0, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sgd = 0; sgd < 2; sgd++) {
            const td_update_tensors given = {.count = 4,
                                             .dtype = TD_F32,
                                             .p = x,
                                             .g = x + cases[i].shift,
                                             .m = x,
                                             .v = x,
                                             .sms = cases[i].sms,
                                             .work = there};

            td_double.sms_built = cases[i].built;
            assert_int_equal(td_update_has_sms(gpu), td_double.sms_built);
            td_double.launched_on = -1;
            if (sgd)
                KEEPS_GPU(td_sgd_update(gpu, there, there, &given));
            else
                KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
            assert_int_equal(td_double.launched_on, cases[i].on);
        }
    td_assert_refused(
        td_sgd_update(gpu, there, there,
                      &(td_update_tensors){.count = 4, .dtype = TD_F32, .p = x, .g = x, .sms = -1}),
        TD_BAD_ARGUMENT, "sms is -1, needs at least 1, or 0 for all");
}

/* An update first takes SMs that clusters of 8 blocks cannot use, and then whole clusters. */
TD_BODY(updates_leave_whole_clusters)
{
    static _Alignas(16) float x[8];
    static const struct {
        int32_t sms;
        int clusters; /* the clusters of 8 that are left, out of 11 */
    } cases[] = {{1, 11}, {2, 11}, {12, 11}, {13, 10}, {28, 9}, {99, 0}, {20, 10}};

    td_double.sms_built = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const td_update_tensors given = {
            .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = cases[i].sms, .work = there};
        int taken = 0, clusters = 0;

        KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(td_double.launched_wanted.all, 100);
        for (int gpc = 0, sm = 0; gpc < 7; gpc++) {
            int left = 0;

            for (; sm < td_double_gpc_ends[gpc]; sm++)
                left += !(td_double.launched_wanted.bits[sm / 32] >> sm % 32 & 1);
            clusters += left / 8;
        }
        for (int sm = 0; sm < TD_SM_SET_MOST; sm++)
            taken += td_double.launched_wanted.bits[sm / 32] >> sm % 32 & 1;
        assert_int_equal(taken, cases[i].sms);
        assert_int_equal(clusters, cases[i].clusters);
    }
    assert_int_equal(td_double.launched_wanted.bits[0] & 0xFF,
                     0xFF); /* of the GPCs without a rest, the smallest comes first */
}

/* The search for GPCs launches kernels and waits for them, which a capture does not allow. Until it has run,
 * an update uses any SMs. */
TD_BODY(gpcs_are_looked_for_once_and_in_no_capture)
{
    static _Alignas(16) float x[8];
    const td_update_tensors given = {
        .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = 20, .work = there};
    td_graph *graph;

    td_double.sms_built = true;
    td_double.gpcs_asked = 0;
    td_assert_ok(td_graph_begin(gpu));
    td_assert_ok(td_adamw_update(gpu, there, there, &given));
    td_assert_ok(td_graph_end(gpu, &graph));
    td_graph_destroy(graph);
    assert_int_equal(td_double.gpcs_asked, 0);
    assert_int_equal(td_double.launched_on, 20);
    assert_int_equal(td_double.launched_wanted.all, 100);
    assert_int_equal(td_double.launched_wanted.bits[0], 0);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(td_double.gpcs_asked, 1);
        assert_int_not_equal(td_double.launched_wanted.bits[0], 0);
    }
}

TD_BODY(updates_take_all_sms_if_no_gpcs_are_found)
{
    static _Alignas(16) float x[8];
    const td_update_tensors given = {
        .count = 4, .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x, .sms = 20, .work = there};

    td_double.sms_built = true;
    td_double.gpcs_say = cudaErrorLaunchFailure;
    for (int i = 0; i < 2; i++) {
        td_double.launched_on = -1;
        KEEPS_GPU(td_adamw_update(gpu, there, there, &given));
        assert_int_equal(td_double.launched_on, 0);
    }
    td_double.gpcs_say = cudaSuccess;
}

/* Collectives have the highest priority of the GPU. A device's own stream and the caller's have lower
 * priorities than updates. */
TD_BODY(updates_go_between_collectives_and_gemms)
{
    static const struct {
        int highest, own, callers, updates; /* callers 1: there is no caller's stream */
    } cases[] = {{-5, -3, 1, -4},  {-5, -3, 0, -4}, {-5, -3, -3, -4}, {-5, -3, -4, -5},
                 {-5, -3, -5, -5}, {-1, 0, 1, -1},  {-1, 0, -1, -1},  {0, 0, 1, 0}};

    td_double.current = CALLERS;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_stream *callers = NULL, *updates;

        td_double.streams_made = 0;
        td_double.lowest_first = cases[i].highest;
        td_assert_ok(td_device_open("cuda:1", &gpu));
        assert_int_equal(td_double.priorities[td_double.streams_made], cases[i].own);
        if (cases[i].callers <= 0) {
            td_assert_ok(td_stream_wrap(gpu, td_double_stream(cases[i].callers), &callers));
            td_assert_ok(td_device_set_stream(gpu, callers));
        }
        td_assert_ok(td_stream_create(gpu, &updates));
        assert_int_equal(td_double.priorities[td_double.streams_made], cases[i].updates);
        td_assert_ok(td_device_set_stream(gpu, NULL));
        td_stream_destroy(updates);
        td_stream_destroy(callers);
        td_device_close(gpu);
    }
    td_double.lowest_first = 0;
}

/* ---- GEMMs ---- */

static void product_of(int64_t m)
{
    const td_gemm_shape shape = {
        .batch = 1, .m = m, .n = 8, .k = 8, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    static _Alignas(256) float block[64];

    td_assert_ok(td_gemm(gpu, &shape, block, block, block, block));
}

TD_BODY(a_models_gemms_are_described_once)
{
    td_double.heuristics = td_double.products = 0;
    for (int round = 0; round < 3; round++)
        for (int64_t m = 1; m <= 100; m++)
            product_of(m);
    assert_int_equal(td_double.products, 300);
    assert_int_equal(td_double.heuristics, 100);
}

/* A GEMM that runs at the same time as collectives or updates uses the SMs that they leave free, if any are
 * left. */
TD_BODY(gemms_leave_sms_to_other_work)
{
    static const struct {
        int32_t shared, target;
    } cases[] = {{0, 0}, {24, 76}, {99, 1}, {100, 0}, {1000, 0}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_double.target = 0;
        td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, cases[i].shared);
        product_of(1001 + (int64_t)i);
        assert_int_equal(td_double.target, cases[i].target);
    }
    td_device_reserve_sms(gpu, TD_SMS_UPDATE, 6);
    td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, 10);
    product_of(1010);
    assert_int_equal(td_double.target, 84);
    td_device_reserve_sms(gpu, TD_SMS_UPDATE, 0);
    td_double.without_below = 91; /* no algorithm for so few SMs: the GEMM uses all */
    product_of(1011);
    assert_int_equal(td_double.target, 0);
    td_double.without_below = 0;
    td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, 24);
    product_of(1001);
    assert_int_equal(td_double.target, 76);
    td_double.heuristics = 0;
    td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, 0);
    product_of(1001);
    td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, 24);
    product_of(1001);
    assert_int_equal(td_double.heuristics, 0);
    td_device_reserve_sms(gpu, TD_SMS_COLLECTIVES, 0);
}

/* A measured algorithm is for one card, one version of cuBLASLt and one GEMM. Elsewhere cuBLASLt chooses. */
TD_BODY(gemms_use_measured_algorithms)
{
    static _Alignas(256) float x[128];
    const uint64_t measured = UINT64_C(5) << 32 | 2 << 16; /* cluster and option */
    static const struct {
        const char *card;
        size_t version;
        int64_t n;
        int refuses;
        bool unaligned;
    } cases[] = {{"NVIDIA H100 80GB HBM3", 130100, 12800, 0, false},
                 {"NVIDIA H200", 130100, 22016, 0, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 22016, 0, false},
                 {"NVIDIA H200", 130100, 12800, 0, false},
                 {"NVIDIA H100 80GB HBM3", 130200, 12800, 0, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 12801, 0, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 12800, 1, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 12800, 2, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 12800, 3, false},
                 {"NVIDIA H100 80GB HBM3", 130100, 12800, 0, true}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bool large = cases[i].n == 22016;
        const td_gemm_shape shape = {.batch = 1,
                                     .m = large ? 32768 : 2048,
                                     .n = cases[i].n,
                                     .k = large ? 4096 : 1600,
                                     .trans_b = true,
                                     .alpha = 1,
                                     .dtype = TD_BF16,
                                     .out_dtype = TD_BF16};

        td_double.card = cases[i].card;
        td_double.lt_version = cases[i].version;
        td_double.lt_refuses = cases[i].refuses;
        assert_int_equal(open_gpu(NULL), 0);
        td_double.algorithm = 1;
        td_assert_ok(td_gemm(gpu, &shape, x + 32 * cases[i].unaligned, x, x + 64, x));
        assert_int_equal(td_double.algorithm, i < 2 ? measured | (i == 0 ? 201 : 197) : 0);
        assert_int_equal(close_gpu(NULL), 0);
    }
    td_double.card = NULL;
    td_double.lt_refuses = 0;
}

TD_BODY(gemms_of_every_length_use_bounded_memory)
{
    enum { LENGTHS = 20000, MOST = 512 };

    td_double.products = td_double.most_descriptions = 0;
    for (int64_t m = 1; m <= LENGTHS; m++) {
        product_of(m);
        td_double.heuristics = 0;
        product_of(m); /* it is still there */
        assert_int_equal(td_double.heuristics, 0);
    }
    product_of(1); /* it was dropped and is made again */
    assert_int_equal(td_double.heuristics, 1);
    assert_int_equal(td_double.products, 2 * LENGTHS + 1);
    /* Each product has four descriptions, and the product that is being made has a preference too. */
    assert_in_range(td_double.most_descriptions, 4 * MOST / 2, 4 * (MOST + 1) + 1);
}

/* ---- grids ---- */

#define REFUSES(call, words)                                                                                 \
    do {                                                                                                     \
        td_double.calls = 0;                                                                                 \
        td_assert_refused(call, TD_UNSUPPORTED, words);                                                      \
        assert_int_equal(td_double.calls, 0);                                                                \
    } while (0)

/* One row or one block more than a grid can have, and 2^32 more, because a 32-bit number would drop these. */
TD_BODY(more_than_a_grid_holds_is_refused)
{
    const int64_t most = INT32_MAX, rows[] = {most + 1, (most + 1) * 4},
                  wide[] = {most * 256 + 1, (most + 1) * 1024};
    static _Alignas(256) float x[64];

    for (int i = 0; i < 2; i++) {
        const td_softmax_shape softmax = {.rows = rows[i], .cols = 1, .dtype = TD_F32};
        const td_rmsnorm_shape norm = {
            .rows = rows[i], .cols = 1, .eps = 1e-5f, .dtype = TD_F32, .x_dtype = TD_F32};
        const td_rows_shape gated = {.rows = wide[i], .cols = 1, .dtype = TD_F32};
        const td_embedding_shape embedding = {.tokens = wide[i], .vocab = 1, .d_model = 1, .dtype = TD_F32};
        const td_update_tensors tensors = {.count = wide[i], .dtype = TD_F32, .p = x, .g = x, .m = x, .v = x};

        REFUSES(td_softmax_forward(gpu, &softmax, x, x), "softmax_forward: rows is");
        REFUSES(td_softmax_backward(gpu, &softmax, 1.0f, x, x, x), "softmax_backward: rows is");
        REFUSES(td_rmsnorm_forward(gpu, &norm, x, x, x, x), "rmsnorm_forward: rows is");
        REFUSES(td_residual_rmsnorm_forward(gpu, &norm, x, x, x, x, x, x),
                "residual_rmsnorm_forward: rows is");
        REFUSES(td_silu_mul_forward(gpu, &gated, x, x, x), "silu_mul_forward: rows * cols is");
        REFUSES(td_silu_mul_backward(gpu, &gated, x, x, x, x, x, x), "silu_mul_backward: rows * cols is");
        REFUSES(td_embedding_forward(gpu, &embedding, (const int64_t *)x, x, x),
                "embedding_forward: tokens * d_model is");
        REFUSES(td_rope_table(gpu, wide[i], 2, 10000.0, x, x), "rope_table: positions * head_dim is");
        REFUSES(td_adamw_update(gpu, there, there, &tensors), "adamw_update: count is");
        REFUSES(td_sgd_update(gpu, there, there, &tensors), "sgd_update: count is");
    }
}

TD_BODY(as_much_as_a_grid_holds_is_launched)
{
    const td_softmax_shape softmax = {.rows = INT32_MAX, .cols = 1, .dtype = TD_F32};
    const td_rows_shape gated = {.rows = INT32_MAX, .cols = 256, .dtype = TD_F32};
    static float x[64];

    td_double.calls = 0;
    td_assert_ok(td_softmax_forward(gpu, &softmax, x, x));
    td_assert_ok(td_silu_mul_forward(gpu, &gated, x, x, x));
    assert_int_equal(td_double.calls, 2);
}

TD_BODY(the_clock_is_nvmls_or_unknown)
{
    assert_int_equal(td_device_clock(gpu).mhz, 0); /* without NVIDIA's library */
    td_nvml.there = true;
    for (size_t i = 0; td_nvml_name(i); i++) {
        td_nvml.lacks = td_nvml_name(i);
        assert_int_equal(td_device_clock(gpu).mhz, 0);
    }
    td_nvml.lacks = NULL;
    for (td_nvml.fails = 5; td_nvml.fails >= 0; td_nvml.fails--) {
        const bool all = td_nvml.fails == 0 || td_nvml.fails > 2;

        td_nvml.calls = 0;
        td_nvml.reasons = 0x4; /* the power cap */
        const td_gpu_clock clock = td_device_clock(gpu);
        assert_int_equal(clock.mhz, all && td_nvml.fails != 3 ? 1755 : 0);
        assert_true(clock.watts == (all && td_nvml.fails != 4 ? 690.5 : 0));
        assert_int_equal(clock.slowed, all && td_nvml.fails != 5);
    }
    td_nvml.fails = 0;
    td_nvml.reasons = 0x1 | 0x2; /* idle, or the clock that a user set */
    assert_false(td_device_clock(gpu).slowed);
    td_nvml.there = false;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_call_leaves_the_threads_gpu_current, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(copies_end_before_the_call_returns, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(a_refused_product_leaves_it_current_too, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(a_thread_on_the_same_gpu_is_left_alone, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(the_clock_is_nvmls_or_unknown, open_gpu, close_gpu),
        cmocka_unit_test(a_gpu_without_kernels_is_refused),
        cmocka_unit_test_setup_teardown(flash_tiles_beyond_a_blocks_memory_are_refused, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_are_launched_with_their_types, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_are_launched_on_their_sms, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_leave_whole_clusters, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(updates_take_all_sms_if_no_gpcs_are_found, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(gpcs_are_looked_for_once_and_in_no_capture, open_gpu, close_gpu),
        cmocka_unit_test(updates_go_between_collectives_and_gemms),
        cmocka_unit_test_setup_teardown(a_models_gemms_are_described_once, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(gemms_leave_sms_to_other_work, open_gpu, close_gpu),
        cmocka_unit_test(gemms_use_measured_algorithms),
        cmocka_unit_test_setup_teardown(gemms_of_every_length_use_bounded_memory, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(more_than_a_grid_holds_is_refused, open_gpu, close_gpu),
        cmocka_unit_test_setup_teardown(as_much_as_a_grid_holds_is_launched, open_gpu, close_gpu),
    };

    return cmocka_run_group_tests_name("CUDA, with a double of the GPU", tests, NULL, NULL);
}
