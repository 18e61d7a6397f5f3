#include "base/float16.h"
#include "support/gpu.h"
#include "support/ops_kit.h"

/* ---- embedding ---- */

/* 301 ones: a bf16 sum would stop at 256. */
TD_TEST(embedding_sums_in_f32)
{
    enum { TOKENS = 301 };
    ops_case c = ops_begin(TD_BF16, "embedding sum");
    td_embedding_shape shape = {.tokens = TOKENS, .vocab = 2, .d_model = 1, .dtype = TD_BF16};
    int64_t *ids = ops_draw_ids(&c, TOKENS, 1);
    uint16_t *dy = ops_room(&c, TD_BF16, TOKENS);
    void *dweight = ops_room(&c, TD_BF16, 2);
    size_t bytes;

    for (int t = 0; t < TOKENS; t++) {
        ids[t] = 1;
        dy[t] = 0x3F80; /* 1 */
    }
    td_assert_ok(td_embedding_backward_work_bytes(ops_dev, &shape, &bytes));
    OPS_CALL(td_embedding_backward(ops_dev, &shape, on(ids), on(dy), false, on(dweight),
                                   on(ops_bytes(&c, bytes))));
    assert_true(td_value_at(TD_BF16, dweight, 0) == 0);
    assert_true(td_value_at(TD_BF16, dweight, 1) == 300); /* 301 is a tie, and 300 is even */
    ops_finish(&c);
}

/* One row with more tokens than are sorted at a time. The numbers are integers, so every order gives the same
 * sum. */
TD_TEST(embedding_sums_many_tokens_of_one_row)
{
    enum { TOKENS = 9001, VOCAB = 3, DIM = 12 };
    ops_case c = ops_begin(TD_F32, "embedding one row");
    td_embedding_shape shape = {.tokens = TOKENS, .vocab = VOCAB, .d_model = DIM, .dtype = TD_F32};
    int64_t *ids = ops_draw_ids(&c, TOKENS, 1);
    float *dy = ops_room(&c, TD_F32, TOKENS * DIM), *dweight = ops_room(&c, TD_F32, VOCAB * DIM);
    float want[VOCAB * DIM] = {0};
    size_t bytes;

    for (int t = 0; t < TOKENS; t++) {
        ids[t] = t == 4500 ? 2 : 1;
        for (int i = 0; i < DIM; i++) {
            dy[t * DIM + i] = (float)((t + i) % 7 - 2);
            want[ids[t] * DIM + i] += dy[t * DIM + i];
        }
    }
    td_assert_ok(td_embedding_backward_work_bytes(ops_dev, &shape, &bytes));
    OPS_CALL(td_embedding_backward(ops_dev, &shape, on(ids), on(dy), false, on(dweight),
                                   on(ops_bytes(&c, bytes))));
    td_assert_identical("dweight", TD_F32, dweight, want, VOCAB * DIM);
    ops_finish(&c);
}

/* The CPU sees the ids and refuses (tests/fuzz_ops.c). For an id outside the table a GPU's kernel gives a
 * row of NaN, and leaves it out of the sums. */
TD_TEST(embedding_reads_no_unknown_row)
{
    enum { TOKENS = 6, VOCAB = 5, DIM = 8 };
    const int64_t given[TOKENS] = {0, VOCAB, 4, -1, INT64_MAX, INT64_MIN};
    ops_case c = ops_begin(TD_F32, "unknown rows");
    td_embedding_shape shape = {.tokens = TOKENS, .vocab = VOCAB, .d_model = DIM, .dtype = TD_F32};
    int64_t *ids = ops_bytes(&c, sizeof given);
    float *weight = ops_draw(&c, VOCAB * DIM), *dy = ops_draw(&c, TOKENS * DIM);
    float *y = ops_room(&c, TD_F32, TOKENS * DIM), *dweight = ops_room(&c, TD_F32, VOCAB * DIM);
    size_t bytes;

    memcpy(ids, given, sizeof given);
    td_assert_ok(td_embedding_backward_work_bytes(ops_dev, &shape, &bytes));
    if (ops_on_gpu()) {
        OPS_CALL(td_embedding_forward(ops_dev, &shape, on(ids), on(weight), on(y)));
        OPS_CALL(td_embedding_backward(ops_dev, &shape, on(ids), on(dy), false, on(dweight),
                                       on(ops_bytes(&c, bytes))));
        for (int i = 0; i < TOKENS * DIM; i++) {
            int t = i / DIM;

            if (t == 0 || t == 2)
                assert_true(y[i] == weight[given[t] * DIM + i % DIM]);
            else
                assert_true(isnan(y[i]));
        }
        for (int i = 0; i < VOCAB * DIM; i++) {
            int v = i / DIM;

            assert_true(dweight[i] == (v == 0 ? dy[i] : v == 4 ? dy[2 * DIM + i % DIM] : 0));
        }
    }
    ops_finish(&c);
}

/* ---- heads and rotary position embedding ---- */

typedef struct heads_case {
    char name[64];
    td_heads_shape shape;
} heads_case;

enum { Q, K, V, PARTS };

static int64_t pitch_of(const td_heads_shape *s)
{
    return s->pitch ? s->pitch : PARTS * s->heads * s->head_dim;
}

/* Returns q, k or v from the rows of tokens, in the order [batch, heads, seq, head_dim]. */
static void *picked(ops_case *c, const td_heads_shape *s, int part, const void *rows)
{
    const size_t bytes = (size_t)s->head_dim * td_dtype_size(c->dtype);
    char *matrices = ops_room(c, c->dtype, s->batch * s->heads * s->seq * s->head_dim), *to = matrices;

    for (int64_t b = 0; b < s->batch; b++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t t = 0; t < s->seq; t++, to += bytes) {
                const int64_t first = (b * s->seq + t) * pitch_of(s) + (part * s->heads + h) * s->head_dim;
                memcpy(to, (const char *)rows + (size_t)first * td_dtype_size(c->dtype), bytes);
            }
    return matrices;
}

