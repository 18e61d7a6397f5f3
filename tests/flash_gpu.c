/* Flash attention on a GPU against float64; graphs, owned SMs and other work; sizes and refusals. */
#include "device/sms.h"
#include "flash/flash.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/flash_gpu_kit.h"
#include "support/gpu.h"
#include "support/test.h"

#include <inttypes.h>
#include <math.h>

/* ---- against float64 ---- */

typedef struct trial {
    char name[112];
    td_attention_shape shape;
} trial;

/* Outputs are 0: exactly in f32 and tf32. In 16-bit types dP - D has a rounding error. */
static void assert_next_to_nothing(const char *name, const td_attend_run *run, const void *data,
                                   int64_t count)
{
    const double most = run->shape.dtype == TD_F32 ? 0 : 1e-4;

    for (int64_t i = 0; i < count; i++)
        if (!(fabs(td_value_at(run->shape.dtype, data, i)) <= most))
            fail_msg("%s[%d] is %g", name, (int)i, td_value_at(run->shape.dtype, data, i));
}

/* lse is a logarithm, so its error is absolute. It is the error of a score: about 1e-7, and more in TF32. */
static void assert_lse(const td_attend_run *run, const float *lse, const double *truth)
{
    const double tolerance = run->shape.tf32 ? 4e-3 : 1e-6;

    for (int64_t i = 0; i < run->rows; i++)
        if (!(fabs((double)lse[i] - truth[i]) <= tolerance * fmax(1, fabs(truth[i]))))
            fail_msg("lse[%d] is %.9g, truth %.9g", (int)i, (double)lse[i], truth[i]);
}

static void agrees_with_float64_and_repeats(void **state)
{
    const trial *t = *state;
    const td_dtype dtype = t->shape.dtype;
    const double tolerance = tolerance_of(&t->shape);
    td_attend_run run = inputs_of(t->name, &t->shape);
    td_attend_truth truth = td_attend_truth_of(&run);
    results r = compute(&run, 0), again = compute(&run, 0);

    td_assert_close("o", dtype, r.o, truth.o, run.queries, tolerance);
    assert_lse(&run, r.lse, truth.lse);
    td_assert_close("dv", dtype, r.dv, truth.dv, run.keys, tolerance);
    if (run.shape.seq_k == 1 ||
        (run.shape.seq == 1 && run.shape.causal)) { /* a query that sees one key has P = 1 for any score */
        assert_next_to_nothing("dq", &run, r.dq, run.queries);
        assert_next_to_nothing("dk", &run, r.dk, run.keys);
    } else {
        td_assert_close("dq", dtype, r.dq, truth.dq, run.queries, tolerance);
        td_assert_close("dk", dtype, r.dk, truth.dk, run.keys, tolerance);
    }
    assert_identical_results(&run, &r, &again, t->shape.deterministic);

    free_results(&r);
    free_results(&again);
    td_attend_truth_free(&truth);
    free_inputs(&run);
}

/* Tiles are 128, 64 or 32 rows. Heads are filled up to 16, 32, 64, 80, 96, 128 or 256 columns. Cases lie
 * on both sides of each number. 1100 keys of one head are cut into parts, whose results are added up. */
static const struct {
    int64_t batch, heads, seq, seq_k;
    bool small; /* also run if td_gpu_small() */
} extents[] = {{1, 1, 1, 1, false},     {1, 2, 1, 37, false},   {2, 1, 37, 1, false},
               {1, 2, 63, 65, false},   {2, 3, 64, 64, false},  {1, 1, 127, 33, false},
               {1, 3, 129, 129, false}, {1, 1, 100, 259, true}, {1, 2, 259, 100, false}};
static const struct {
    int64_t size;
    bool small; /* also run if td_gpu_small(): every width, and one whose rows are read element by element */
} head_dims[] = {{1, false}, {3, false}, {16, true},   {32, true},  {33, true},   {64, true},
                 {80, true}, {96, true}, {127, false}, {128, true}, {160, false}, {256, true}};
