/* Where zeros, infinities and NaN must go, and where not. */
#include "flash/flash.h"
#include "support/compare.h"
#include "support/flash_gpu_kit.h"
#include "support/gpu.h"
#include "support/test.h"

#include <math.h>

/* More keys than queries under a causal mask: keys after the last query have a gradient of 0, which must
 * be written. */
TD_TEST(keys_that_no_query_sees_have_no_gradient)
{
    const int64_t seqs[] = {1, 16, 50, 64, 100, 128};

    for (int kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < sizeof seqs / sizeof *seqs; i++) {
            const td_attention_shape shape = {.batch = 2,
                                              .heads = 1,
                                              .seq = seqs[i],
                                              .seq_k = 200,
                                              .head_dim = 16,
                                              .dtype = kinds[kind].dtype,
                                              .tf32 = kinds[kind].tf32,
                                              .causal = true};
            td_attend_run run = inputs_of("unseen", &shape);
            results r = compute(&run, 0);

            for (int64_t head = 0; head < 2; head++)
                for (int64_t j = seqs[i] * 16; j < 200 * 16; j++) {
                    assert_true(td_value_at(shape.dtype, r.dk, head * 200 * 16 + j) == 0);
                    assert_true(td_value_at(shape.dtype, r.dv, head * 200 * 16 + j) == 0);
                }
            free_results(&r);
            free_inputs(&run);
        }
}

/* If a row sees one key, its lse is that key's score. Scores are small integers, so f32 gives the same bits.
 * On tensor cores the only rounding is that of the exponent of the probability 2^0. 1100 keys of one head are
 * cut into parts. */
TD_TEST(lse_of_one_key_is_its_score)
{
    for (int i = 0; i < 3 * KINDS; i++) {
        const int kind = i % KINDS, long_row = i / KINDS;
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 1,
                                          .seq = long_row == 1 ? 1100 : 40,
                                          .seq_k = long_row == 0   ? 1
                                                   : long_row == 1 ? 1100
                                                                   : 40,
                                          .head_dim = 40,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = long_row > 0};
        td_attend_run run = inputs_of("one key", &shape);

        for (int64_t j = 0; j < run.queries; j++) {
            const float value = (float)(j * 7 % 5 - 1);
            td_assert_ok(td_convert(1, TD_F32, &value, shape.dtype,
                                    (char *)run.q + (size_t)j * td_dtype_size(shape.dtype)));
        }
        for (int64_t j = 0; j < 40; j++) {
            const float value = (float)(j * 3 % 7 - 2);
            td_assert_ok(td_convert(1, TD_F32, &value, shape.dtype,
                                    (char *)run.k + (size_t)j * td_dtype_size(shape.dtype)));
        }
        results r = compute(&run, 0);
        for (int64_t row = 0; row < (long_row ? 1 : run.rows); row++) {
            float score = 0;
            for (int64_t c = 0; c < 40; c++)
                score += (float)((row * 40 + c) * 7 % 5 - 1) * (float)(c * 3 % 7 - 2);
            score *= (float)(1 / sqrt(40.0));
            const float off = fabsf(r.lse[row] - score);
            if (!(off <=
                  (kinds[kind].dtype == TD_F32 && !kinds[kind].tf32 ? 0 : 4e-7f * fmaxf(1, fabsf(score)))))
                fail_msg("lse[%d] is %.9g, the score %.9g", (int)row, (double)r.lse[row], (double)score);
        }
        free_results(&r);
        free_inputs(&run);
    }
}

/* Scores that overflow to -infinity have no weight. This also holds if whole tiles of them come first
 * (tiles run from the last key down). */
