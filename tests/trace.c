/* The trace of a step on a CPU: it agrees with the timer and with the model's structure. */
#include "trace/trace.h"

#include "bench/bench.h"
#include "device/listen.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/test.h"

#define TEST_DEVICE "cpu"
#include "support/one_device.h"

#include <math.h>

static const td_bench_config tiny = {
    .model = {.size = {.d_model = 24, .d_ff = 40, .layers = 3, .heads = 3, .vocab = 41},
              .batch = 2,
              .context = 9,
              .precision = TD_PRECISION_F32,
              .attention = "flash",
              .keep = TD_KEEP_ALL},
    .mode = TD_BENCH_TRAIN,
    .warmup = 2,
    .steps = 3};

/* ---- memory that fails ---- */

static int64_t calls, fail_at; /* calls of calloc and realloc; fail_at 0: none fails */
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    return ++calls == fail_at ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t size)
{
    return ++calls == fail_at ? NULL : __real_realloc(block, size);
}

/* ---- fixtures ---- */

static td_trace *record(const td_bench_config *config, td_bench_summary *summary)
{
    td_bench_result *result;
    td_trace *trace;

    td_assert_ok(td_trace_begin(dev, &trace));
    td_assert_ok(td_bench_run(dev, NULL, config, NULL, NULL, &result));
    td_assert_ok(td_trace_end(trace));
    td_assert_ok(td_bench_summary_of(result, summary));
    td_bench_result_destroy(result);
    return trace;
}

static td_trace_total total_of(const td_trace *trace, unsigned phases)
{
    td_trace_total total;

    td_assert_ok(td_trace_total_of(trace, phases, &total));
    return total;
}

enum {
    FORWARD = 1u << TD_TRACE_FORWARD,
    LOSS = 1u << TD_TRACE_LOSS,
    BACKWARD = 1u << TD_TRACE_BACKWARD,
    OPTIMIZER = 1u << TD_TRACE_OPTIMIZER
};

/* ---- compared with the timer ---- */

static bool agrees(double traced, double timed)
{
    return traced <= timed * (1 + 1e-9) && traced >= 0.97 * timed;
}

/* The operations of a phase take all of its time except at most 3 %. If the machine does other work in
 * between, the test tries again. */
TD_TEST(totals_agree_with_the_timer)
{
    td_bench_config config = tiny;
    bool agreed = false;

    config.model.size = (td_model_size){.d_model = 128, .d_ff = 256, .layers = 2, .heads = 4, .vocab = 500};
    config.model.context = 64;
    for (int i = 0; i < 20 && !agreed; i++) {
        td_bench_summary timed;
        td_trace *trace = record(&config, &timed);
        const td_trace_total forward = total_of(trace, FORWARD | LOSS), backward = total_of(trace, BACKWARD),
                             optimizer = total_of(trace, OPTIMIZER),
                             all = total_of(trace, TD_TRACE_ALL_PHASES);

        agreed = agrees(forward.window_ms, timed.forward.ms.mean) &&
                 agrees(backward.window_ms, timed.backward.ms.mean) &&
                 agrees(optimizer.window_ms, timed.optimizer.ms.mean) &&
                 agrees(all.sum_ms, timed.step.ms.mean);
        td_in_case("traced %g, %g, %g and %g ms, timed %g, %g, %g and %g", forward.window_ms,
                   backward.window_ms, optimizer.window_ms, all.sum_ms, timed.forward.ms.mean,
                   timed.backward.ms.mean, timed.optimizer.ms.mean, timed.step.ms.mean);
        /* On a CPU operations run one after the other: the busy time is the sum. */
        assert_true(fabs(all.busy_ms - all.sum_ms) < 1e-9 * all.sum_ms);
        assert_true(all.host_ms >= forward.sum_ms + backward.sum_ms + optimizer.sum_ms);
        td_trace_destroy(trace);
    }
    assert_true(agreed);
}

/* ---- compared with the model ---- */

static const char *const attentions[] = {"naive", "flash"};
static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};

