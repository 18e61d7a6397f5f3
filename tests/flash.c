#include "support/attention_kit.h"

#include "flash/flash.h"
#include "flash/tile.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <math.h>
#include <stdalign.h>
#include <unistd.h>

TD_TEST(lse_is_the_log_of_the_row_sums)
{
    const td_attention_shape shapes[] = {
        {.batch = 1, .heads = 2, .seq = 1, .seq_k = 130, .head_dim = 8, .dtype = TD_F32},
        {.batch = 2, .heads = 1, .seq = 131, .head_dim = 64, .dtype = TD_F32, .causal = true},
        {.batch = 1, .heads = 1, .seq = 65, .seq_k = 200, .head_dim = 80, .dtype = TD_BF16},
    };

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        td_attend_run *run = td_attend_open(&td_attention_flash, "lse", &shapes[i]);
        td_attend_truth truth = td_attend_truth_of(run);

        td_attend_go(run, true);
        td_fence_assert_written("lse", TD_F32, run->saved, run->rows);
        td_assert_close("lse", TD_F32, run->saved, truth.lse, run->rows, 2e-7);
        td_attend_truth_free(&truth);
        td_attend_close(run);
    }
}

/* Scores of 0: L = log(keys), rounded once. Scores of 10000: L is the score itself. */
TD_TEST(lse_is_exact_where_it_can_be)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 70, .head_dim = 16, .dtype = TD_F32, .causal = true, .scale = 1};
    td_attend_run *run = td_attend_open(&td_attention_flash, "exact lse", &shape);

    memset(run->q, 0, (size_t)run->queries * sizeof(float));
    td_attend_go(run, true);
    for (int64_t row = 0; row < 70; row++)
        assert_true(td_value_at(TD_F32, run->saved, row) == (float)log((double)(row + 1)));

    memset(run->k, 0, (size_t)run->keys * sizeof(float));
    for (int64_t row = 0; row < 70; row++) {
        ((float *)run->q)[row * 16] = 100;
        ((float *)run->k)[row * 16] = row == 0 ? 100 : -100;
    }
    td_attend_go(run, true);
    for (int64_t row = 0; row < 70; row++)
        assert_true(fabs(td_value_at(TD_F32, run->saved, row) - 10000) <= 1e-3); /* an ulp of 1e4 */
    td_attend_close(run);
}

/* A score that overflows to -infinity has no weight. This also holds if a whole tile of them comes first:
 * the running maximum is -infinity after it. In float64 these scores are -1e40, which has no weight
 * either. */
TD_TEST(a_tile_of_keys_at_minus_infinity_has_no_weight)
{
    const int64_t seq_k = 150, d = 16;
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 20, .seq_k = seq_k, .head_dim = d, .dtype = TD_F32, .scale = 1};
    td_attend_run *run = td_attend_open(&td_attention_flash, "hopeless", &shape);

    for (int64_t row = 0; row < 20; row++)
        *(float *)td_attend_row(run, run->q, row) = 1e20f;
    for (int64_t row = 0; row < seq_k; row++)
        *(float *)td_attend_row(run, run->k, row) = row < 100 ? -1e20f : 0;
    td_attend_truth truth = td_attend_truth_of(run);
    td_attend_go(run, false);
    td_assert_close("o", TD_F32, run->o, truth.o, run->queries, 2e-6);
    td_assert_close("lse", TD_F32, run->saved, truth.lse, run->rows, 2e-6);
    td_assert_close("dv", TD_F32, run->dv, truth.dv, run->keys, 2e-6);
    td_attend_truth_free(&truth);
    td_attend_close(run);
}

/* There is no score matrix: the scratch of forward does not depend on the sequence. The scratch of backward
 * holds the sums of dK and dV of the heads in progress, and a counter for each tile. */