TD_TEST(tiles_of_keys_at_minus_infinity_have_no_weight)
{
    const int64_t seq = 20, seq_k = 300, d = 16;

    for (int kind = 0; kind < 2; kind++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 1,
                                          .seq = seq,
                                          .seq_k = seq_k,
                                          .head_dim = d,
                                          .dtype = TD_F32,
                                          .tf32 = kinds[kind].tf32,
                                          .scale = 1};
        td_attend_run run = inputs_of("hopeless", &shape);

        for (int64_t row = 0; row < seq; row++)
            *(float *)td_attend_row(&run, run.q, row) = 0x1p70f;
        for (int64_t row = 0; row < seq_k; row++)
            *(float *)td_attend_row(&run, run.k, row) = row < 100 ? 0 : -0x1p70f;
        td_attend_truth truth = td_attend_truth_of(&run);
        results r = compute(&run, 0);
        td_assert_close("o", TD_F32, r.o, truth.o, run.queries, tolerance_of(&shape));
        td_assert_close("dv", TD_F32, r.dv, truth.dv, run.keys, tolerance_of(&shape));
        free_results(&r);
        td_attend_truth_free(&truth);
        free_inputs(&run);
    }
}

/* An output that depends on the NaN must be NaN. An output may be NaN if it would depend on the NaN with a
 * mask that hides only whole blocks. Other values must be as without the NaN, except for the order of sums: a
 * warp rescales its rows together. */
static void assert_spoilt(const td_attend_run *run, const results *clean, const results *r, int64_t block,
                          td_attend_place bad)
{
    const td_attention_shape *const s = &run->shape;
    const struct {
        const char *name;
        td_attend_tensor tensor;
        const void *was, *is;
        int64_t rows, columns;
        td_dtype dtype;
    } outputs[] = {{"o", TD_ATTEND_O, clean->o, r->o, s->seq, s->head_dim, s->dtype},
                   {"dq", TD_ATTEND_DQ, clean->dq, r->dq, s->seq, s->head_dim, s->dtype},
                   {"dk", TD_ATTEND_DK, clean->dk, r->dk, s->seq_k, s->head_dim, s->dtype},
                   {"dv", TD_ATTEND_DV, clean->dv, r->dv, s->seq_k, s->head_dim, s->dtype},
                   {"lse", TD_ATTEND_LSE, clean->lse, r->lse, s->seq, 1, TD_F32}};
    const int count = run->impl == &td_attention_flash ? 5 : 4; /* naive saves P */

    for (int i = 0; i < count; i++)
        for (int64_t j = 0; j < s->batch * s->heads * outputs[i].rows * outputs[i].columns; j++) {
            const td_attend_place to = {.tensor = outputs[i].tensor,
                                        .head = j / outputs[i].columns / outputs[i].rows,
                                        .row = j / outputs[i].columns % outputs[i].rows,
                                        .column = j % outputs[i].columns};
            const double was = td_value_at(outputs[i].dtype, outputs[i].was, j);
            const double is = td_value_at(outputs[i].dtype, outputs[i].is, j);
            const char *wrong = NULL;

            if (!isnan(is) && td_attend_depends(s, 1, bad, to))
                wrong = "no NaN";
            else if (isnan(is) && !td_attend_depends(s, block, bad, to))
                wrong = "NaN";
            else if (!isnan(is) && !(fabs(is - was) <= 0.02 * fmax(1, fabs(was))))
                wrong = "another number";
            if (wrong)
                fail_msg("%s, NaN in input %d, row %d: %s[%d, %d, %d] is %s", run->impl->name,
                         (int)bad.tensor, (int)bad.row, outputs[i].name, (int)to.head, (int)to.row,
                         (int)to.column, wrong);
        }
}

static void poison_element(const td_attend_run *run, void *data, int64_t index)
{
    const float not_a_number = NAN;
    const td_dtype dtype = run->shape.dtype;

    td_assert_ok(
        td_convert(1, TD_F32, &not_a_number, dtype, (char *)data + (size_t)index * td_dtype_size(dtype)));
}