static void the_structure_is_the_models(void **state)
{
    const int *choice = (*(const td_combination **)state)->choice;
    td_bench_config config = tiny;
    const double layers = 3, batch = 2;
    td_bench_summary timed;
    td_trace_info info;
    double flops = 0;

    config.model.attention = attentions[choice[0]];
    config.model.precision = precisions[choice[1]];
    config.timed = choice[2] ? TD_TIMED_WHOLE : TD_TIMED_PHASES;
    td_trace *trace = record(&config, &timed);
    td_assert_ok(td_trace_info_of(trace, &info));
    assert_int_equal(info.steps, 3);
    assert_int_equal(info.unattributed + info.dropped + info.without_times, 0);
    assert_false(info.gpu);
    assert_string_equal(info.cupti, "");

    /* q, k and v are one GEMM, gate and up another. The values of naive attention are one GEMM for each
     * sequence. */
    const bool naive = choice[0] == 0;
    const td_trace_total forward = total_of(trace, FORWARD), backward = total_of(trace, BACKWARD),
                         optimizer = total_of(trace, OPTIMIZER), all = total_of(trace, TD_TRACE_ALL_PHASES);
    const double products = 4 * layers + 1 + (naive ? layers * (1 + batch) : 0);
    assert_true(forward.operations[TD_OP_MATMUL] == products);
    assert_true(forward.operations[TD_OP_ATTENTION] == (naive ? 0 : layers));
    assert_true(forward.operations[TD_OP_SOFTMAX] == (naive ? layers : 0));
    assert_true(forward.by_class[TD_OP_MATMUL] == products);
    assert_true(backward.operations[TD_OP_MATMUL] ==
                2 * (4 * layers + 1) + (naive ? layers * (2 + 2 * batch) : 0));
    assert_true(optimizer.operations[TD_OP_OPTIMIZER] >= 1);
    assert_true(optimizer.operations[TD_OP_MATMUL] == 0);
    for (int i = 0; i < TD_OP_CLASSES; i++)
        flops += i == TD_OP_MATMUL || i == TD_OP_ATTENTION ? all.flops[i] : 0;
    assert_true(fabs(flops - timed.flops_per_step) < 1e-9 * flops);
    td_trace_destroy(trace);
}

static const td_cases structures = {.group = "what a trace counts",
                                    .test = the_structure_is_the_models,
                                    .axes = {{"naive", "flash"}, {"f32", "mixed"}, {"phases", "whole"}}};

/* Every number of a table is per step, and the tables agree with each other. */
TD_TEST(tables_add_up)
{
    td_trace_kernel rows[64];
    td_trace_label labels[16];
    td_trace_attention attention;
    td_bench_summary timed;
    td_bench_config config = tiny;
    int64_t count, short_count;
    double sum = 0, shares = 0, instances = 0;

    config.model.attention = "naive";
    td_trace *trace = record(&config, &timed);
    const td_trace_total all = total_of(trace, TD_TRACE_ALL_PHASES), forward = total_of(trace, FORWARD);
    td_assert_ok(td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 64, rows, &count));
    assert_in_range(count, 8, 64);
    for (int64_t i = 0; i < count; i++) {
        td_in_case("kernel %s", rows[i].name);
        assert_true(i == 0 || rows[i].total_ns <= rows[i - 1].total_ns);
        assert_true(rows[i].per_pass == floor(rows[i].per_pass));
        assert_int_equal(rows[i].ns.n, rows[i].instances);
        sum += rows[i].total_ns;
        shares += rows[i].share;
        instances += rows[i].per_pass;
    }
    assert_true(fabs(sum / 3e6 - all.sum_ms) < 1e-9 * all.sum_ms);
    assert_true(fabs(shares - 1) < 1e-9);
    assert_true(instances == all.activities);
    td_trace_kernel top;
    td_assert_ok(td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 1, &top, &short_count));
    assert_int_equal(short_count, count);
    assert_string_equal(top.name, rows[0].name);

    td_assert_ok(td_trace_attention_of(trace, &attention));
    assert_true(attention.flops[TD_TRACE_SCORES] == 3.0 * 2 * 2 * 3 * 9 * 9 * 8); /* L 2 B H S S D */
    assert_true(attention.flops[TD_TRACE_VALUES] == attention.flops[TD_TRACE_SCORES]);
    assert_true(attention.flops[TD_TRACE_SOFTMAX] == 3.0 * 2 * 3 * 9 * (5 * 9 - 2));
    assert_true(attention.ms[TD_TRACE_FUSED] == 0);
    assert_true(fabs(attention.ms[TD_TRACE_SOFTMAX] - forward.by_class_ms[TD_OP_SOFTMAX]) < 1e-12);

    td_assert_ok(td_trace_labels(trace, 16, labels, &count));
    assert_int_equal(count, 8);
    for (int64_t i = 0; i < count; i++) {
        td_in_case("label %s", labels[i].name);
        assert_int_equal(labels[i].instances % 3, 0);
        assert_null(strstr(labels[i].name, "layers"));
        assert_true(labels[i].host_total_ns >= labels[i].total_ns);
        if (strcmp(labels[i].name, "computing softmax") == 0)
            assert_int_equal(labels[i].instances, 9); /* backward includes backward of attention */
    }
    td_trace_destroy(trace);
}