TD_TEST(memory_is_linear)
{
    const td_dtype dtypes[] = {TD_F32, TD_BF16};
    const int64_t head_dims[] = {64, 80, 256};
    const long processors = sysconf(_SC_NPROCESSORS_CONF);

    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 3; j++) {
            td_attention_shape shape = {.batch = 1, .heads = 1, .head_dim = head_dims[j], .dtype = dtypes[i]};
            td_attention_sizes small, large;
            const size_t d = (size_t)head_dims[j];

            shape.seq = 1 << 16;
            td_assert_ok(td_flash_sizes(*state, &shape, &small));
            shape.seq = 1 << 17;
            td_assert_ok(td_flash_sizes(*state, &shape, &large));
            assert_int_equal(small.saved, sizeof(float) << 16);
            assert_int_equal(large.saved, sizeof(float) << 17);
            assert_int_equal(large.forward_work, small.forward_work);
            /* At most six tiles of 64 x head_dim and two of 64 x 64 for each thread. */
            assert_in_range(large.forward_work, 1,
                            (uintmax_t)processors * (6 * 64 * (d + 16) + 2 * 64 * 64) * 4);
            assert_true(large.backward_work <= 2 * small.backward_work);
            assert_in_range(large.backward_work, 1,
                            (uintmax_t)processors * (9 * 64 * (d + 16) + 2 * 64 * 64) * 4 +
                                (2 * (d + 16) * 4 + 1) * ((uintmax_t)1 << 17));
        }
}

/* The size of scratch stays large enough if the number of threads changes later. */
TD_TEST(sizes_hold_for_any_number_of_threads)
{
    const td_attention_shape shape = {.batch = 4, .heads = 4, .seq = 300, .head_dim = 40, .dtype = TD_BF16};
    td_attention_sizes one, many;

    td_assert_ok(td_cpu_set_threads(1));
    td_assert_ok(td_flash_sizes(*state, &shape, &one));
    td_attend_run *run = td_attend_open(&td_attention_flash, "threads", &shape);
    td_assert_ok(td_cpu_set_threads(9));
    td_assert_ok(td_flash_sizes(*state, &shape, &many));
    assert_memory_equal(&one, &many, sizeof one);
    td_attend_go(run, false); /* between fences */
    td_assert_ok(td_cpu_set_threads(2));
    td_attend_close(run);
}

/* One thread and several threads that wait for each other give the same bits, in many calls. */
TD_TEST(one_head_shared_by_threads_repeats)
{
    const td_attention_shape shapes[] = {
        {.batch = 1, .heads = 1, .seq = 700, .head_dim = 16, .dtype = TD_F32, .causal = true},
        {.batch = 1, .heads = 1, .seq = 300, .seq_k = 500, .head_dim = 24, .dtype = TD_BF16},
        {.batch = 1, .heads = 3, .seq = 333, .seq_k = 222, .head_dim = 8, .dtype = TD_F32, .causal = true},
    };

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        td_attend_run *alone = td_attend_open(&td_attention_flash, "shared head", &shapes[i]);
        td_attend_run *shared = td_attend_open(&td_attention_flash, "shared head", &shapes[i]);

        td_assert_ok(td_cpu_set_threads(1));
        td_attend_go(alone, false);
        for (int round = 0; round < 6; round++) {
            td_assert_ok(td_cpu_set_threads(2 + round % 3));
            td_attend_go(shared, false);
            td_attend_assert_identical(alone, shared);
        }
        td_assert_ok(td_cpu_set_threads(2));
        td_attend_close(alone);
        td_attend_close(shared);
    }
}

/* A head of many gives the same bits as that head alone. Heads share threads, and results must not depend on
 * that. */
TD_TEST(a_head_is_the_same_alone)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const td_dtype dtype = bf16 ? TD_BF16 : TD_F32;
        td_attention_shape shape = {
            .batch = 3, .heads = 1, .seq = 200, .seq_k = 170, .head_dim = 40, .dtype = dtype, .causal = true};
        td_attend_run *all = td_attend_open(&td_attention_flash, "heads", &shape);
        shape.batch = 1;
        td_attend_run *one = td_attend_open(&td_attention_flash, "heads", &shape);

        for (int threads = 1; threads <= 3; threads++) {
            td_assert_ok(td_cpu_set_threads(threads));
            td_attend_go(all, false);
            for (int64_t head = 0; head < 3; head++) {
                memcpy(one->q, td_attend_row(all, all->q, head * 200),
                       (size_t)one->queries * td_dtype_size(dtype));
                memcpy(one->k, td_attend_row(all, all->k, head * 170),
                       (size_t)one->keys * td_dtype_size(dtype));
                memcpy(one->v, td_attend_row(all, all->v, head * 170),
                       (size_t)one->keys * td_dtype_size(dtype));
                memcpy(one->dout, td_attend_row(all, all->dout, head * 200),
                       (size_t)one->queries * td_dtype_size(dtype));
                td_attend_go(one, false);
                td_assert_identical("o", dtype, one->o, td_attend_row(all, all->o, head * 200), one->queries);
                td_assert_identical("dq", dtype, one->dq, td_attend_row(all, all->dq, head * 200),
                                    one->queries);
                td_assert_identical("dk", dtype, one->dk, td_attend_row(all, all->dk, head * 170), one->keys);
                td_assert_identical("dv", dtype, one->dv, td_attend_row(all, all->dv, head * 170), one->keys);
            }
        }
        td_attend_close(all);
        td_attend_close(one);
    }
}