enum {
    EXTENTS = sizeof extents / sizeof *extents,
    HEAD_DIMS = sizeof head_dims / sizeof *head_dims,
    TRIALS = (EXTENTS * HEAD_DIMS + 3) * KINDS * 2 + KINDS
};

static trial name_trial(td_attention_shape shape)
{
    trial t = {.shape = shape};

    snprintf(t.name, sizeof t.name,
             "%" PRId64 "x%" PRId64 "x%" PRId64 "x%" PRId64 " head_dim %" PRId64 " %s%s%s%s", shape.batch,
             shape.heads, shape.seq, shape.seq_k, shape.head_dim,
             shape.tf32 ? "tf32" : td_dtype_name(shape.dtype), shape.causal ? " causal" : "",
             shape.mask == TD_MASK_ADD_1E6 ? " -1e6" : "", shape.deterministic ? " deterministic" : "");
    return t;
}

static int run_trials(void)
{
    static trial trials[TRIALS];
    static struct CMUnitTest tests[TRIALS];
    const bool small = td_gpu_small();
    const int64_t shorter = small ? 40 : 700;
    int count = 0;

    for (int kind = 0; kind < KINDS; kind++) {
        td_attention_shape shape = {.dtype = kinds[kind].dtype, .tf32 = kinds[kind].tf32};

        for (int i = 0; i < 2 * EXTENTS * HEAD_DIMS; i++) {
            const int extent = i / 2 / HEAD_DIMS, head_dim = i / 2 % HEAD_DIMS;
            if (small && !(extents[extent].small && head_dims[head_dim].small))
                continue;
            shape.batch = extents[extent].batch;
            shape.heads = extents[extent].heads;
            shape.seq = extents[extent].seq;
            shape.seq_k = extents[extent].seq_k;
            shape.head_dim = head_dims[head_dim].size;
            shape.causal = i % 2;
            shape.deterministic = (extent + head_dim + i) % 2;
            trials[count++] = name_trial(shape);
        }
        for (int i = small ? 2 : 0; i < 6; i++) {
            shape = (td_attention_shape){.batch = 1,
                                         .heads = 1,
                                         .seq = i / 2 == 1 ? shorter : 1100,
                                         .seq_k = i / 2 == 2 ? shorter : 1100,
                                         .head_dim = i / 2 == 0 ? 64 : 24,
                                         .dtype = kinds[kind].dtype,
                                         .tf32 = kinds[kind].tf32,
                                         .causal = i % 2,
                                         .deterministic = i > 1 && i % 2};
            trials[count++] = name_trial(shape);
        }
        trials[count++] = name_trial((td_attention_shape){.batch = 2,
                                                          .heads = 2,
                                                          .seq = 81,
                                                          .seq_k = 70,
                                                          .head_dim = 24,
                                                          .dtype = kinds[kind].dtype,
                                                          .tf32 = kinds[kind].tf32,
                                                          .causal = true,
                                                          .mask = TD_MASK_ADD_1E6,
                                                          .scale = 0.3f});
    }
    for (int i = 0; i < count; i++)
        tests[i] = (struct CMUnitTest){.name = trials[i].name,
                                       .test_func = agrees_with_float64_and_repeats,
                                       .initial_state = &trials[i]};
    return _cmocka_run_group_tests("flash attention on a GPU, against float64", tests, (size_t)count, NULL,
                                   NULL);
}

/* ---- graphs, SMs and other work ---- */

/* A captured graph gives the same bits as the calls. */
TD_TEST(may_be_captured_in_a_graph)
{
    for (int kind = 0; kind < KINDS; kind++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 1100,
                                          .head_dim = 32,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = true,
                                          .deterministic = true};
        td_attend_run run = inputs_of("graph", &shape);
        results called = compute(&run, 0);
        const blocks b = open_blocks(&run, 0);
        td_graph *graph;

        td_assert_ok(td_graph_begin(gpu));
        run_passes(&run, &b, 0);
        td_assert_ok(td_graph_end(gpu, &graph));
        td_assert_ok(td_graph_launch(graph));
        td_assert_ok(td_graph_launch(graph));
        td_assert_ok(td_device_synchronize(gpu));
        results replayed = {.o = read_behind(&run, b.o, run.queries, 0),
                            .dq = read_behind(&run, b.dq, run.queries, 0),
                            .dk = read_behind(&run, b.dk, run.keys, 0),
                            .dv = read_behind(&run, b.dv, run.keys, 0),
                            .lse = td_gpu_read(gpu, b.lse, (size_t)run.rows * sizeof(float))};
        assert_identical_results(&run, &called, &replayed, true);
        td_graph_destroy(graph);
        close_blocks(&b);
        free_results(&called);
        free_results(&replayed);
        free_inputs(&run);
    }
}