/* A caller's own labels are ranges. Without a label "step" the whole trace is one step. */
TD_TEST(a_callers_own_labels_are_ranges)
{
    const td_trace_activity *activities;
    const td_trace_range *ranges;
    const td_trace_call *no_calls;
    td_trace *trace;
    td_trace_info info;
    int64_t count;
    void *block;

    td_assert_ok(td_device_alloc(dev, 64, &block));
    td_assert_ok(td_device_push_label(dev, "before"));
    td_assert_ok(td_trace_begin(dev, &trace));
    td_assert_refused(td_trace_info_of(trace, &info), TD_BAD_ARGUMENT, "not ended");
    td_assert_ok(td_device_pop_label(dev)); /* began before */
    td_assert_ok(td_device_push_label(dev, "mine"));
    td_assert_ok(td_device_fill(dev, block, 0, 64));
    td_assert_ok(td_device_copy(dev, block, (char *)block + 32, 32));
    td_assert_ok(td_trace_end(trace)); /* the end of the trace also ends "mine" */
    td_assert_ok(td_device_pop_label(dev));
    td_assert_ok(td_trace_ranges(trace, &ranges, &count));
    assert_int_equal(count, 3);
    assert_string_equal(ranges[0].name, "mine");
    assert_true(ranges[0].end_ns >= ranges[2].end_ns && ranges[2].begin_ns >= ranges[1].end_ns);
    td_assert_ok(td_trace_activities(trace, &activities, &count));
    assert_int_equal(count, 2);
    assert_int_equal(activities[0].op_class, TD_OP_MEMORY);
    assert_int_equal(activities[0].phase, TD_TRACE_ELSEWHERE);
    assert_int_equal(activities[0].step, 0);
    assert_int_equal(activities[1].bytes, 32);
    td_assert_ok(td_trace_calls(trace, &no_calls, &count));
    assert_int_equal(count, 0);
    td_assert_ok(td_trace_info_of(trace, &info));
    assert_int_equal(info.steps, 1);
    td_trace_destroy(trace);

    /* A trace that is destroyed without an end stops listening. */
    td_assert_ok(td_trace_begin(dev, &trace));
    td_trace_destroy(trace);
    td_assert_ok(td_device_free(dev, block));
    assert_false(td_device_listened(dev));
}

/* Nested deeper than a trace records: the operations beyond are counted. */
TD_TEST(ranges_beyond_the_deepest_are_counted)
{
    const td_operation op = {.name = "deep"};
    td_trace *trace;
    td_trace_info info;

    td_assert_ok(td_trace_begin(dev, &trace));
    for (int i = 0; i < 70; i++)
        td_device_begin_operation(dev, &op);
    for (int i = 0; i < 70; i++)
        td_device_end_operation(dev);
    td_assert_ok(td_trace_end(trace));
    td_assert_ok(td_trace_info_of(trace, &info));
    assert_int_equal(info.dropped, 6);
    assert_int_equal(info.activities, 1); /* the outermost one; the others are parts of it */
    td_trace_destroy(trace);
}

/* ---- names ---- */