/* More keys than queries under a causal mask: keys after the last query have a gradient of 0, which must
 * be written. */
TD_TEST(keys_that_no_query_sees_have_no_gradient)
{
    const int64_t seqs[] = {1, 16, 50, 64, 100};

    for (int bf16 = 0; bf16 < 2; bf16++)
        for (size_t i = 0; i < sizeof seqs / sizeof *seqs; i++) {
            const td_dtype dtype = bf16 ? TD_BF16 : TD_F32;
            const td_attention_shape shape = {.batch = 2,
                                              .heads = 1,
                                              .seq = seqs[i],
                                              .seq_k = 200,
                                              .head_dim = 16,
                                              .dtype = dtype,
                                              .causal = true};
            td_attend_run *run = td_attend_open(&td_attention_flash, "unseen", &shape);

            td_attend_go(run, false);
            for (int64_t head = 0; head < 2; head++)
                for (int64_t j = seqs[i] * 16; j < 200 * 16; j++) {
                    assert_true(td_value_at(dtype, run->dk, head * 200 * 16 + j) == 0);
                    assert_true(td_value_at(dtype, run->dv, head * 200 * 16 + j) == 0);
                }
            td_attend_close(run);
        }
}

TD_TEST(refuses_what_it_has_no_kernel_for)
{
    td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 3, .head_dim = 257, .dtype = TD_F32};
    td_attention_sizes sizes;

    td_assert_refused(td_flash_sizes(*state, &shape, &sizes), TD_UNSUPPORTED, "head_dim is 257");
    shape.head_dim = 256;
    td_assert_ok(td_flash_sizes(*state, &shape, &sizes));
}

TD_TEST(refuses_rows_of_gradients)
{
    static const float angles[4];
    const struct {
        int64_t pitch, head_dim;
        const float *cos, *sin;
        td_status status;
        const char *words;
    } cases[] = {{7, 4, NULL, NULL, TD_BAD_ARGUMENT, "grad_pitch is 7"},
                 {-1, 4, NULL, NULL, TD_BAD_ARGUMENT, "grad_pitch is -1"},
                 {INT64_MAX, 4, NULL, NULL, TD_BAD_ARGUMENT, "rows of gradients"},
                 {24, 4, angles, NULL, TD_BAD_ARGUMENT, "sin is NULL"},
                 {24, 4, NULL, angles, TD_BAD_ARGUMENT, "cos is NULL"},
                 {0, 4, angles, angles, TD_BAD_ARGUMENT, "cos is set"},
                 {24, 3, angles, angles, TD_BAD_ARGUMENT, "cos is set"},
                 {24, 4, angles, angles, TD_UNSUPPORTED, "grad_pitch is 24"}}; /* only on Hopper */
    const td_attention_impl *const impls[] = {&td_attention_flash, &td_attention_naive};
    float x = 0;

    for (size_t i = 0; i < 2 * (sizeof cases / sizeof *cases); i++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 3,
                                          .head_dim = cases[i / 2].head_dim,
                                          .dtype = TD_F32,
                                          .grad_pitch = cases[i / 2].pitch,
                                          .cos = cases[i / 2].cos,
                                          .sin = cases[i / 2].sin};

        td_assert_refused(impls[i % 2]->backward(*state, &shape, &x, &x, &x, &x, &x, &x, &x, &x, &x, NULL),
                          cases[i / 2].status, cases[i / 2].words);
    }
}

/* On the CPU results are always deterministic. */
TD_TEST(deterministic_changes_nothing)
{
    td_attention_shape shape = {
        .batch = 2, .heads = 2, .seq = 70, .head_dim = 24, .dtype = TD_F32, .causal = true};
    td_attend_run *plain = td_attend_open(&td_attention_flash, "deterministic", &shape);
    shape.deterministic = true;
    td_attend_run *set = td_attend_open(&td_attention_flash, "deterministic", &shape);

    assert_memory_equal(&plain->sizes, &set->sizes, sizeof set->sizes);
    td_attend_go(plain, false);
    td_attend_go(set, false);
    td_attend_assert_identical(plain, set);
    td_attend_close(plain);
    td_attend_close(set);
}