TD_TEST(nan_goes_where_it_must)
{
    const td_attention_impl *const impls[] = {&td_attention_flash, &td_attention_naive};
    const struct {
        int64_t seq, seq_k, head_dim;
        bool causal;
    } shapes[] = {{130, 130, 20, false}, {130, 130, 20, true}, {260, 260, 64, true},  {50, 201, 80, true},
                  {201, 50, 128, true},  {1, 37, 16, true},    {1100, 1100, 16, true}};
    const td_attend_tensor tensors[] = {TD_ATTEND_Q, TD_ATTEND_K, TD_ATTEND_V, TD_ATTEND_DOUT};
    const int64_t rows[] = {0, 31, 64, 77, 128, 700}; /* at most the last row of its tensor */

    for (size_t i = 0; i < 2 * KINDS * sizeof shapes / sizeof *shapes; i++) {
        const int kind = (int)(i / 2) % KINDS;
        const size_t which = i / 2 / KINDS;
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = shapes[which].seq,
                                          .seq_k = shapes[which].seq_k,
                                          .head_dim = shapes[which].head_dim,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = shapes[which].causal,
                                          .deterministic = which % 2};
        const size_t element = td_dtype_size(shape.dtype);
        td_attend_run run = inputs_of("nan", &shape);
        void *const inputs[] = {run.q, run.k, run.v, run.dout};

        run.impl = impls[i % 2];
        results clean = compute(&run, 0);
        for (int input = 0; input < 4; input++)
            for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
                const bool of_query = input == 0 || input == 3;
                const int64_t of_head = of_query ? shape.seq : shape.seq_k;
                const td_attend_place bad = {.tensor = tensors[input],
                                             .head = (int64_t)n % 2,
                                             .row = rows[n] < of_head ? rows[n] : of_head - 1,
                                             .column = 3 + (int64_t)n};
                const int64_t at = (bad.head * of_head + bad.row) * shape.head_dim + bad.column;
                char *const place = (char *)inputs[input] + (size_t)at * element;
                char was[sizeof(double)];

                memcpy(was, place, element);
                poison_element(&run, inputs[input], at);
                results r = compute(&run, 0);
                assert_spoilt(&run, &clean, &r, run.impl == &td_attention_flash ? 128 : 0, bad);
                free_results(&r);
                memcpy(place, was, element);
            }
        free_results(&clean);
        free_inputs(&run);
    }
}

/* If all scores of a part are NaN, the part has no largest score, like a part without a visible key. Few
 * queries of one head have a part for every 64 or 128 keys. */
TD_TEST(a_part_of_nan_keys_spoils_every_row)
{
    const int64_t firsts[] = {0, 128, 512, 1024}, seqs[] = {1, 20}, d = 32;

    for (size_t i = 0; i < 2 * KINDS * sizeof firsts / sizeof *firsts; i++) {
        const int kind = (int)(i / 2) % KINDS;
        const int64_t first = firsts[i / 2 / KINDS];
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 1,
                                          .seq = seqs[i % 2],
                                          .seq_k = 1300,
                                          .head_dim = d,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32};
        td_attend_run run = inputs_of("part of nan", &shape);

        for (int64_t j = first; j < first + 128; j++)
            poison_element(&run, run.k, j * d + j % d);
        results r = compute(&run, 0);
        for (int64_t j = 0; j < run.rows; j++)
            if (!isnan(r.lse[j]))
                fail_msg("keys from %d on: lse[%d] is %g", (int)first, (int)j, (double)r.lse[j]);
        for (int64_t j = 0; j < run.queries; j++)
            assert_true(isnan(td_value_at(shape.dtype, r.o, j)) && isnan(td_value_at(shape.dtype, r.dq, j)));
        for (int64_t j = 0; j < run.keys; j++)
            assert_true(isnan(td_value_at(shape.dtype, r.dk, j)) && isnan(td_value_at(shape.dtype, r.dv, j)));
        free_results(&r);
        free_inputs(&run);
    }
}

int main(void)
{
    gpu = td_gpu_open();
    if (td_gpu_small())
        td_test_count = 1;
    const int failed = td_run_tests("values of flash attention on a GPU", NULL, NULL);
    td_device_close(gpu);
    return failed;
}