TD_TEST(kernels_are_classified_by_their_names)
{
    static const struct {
        const char *name;
        td_op_class op_class;
    } known[] = {
        {"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", TD_OP_COMMUNICATION},
        {"ncclSymkDevKernel_AllGather_LL", TD_OP_COMMUNICATION},
        {"ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", TD_OP_COMMUNICATION},
        {"td_attention_flash_forward", TD_OP_ATTENTION},
        {"td_softmax_forward", TD_OP_SOFTMAX},
        {"td_optimizer_adamw", TD_OP_OPTIMIZER},
        {"td_norm_rmsnorm_forward", TD_OP_REDUCTION},
        {"td_reduce_rows", TD_OP_REDUCTION},
        {"td_elem_silu_mul_forward", TD_OP_ELEMENTWISE},
        {"td_other_probe", TD_OP_OTHER},
        {"fmha_cutlassF_f32_aligned_64x64_rf_sm80", TD_OP_ATTENTION},
        {"void pytorch_flash::flash_fwd_kernel<...>(Flash_fwd_params)", TD_OP_ATTENTION},
        {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop", TD_OP_ATTENTION},
        {"nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", TD_OP_MATMUL},
        {"nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", TD_OP_MATMUL},
        {"sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute",
         TD_OP_MATMUL},
        {"sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_stage4", TD_OP_MATMUL},
        {"void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)", TD_OP_MATMUL},
        {"cutlass3x_sm90_tensorop_s64x128x16gemm_bf16", TD_OP_MATMUL},
        {"ampere_sgemm_128x64_tn", TD_OP_MATMUL},
        {"volta_sgemm_32x128_nn", TD_OP_MATMUL},
        {"void gemv2T_kernel_val<int, int, float>(...)", TD_OP_MATMUL},
        {"void gemmSN_NN_kernel<float, 128, 2>", TD_OP_MATMUL},
        {"void cublasLt::splitKreduce_kernel<32, 16, int, float>", TD_OP_MATMUL},
        {"void cublasLt::epilogue::impl::globalKernel<8, 32>", TD_OP_MATMUL},
        {"triton_tem_fused_mm_3", TD_OP_MATMUL},
        {"void (anonymous namespace)::softmax_warp_forward<float, float>", TD_OP_SOFTMAX},
        {"void (anonymous namespace)::td_norm_forward<float, 4>(float const*)", TD_OP_REDUCTION},
        {"void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>", TD_OP_SOFTMAX},
        {"triton_per_fused__softmax_2", TD_OP_SOFTMAX},
        {"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>", TD_OP_OPTIMIZER},
        {"void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", TD_OP_REDUCTION},
        {"triton_red_fused_mean_pow_1", TD_OP_REDUCTION},
        {"triton_per_fused_add_mean_0", TD_OP_REDUCTION},
        {"void at::native::vectorized_elementwise_kernel<4, ...>", TD_OP_ELEMENTWISE},
        {"void at::native::elementwise_kernel<128, 2, ...>", TD_OP_ELEMENTWISE},
        {"void at::native::unrolled_elementwise_kernel<...>", TD_OP_ELEMENTWISE},
        {"triton_poi_fused_silu_mul_4", TD_OP_ELEMENTWISE},
        {"void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", TD_OP_ELEMENTWISE},
        {"void at::native::indexSelectLargeIndex<float, long>", TD_OP_ELEMENTWISE},
        {"[CUDA memcpy Device-to-Device]", TD_OP_MEMORY},
        {"Memset (Device)", TD_OP_MEMORY},
        {"Memcpy DtoD (Device -> Device)", TD_OP_MEMORY},
        {"somebody_elses_kernel", TD_OP_OTHER},
        {"", TD_OP_OTHER},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        td_op_class found;

        td_assert_ok(td_trace_classify(known[i].name, &found));
        if (found != known[i].op_class)
            fail_msg("%s is %s, not %s", known[i].name, td_op_class_name(found),
                     td_op_class_name(known[i].op_class));
    }
}

/* ---- refusals, and failing memory ---- */

TD_TEST(a_trace_ends_once)
{
    td_bench_summary timed;
    td_trace *trace;

    trace = record(&tiny, &timed);
    td_assert_refused(td_trace_end(trace), TD_BAD_STATE, "has ended already");
    td_trace_destroy(trace);
}

/* Calls everything once, up to the first failure. */
static td_status everything(int64_t *dropped)
{
    td_trace_attention attention;
    td_trace_kernel row;
    td_trace_label label;
    td_trace_total total;
    td_trace_info info;
    td_trace *trace;
    td_status status;
    int64_t count;

    *dropped = 0;
    status = td_trace_begin(dev, &trace);
    if (status != TD_OK) {
        assert_null(trace);
        return status;
    }
    for (int i = 0; i < 300; i++) { /* enough names that the sets of names grow */
        char name[24];
        const td_operation op = {.name = "op"};

        snprintf(name, sizeof name, "label %d", i);
        const td_status pushed = td_device_push_label(dev, name);
        if (pushed != TD_OK) {
            td_trace_destroy(trace);
            return pushed;
        }
        td_device_begin_operation(dev, &op);
        td_device_end_operation(dev);
        td_assert_ok(td_device_pop_label(dev));
    }
    status = td_trace_end(trace);
    if (status == TD_OK)
        status = td_trace_info_of(trace, &info);
    if (status == TD_OK)
        *dropped = info.dropped;
    if (status == TD_OK)
        status = td_trace_total_of(trace, TD_TRACE_ALL_PHASES, &total);
    if (status == TD_OK)
        status = td_trace_kernels(trace, TD_TRACE_ALL_PHASES, 1, &row, &count);
    if (status == TD_OK)
        status = td_trace_labels(trace, 1, &label, &count);
    if (status == TD_OK)
        status = td_trace_attention_of(trace, &attention);
    td_trace_destroy(trace);
    return status;
}

TD_TEST(every_allocation_may_fail)
{
    int64_t nth, dropped, refused = 0, lost = 0;

    for (nth = 1;; nth++) {
        calls = 0;
        fail_at = nth;
        const td_status status = everything(&dropped);
        fail_at = 0;
        if (calls < nth) {
            td_assert_ok(status);
            assert_int_equal(dropped, 0);
            break;
        }
        assert_true(status == TD_OK || status == TD_NO_MEMORY);
        refused += status != TD_OK;
        lost += status == TD_OK && dropped > 0;
    }
    assert_true(nth > 300 && refused > 10 && lost > 300);
}

int main(void)
{
    int failed = td_run_each("traces", open_device, close_device, NULL, NULL);

    return failed + td_run_cases(&structures, open_device, close_device);
}