TD_TEST(says_what_it_is)
{
    td_attention_traits traits;

    assert_string_equal(td_attention_flash.name, "flash");
    td_assert_ok(td_attention_flash.describe(TD_DEVICE_CPU, &traits));
    assert_string_equal(traits.saved, "lse");
    assert_int_equal(traits.saved_floats, 1);
    assert_true(traits.skips_masked && traits.rebuilds_scores && !traits.tf32);
    assert_int_equal(traits.dtypes, 1 << TD_F32 | 1 << TD_BF16);
    td_assert_ok(td_attention_flash.describe(TD_DEVICE_CUDA, &traits));
    assert_int_equal(traits.dtypes, 1 << TD_F32 | 1 << TD_BF16 | 1 << TD_F16);
}

/* Tensors need only the alignment of their elements. */
TD_TEST(takes_tensors_at_any_address)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 1, .seq = 70, .head_dim = 16, .dtype = TD_F32, .causal = true};
    td_attend_run *run = td_attend_open(&td_attention_flash, "addresses", &shape);
    float *tensors[8]; /* q, k, v, dout, o, dq, dk, dv; each starts one float after its block */
    void *const from[] = {run->q, run->k, run->v, run->dout};
    float *lse = td_fence_alloc((size_t)(run->rows + 1) * sizeof(float));

    for (int i = 0; i < 8; i++) {
        tensors[i] = td_fence_alloc((size_t)(run->queries + 1) * sizeof(float));
        if (i < 4)
            memcpy(tensors[i] + 1, from[i], (size_t)run->queries * sizeof(float));
    }
    td_attend_go(run, false);
    td_assert_ok(td_flash_forward(run->dev, &shape, tensors[0] + 1, tensors[1] + 1, tensors[2] + 1,
                                  tensors[4] + 1, lse + 1, run->forward_work));
    td_assert_ok(td_flash_backward(run->dev, &shape, tensors[0] + 1, tensors[1] + 1, tensors[2] + 1,
                                   tensors[4] + 1, tensors[3] + 1, lse + 1, tensors[5] + 1, tensors[6] + 1,
                                   tensors[7] + 1, run->backward_work));
    td_assert_identical("lse", TD_F32, lse + 1, run->saved, run->rows);
    td_assert_identical("o", TD_F32, tensors[4] + 1, run->o, run->queries);
    td_assert_identical("dq", TD_F32, tensors[5] + 1, run->dq, run->queries);
    td_assert_identical("dk", TD_F32, tensors[6] + 1, run->dk, run->keys);
    td_assert_identical("dv", TD_F32, tensors[7] + 1, run->dv, run->keys);
    for (int i = 0; i < 8; i++)
        td_fence_free(tensors[i]);
    td_fence_free(lse);
    td_attend_close(run);
}

/* If scores are large, the rounding of L to f32 would make a large error in P. Scores in f32 have a relative
 * error of about 1e-7, which is the tolerance. An L of 10,000 in f32 has an error of 5e-4, which is 10 times
 * as much. */
TD_TEST(large_scores_are_as_exact_as_their_sums)
{
    const double logits[] = {30, 60, 100, 300, 1000, 3000, 10000};

    for (size_t i = 0; i < sizeof logits / sizeof *logits; i++)
        for (int causal = 0; causal < 2; causal++) {
            td_attention_shape shape = {
                .batch = 1, .heads = 1, .seq = 160, .head_dim = 64, .dtype = TD_F32, .causal = causal};
            shape.scale = (float)(logits[i] / 35); /* the largest of so many dot products is about 35 */
            td_attend_run *run = td_attend_open(&td_attention_flash, "large scores", &shape);
            td_attend_truth truth = td_attend_truth_of(run);

            td_attend_go(run, false);
            td_assert_close("o", TD_F32, run->o, truth.o, run->queries, 1e-6 + 5e-9 * logits[i]);
            td_assert_close("dv", TD_F32, run->dv, truth.dv, run->keys, 1e-6 + 5e-9 * logits[i]);
            td_assert_close("dq", TD_F32, run->dq, truth.dq, run->queries, 2e-6 + 2e-7 * logits[i]);
            td_assert_close("dk", TD_F32, run->dk, truth.dk, run->keys, 2e-6 + 2e-7 * logits[i]);
            td_attend_truth_free(&truth);
            td_attend_close(run);
        }
}