/* Position 0 is not rotated. A table for more positions works for a shorter sequence. */
TD_TEST(rope_begins_at_the_identity)
{
    enum { COUNT = 3 * 2 * 6 };
    ops_case c = ops_begin(TD_F32, "rope identity");
    td_heads_shape shape = {.batch = 3, .heads = 2, .seq = 1, .head_dim = 6, .dtype = TD_F32};
    float *cosine = ops_room(&c, TD_F32, 12), *sine = ops_room(&c, TD_F32, 12);
    float *qkv = ops_draw(&c, PARTS * COUNT), *out[PARTS];

    for (int part = Q; part < PARTS; part++)
        out[part] = ops_room(&c, TD_F32, COUNT);
    OPS_CALL(td_rope_table(ops_dev, 4, 6, 10000.0, on(cosine), on(sine)));
    OPS_CALL(td_qkv_split_forward(ops_dev, &shape, on(qkv), on(cosine), on(sine), on(out[Q]), on(out[K]),
                                  on(out[V])));
    for (int part = Q; part < PARTS; part++)
        td_assert_identical("part", TD_F32, out[part], picked(&c, &shape, part, qkv), COUNT);
    ops_finish(&c);
}

/* ---- rounding, residual ---- */

TD_TEST(round_is_the_conversion)
{
    ops_case c = ops_begin(TD_BF16, "round ends");
    float *src = ops_given(&c, TD_F32, 4, (const float[]){NAN, INFINITY, -INFINITY, 3.4e38f});
    void *dst = ops_room(&c, TD_BF16, 4);
    OPS_CALL(td_round(ops_dev, 4, TD_F32, on(src), TD_BF16, on(dst)));
    assert_true(isnan(td_value_at(TD_BF16, dst, 0)) && td_value_at(TD_BF16, dst, 1) == INFINITY);
    assert_true(td_value_at(TD_BF16, dst, 2) == -INFINITY && td_value_at(TD_BF16, dst, 3) == INFINITY);
    ops_finish(&c);
}

/* Whether `high` is the bf16 nearest to a number, and for a tie the one further from zero. Infinity counts as
 * 2^128. */
static bool is_nearest(uint32_t bits, uint16_t high)
{
    const double at = fabs((double)td_f32_from_bits(bits)),
                 below = fabs((double)td_f32_from_bits(bits & 0xFFFF0000u)),
                 next = fabs((double)td_f32_from_bits((bits & 0xFFFF0000u) + 0x10000u)),
                 above = isinf(next) ? 0x1p128 : next;
    const bool up = (bits & 0x7F800000u) != 0x7F800000u && above - at <= at - below;

    return high == (uint16_t)((bits >> 16) + up);
}

/* Every upper half of an f32, with lower halves around 0 and around a tie. */
TD_TEST(planes)
{
    static const uint16_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    enum { LOWER = sizeof lower / sizeof *lower, N = 65536 * LOWER };
    ops_case c = ops_begin(TD_F32, "planes");
    uint32_t *numbers = ops_room(&c, TD_F32, N), *joined = ops_room(&c, TD_F32, N);
    uint16_t *high = ops_room(&c, TD_BF16, N), *low = ops_room(&c, TD_BF16, N);

    for (int i = 0; i < N; i++)
        numbers[i] = (uint32_t)(i / LOWER) << 16 | lower[i % LOWER];
    for (int begin = 0; begin < 2; begin++) { /* from an address for vectors, and from the address after it */
        const int64_t count = N - begin;

        ops_upload();
        td_assert_ok(td_split(ops_dev, count, on((float *)(void *)numbers + begin), on(high + begin),
                              on(low + begin)));
        td_assert_ok(
            td_join(ops_dev, count, on(high + begin), on(low + begin), on((float *)(void *)joined + begin)));
        ops_download();
        for (int i = begin; i < N; i++) {
            if ((numbers[i] & 0x7FFFFFFFu) > 0x7F800000u) {
                assert_true((high[i] & 0x7FC0) == 0x7FC0 &&
                            low[i] == 0); /* quiet, both in two planes and in one */
                assert_int_equal(joined[i], (numbers[i] | 0x00400000u) & 0xFFFF0000u);
            } else {
                assert_int_equal(joined[i], numbers[i]);
                assert_true(is_nearest(numbers[i], high[i]));
            }
        }
        memset(joined, 0xFF, N * sizeof *joined);
    }
    ops_finish(&c);
}

TD_TEST(residual_keeps_nan_and_infinity)
{
    ops_case c = ops_begin(TD_F32, "residual nan");
    float *a = ops_given(&c, TD_F32, 6, (const float[]){NAN, 1, INFINITY, INFINITY, -INFINITY, 3e38f});
    float *b = ops_given(&c, TD_F32, 6, (const float[]){1, NAN, 1, -INFINITY, 2, 3e38f});
    float *y = ops_room(&c, TD_F32, 6);

    OPS_CALL(td_residual_add(ops_dev, 6, TD_F32, on(a), on(b), on(y)));
    assert_true(isnan(y[0]) && isnan(y[1]) && y[2] == INFINITY && isnan(y[3]) && y[4] == -INFINITY &&
                y[5] == INFINITY);
    ops_finish(&c);
}

int ops_layout_group(void)
{
    return td_run_tests("layout", NULL, NULL);
}