/* With 3 free SMs a block of a Hopper kernel takes many tiles. If collectives and updates own all SMs, one
 * block takes all tiles. No sum depends on the number of blocks. */
TD_TEST(owned_sms_change_no_bit)
{
    const int32_t sms = td_device_sms(gpu), owned[] = {sms - 3, sms + 1};

    for (int i = 0; i < 4; i++) {
        const td_attention_shape shape = {.batch = 2,
                                          .heads = 40,
                                          .seq = 300,
                                          .head_dim = i % 2 ? 128 : 64,
                                          .dtype = i / 2 ? TD_F16 : TD_BF16,
                                          .causal = i != 3,
                                          .deterministic = true};
        td_attend_run run = inputs_of("owned", &shape);
        results all = compute(&run, 0);

        for (int j = 0; j < 2; j++) {
            td_device_reserve_sms(gpu, TD_SMS_UPDATE, owned[j]);
            results some = compute(&run, 0);
            td_device_reserve_sms(gpu, TD_SMS_UPDATE, 0);
            assert_identical_results(&run, &all, &some, true);
            free_results(&some);
        }
        free_results(&all);
        free_inputs(&run);
    }
}

/* A block adds its dQ after the block before it. In each run another stream delays other blocks. The bits
 * must not change. Without the order the sums would differ by their rounding. */
TD_TEST(deterministic_gradients_repeat_during_other_work)
{
    enum { REPEATS = 20 };
    const int64_t sizes[] = {64, 96, 128};
    td_stream *other;

    td_assert_ok(td_stream_create(gpu, &other));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const td_attention_shape shape = {.batch = 2,
                                          .heads = 9,
                                          .seq = 1100,
                                          .head_dim = sizes[i],
                                          .dtype = TD_BF16,
                                          .causal = true,
                                          .deterministic = true};
        td_attend_run run = inputs_of("beside", &shape), load = inputs_of("load", &shape);
        results first = compute(&run, 0);
        const blocks b = open_blocks(&run, 0), l = open_blocks(&load, 0);

        load.shape.deterministic = false;
        td_attend_run in_any_order = run;
        in_any_order.shape.deterministic = false;
        results other_order = compute(&in_any_order, 0);
        double *dq = td_as_f64(shape.dtype, other_order.dq, run.queries);
        td_assert_close("dq", shape.dtype, first.dq, dq, run.queries, tolerance_of(&shape));
        free(dq);
        free_results(&other_order);
        for (int n = 0; n < REPEATS; n++) {
            td_assert_ok(td_device_set_stream(gpu, other));
            for (int pass = 0; pass <= n % 3; pass++)
                run_passes(&load, &l, 0);
            td_assert_ok(td_device_set_stream(gpu, NULL));
            run_passes(&run, &b, 0);
            td_assert_ok(td_device_synchronize(gpu));
            results again = {.o = read_behind(&run, b.o, run.queries, 0),
                             .dq = read_behind(&run, b.dq, run.queries, 0),
                             .dk = read_behind(&run, b.dk, run.keys, 0),
                             .dv = read_behind(&run, b.dv, run.keys, 0),
                             .lse = td_gpu_read(gpu, b.lse, b.sizes.saved)};
            assert_identical_results(&run, &first, &again, true);
            free_results(&again);
        }
        td_assert_ok(td_device_set_stream(gpu, other));
        td_assert_ok(td_device_synchronize(gpu));
        td_assert_ok(td_device_set_stream(gpu, NULL));
        close_blocks(&b);
        close_blocks(&l);
        free_results(&first);
        free_inputs(&run);
        free_inputs(&load);
    }
    td_stream_destroy(other);
}