/* Tests every register block, with depths around the end of a run. Inputs are small integers, so no sum is
 * rounded in any order. */
TD_TEST(products_of_tiles_are_exact_on_integers)
{
    enum { ROWS = 13, DEPTH = 70, COLUMNS = TD_TILE_QUERIES };
    static const int64_t depths[] = {1, 5, 31, 32, 33, 64, 70};
    static const td_tile_op ops[] = {TD_TILE_STORE, TD_TILE_ADD, TD_TILE_RESCALE};
    static float a[ROWS * DEPTH], c[ROWS * COLUMNS];
    static alignas(64) float b[DEPTH * COLUMNS], alpha[COLUMNS];

    for (int i = 0; i < ROWS * DEPTH; i++)
        a[i] = (float)(i * 7 % 5 - 2);
    for (int i = 0; i < DEPTH * COLUMNS; i++)
        b[i] = (float)(i * 11 % 7 - 3);
    for (int i = 0; i < COLUMNS; i++)
        alpha[i] = (float)(i % 3);
    for (size_t o = 0; o < sizeof ops / sizeof *ops; o++)
        for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
            for (int64_t rows = 1; rows <= ROWS; rows++)
                for (int64_t groups = 1; groups <= COLUMNS / TD_GROUP; groups++) {
                    const bool transposed = ops[o] == TD_TILE_RESCALE;
                    const int64_t lda = transposed ? ROWS : DEPTH;

                    for (int i = 0; i < ROWS * COLUMNS; i++)
                        c[i] = (float)(i % 13);
                    td_tile_multiply(&(td_tile_gemm){.op = ops[o],
                                                     .rows = rows,
                                                     .groups = groups,
                                                     .depth = depths[d],
                                                     .a = a,
                                                     .lda = lda,
                                                     .b = b,
                                                     .ldb = COLUMNS,
                                                     .c = c,
                                                     .ldc = COLUMNS,
                                                     .alpha = alpha});
                    for (int64_t r = 0; r < ROWS; r++)
                        for (int64_t n = 0; n < COLUMNS; n++) {
                            const float before = (float)((r * COLUMNS + n) % 13);
                            float expected = ops[o] == TD_TILE_STORE ? 0
                                             : ops[o] == TD_TILE_ADD ? before
                                                                     : alpha[n] * before;

                            for (int64_t k = 0; k < depths[d]; k++)
                                expected += a[transposed ? k * lda + r : r * lda + k] * b[k * COLUMNS + n];
                            if (r >= rows || n >= groups * TD_GROUP)
                                expected = before;
                            if (c[r * COLUMNS + n] != expected)
                                fail_msg("op %d, %d x %d groups, depth %d: [%d, %d] is %g, not %g",
                                         (int)ops[o], (int)rows, (int)groups, (int)depths[d], (int)r, (int)n,
                                         (double)c[r * COLUMNS + n], (double)expected);
                        }
                }
}

TD_TEST(exp2_is_as_close_as_it_says)
{
    assert_true(td_exp2(0) == 1);
    assert_true(td_exp2(-INFINITY) == 0 && td_exp2(-1e30f) == 0 && td_exp2(-127) == 0);
    assert_true(isnan(td_exp2(NAN)));
    for (int n = -126; n < 128; n++)
        assert_true(td_exp2((float)n) == ldexp(1, n));
    /* The error is 0.8 ulp if multiplications and additions are fused. A debug build may not fuse them. */
    for (int i = 0; i < 1000000; i++) {
        const float x = (float)(-126 + 253e-6 * i);
        const double truth = exp2((double)x);
        int exponent;

        (void)frexp(truth, &exponent);
        if (!(fabs((double)td_exp2(x) - truth) <= 1.5 * ldexp(1, exponent - 24)))
            fail_msg("exp2(%.9g) is %.9g, truth %.9g", (double)x, (double)td_exp2(x), truth);
    }
}

int main(void)
{
    const td_attend_subject flash = {&td_attention_flash, 128};

    return td_attend_common_tests(&flash) + td_run_tests("flash", td_attend_open_cpu, td_attend_close_cpu);
}