/* ---- sizes and refusals ---- */

/* Scratch is linear in the number of rows, also if a sequence is cut into parts. */
TD_TEST(memory_is_linear)
{
    for (int kind = 0; kind < KINDS; kind++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            td_attention_shape shape = {.batch = 1,
                                        .heads = 1,
                                        .head_dim = 64,
                                        .dtype = kinds[kind].dtype,
                                        .tf32 = kinds[kind].tf32,
                                        .causal = true,
                                        .deterministic = deterministic};
            for (shape.seq = 128; shape.seq <= 1 << 22; shape.seq *= 2) {
                const size_t row = 64 * sizeof(float);
                td_attention_sizes sizes;

                td_assert_ok(td_flash_sizes(gpu, &shape, &sizes));
                assert_int_equal(sizes.saved, (size_t)shape.seq * sizeof(float));
                assert_true(sizes.forward_work <= 33 * row * (size_t)shape.seq + 4096);
                assert_true(sizes.backward_work <= 66 * row * (size_t)shape.seq + 65536);
                if (shape.seq >= 1 << 18) { /* enough tiles for every SM */
                    assert_true(sizes.forward_work <= 256);
                    assert_true(sizes.backward_work <= 2 * row * (size_t)shape.seq);
                }
            }
        }
}

TD_TEST(refuses_what_it_has_no_kernel_for)
{
    const struct {
        const char *words;
        td_attention_shape shape;
        td_status status;
    } cases[] = {
        {"head_dim is 257",
         {.batch = 1, .heads = 1, .seq = 3, .head_dim = 257, .dtype = TD_BF16},
         TD_UNSUPPORTED},
        {"dtype is f64", {.batch = 1, .heads = 1, .seq = 3, .head_dim = 4, .dtype = TD_F64}, TD_UNSUPPORTED},
        {"more tiles than a grid",
         {.batch = 1 << 20, .heads = 1 << 10, .seq = 1 << 10, .head_dim = 4, .dtype = TD_BF16},
         TD_UNSUPPORTED},
        {"tf32 is set, but dtype is bf16",
         {.batch = 1, .heads = 1, .seq = 3, .head_dim = 4, .dtype = TD_BF16, .tf32 = true},
         TD_BAD_ARGUMENT},
    };
    float x = 0;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const td_attention_shape *const shape = &cases[i].shape;
        td_attention_sizes sizes;

        td_assert_refused(td_flash_sizes(gpu, shape, &sizes), cases[i].status, cases[i].words);
        td_assert_refused(td_flash_forward(gpu, shape, &x, &x, &x, &x, &x, &x), cases[i].status,
                          cases[i].words);
        td_assert_refused(td_flash_backward(gpu, shape, &x, &x, &x, &x, &x, &x, &x, &x, &x, &x),
                          cases[i].status, cases[i].words);
    }
}

TD_TEST(work_may_be_null_where_none_is_needed)
{
    const td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 5, .head_dim = 4, .dtype = TD_BF16};
    td_attend_run run = inputs_of("no work", &shape);
    const blocks b = open_blocks(&run, 0);
    td_attention_sizes sizes;

    td_assert_ok(td_flash_sizes(gpu, &shape, &sizes));
    assert_int_equal(sizes.forward_work, 0);
    td_assert_ok(td_flash_forward(gpu, &shape, b.q, b.k, b.v, b.o, b.lse, NULL));
    td_assert_refused(
        td_flash_backward(gpu, &shape, b.q, b.k, b.v, b.o, b.dout, b.lse, b.dq, b.dk, b.dv, NULL),
        TD_BAD_ARGUMENT, "work is NULL");
    td_assert_ok(td_device_synchronize(gpu));
    close_blocks(&b);
    free_inputs(&run);
}

int main(void)
{
    gpu = td_gpu_open();
    int failed = run_trials();
    if (!td_gpu_small())
        failed += td_run_tests("flash attention on a GPU", NULL, NULL);
    td_device_close(gpu);
    return failed;
}
