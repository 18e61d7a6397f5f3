#include "base/float16.h"
#include "support/gpu.h"
#include "support/ops_kit.h"

/* ---- embedding ---- */

typedef struct embedding_case {
    char name[64];
    td_embedding_shape shape;
} embedding_case;

/* dweight has dy's type, or any other type if dy is f32. */
static void embedding_copies_rows_and_sums_them_back(void **state)
{
    const embedding_case *row = *state;
    int64_t tokens = row->shape.tokens, vocab = row->shape.vocab, d_model = row->shape.d_model;

    for (int variant = 0; variant < 2 * (2 * ops_dtype_count - 1); variant++) {
        bool accumulate = variant & 1, mixed = variant / 2 >= ops_dtype_count;
        td_embedding_shape shape = row->shape;
        shape.dtype = mixed ? TD_F32 : ops_dtypes[variant / 2];
        shape.dweight_dtype = mixed ? ops_dtypes[variant / 2 - ops_dtype_count + 1] : (td_dtype)0;
        td_dtype dweight_dtype = mixed ? shape.dweight_dtype : shape.dtype;
        ops_case c = ops_begin(shape.dtype, "%s %d", row->name, variant);
        int64_t *ids = ops_draw_ids(&c, tokens, vocab);
        void *weight = ops_draw(&c, vocab * d_model), *dy = ops_draw(&c, tokens * d_model);
        void *before = ops_draw_as(&c, dweight_dtype, vocab * d_model);
        void *y = ops_room(&c, c.dtype, tokens * d_model);
        void *dweight = ops_room(&c, dweight_dtype, vocab * d_model);
        double *w = ops_f64(&c, c.dtype, weight, vocab * d_model),
               *d = ops_f64(&c, c.dtype, dy, tokens * d_model);
        double *forward = ops_zeros(&c, tokens * d_model);
        double *backward =
            accumulate ? ops_f64(&c, dweight_dtype, before, vocab * d_model) : ops_zeros(&c, vocab * d_model);
        size_t bytes;

        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < d_model; i++) {
                forward[t * d_model + i] = w[ids[t] * d_model + i];
                backward[ids[t] * d_model + i] += d[t * d_model + i];
            }

        OPS_RUN(&c, c.dtype, y, tokens * d_model, NULL,
                td_embedding_forward(ops_dev, &shape, on(ids), on(weight), on(y)));
        for (int64_t i = 0; i < tokens * d_model; i++)
            assert_true(td_value_at(c.dtype, y, i) == forward[i]);

        td_assert_ok(td_embedding_backward_work_bytes(ops_dev, &shape, &bytes));
        OPS_RUN(&c, dweight_dtype, dweight, vocab * d_model, accumulate ? before : NULL,
                td_embedding_backward(ops_dev, &shape, on(ids), on(dy), accumulate, on(dweight),
                                      on(ops_bytes(&c, bytes))));
        ops_assert_close(&c, "dweight", dweight_dtype, dweight, backward, vocab * d_model, 4);
        ops_finish(&c);
    }
}

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

/* The CPU sees the ids and refuses (tests/fuzz_api_ops.c). For an id outside the table a GPU's kernel gives a
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

/* Rotates every pair in float64 by the angle of its position, or back with sign -1. */
static double *turned(ops_case *c, const td_heads_shape *s, const float *cosine, const float *sine,
                      double sign, const void *matrices)
{
    const int64_t half = s->head_dim / 2, pairs = s->batch * s->heads * s->seq * half;
    const double *x = ops_f64(c, c->dtype, matrices, 2 * pairs);
    double *y = ops_zeros(c, 2 * pairs);

    for (int64_t i = 0; i < pairs; i++) {
        const int64_t angle = i / half % s->seq * half + i % half;
        const double re = (double)cosine[angle], im = sign * (double)sine[angle];

        y[2 * i] = x[2 * i] * re - x[2 * i + 1] * im;
        y[2 * i + 1] = x[2 * i] * im + x[2 * i + 1] * re;
    }
    return y;
}

static void rope_table_holds_the_angles(void **state)
{
    const td_heads_shape *s = &((const heads_case *)*state)->shape;
    const int64_t half = s->head_dim / 2, angles = s->seq * half;
    ops_case c = ops_begin(TD_F32, "%s table", ((const heads_case *)*state)->name);
    float *cosine = ops_room(&c, TD_F32, angles), *sine = ops_room(&c, TD_F32, angles);

    OPS_RUN(&c, TD_F32, cosine, angles, NULL,
            td_rope_table(ops_dev, s->seq, s->head_dim, 10000.0, on(cosine), on(sine)));
    OPS_RUN(&c, TD_F32, sine, angles, NULL,
            td_rope_table(ops_dev, s->seq, s->head_dim, 10000.0, on(cosine), on(sine)));
    for (int64_t i = 0; i < angles; i++) {
        const double angle =
            (double)(i / half) * pow(10000.0, -2.0 * (double)(i % half) / (double)s->head_dim);

        assert_true(fabs((double)cosine[i] - cos(angle)) <= 0x1p-24);
        assert_true(fabs((double)sine[i] - sin(angle)) <= 0x1p-24);
    }
    ops_finish(&c);
}

static void qkv_is_split_into_heads_and_turned(void **state)
{
    static const char *const names[] = {"q", "k"};
    const heads_case *row = *state;

    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "%s %d", row->name, d);
        td_heads_shape shape = row->shape;
        const int64_t count = shape.batch * shape.heads * shape.seq * shape.head_dim;
        const int64_t angles = shape.seq * (shape.head_dim / 2);
        void *qkv = ops_draw(&c, shape.batch * shape.seq * pitch_of(&shape)), *out[PARTS];
        float *cosine = ops_draw_as(&c, TD_F32, angles), *sine = ops_draw_as(&c, TD_F32, angles);

        shape.dtype = c.dtype;
        for (int part = Q; part < PARTS; part++)
            out[part] = ops_room(&c, c.dtype, count);
        for (int part = Q; part < PARTS; part++)
            OPS_RUN(&c, c.dtype, out[part], count, NULL,
                    td_qkv_split_forward(ops_dev, &shape, on(qkv), on(cosine), on(sine), on(out[Q]),
                                         on(out[K]), on(out[V])));
        for (int part = Q; part < V; part++)
            ops_assert_close(&c, names[part], c.dtype, out[part],
                             turned(&c, &shape, cosine, sine, 1, picked(&c, &shape, part, qkv)), count, 1);
        td_assert_identical("v", c.dtype, out[V], picked(&c, &shape, V, qkv), count);
        ops_finish(&c);
    }
}

static void qkv_gradients_are_turned_back_into_rows(void **state)
{
    static const char *const names[] = {"dq", "dk"};
    const heads_case *row = *state;

    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "%s back %d", row->name, d);
        td_heads_shape shape = row->shape;
        const int64_t pitch = pitch_of(&shape), taken = PARTS * shape.heads * shape.head_dim;
        const int64_t tokens = shape.batch * shape.seq, count = tokens * shape.heads * shape.head_dim;
        const int64_t angles = shape.seq * (shape.head_dim / 2);
        void *dqkv = ops_room(&c, c.dtype, tokens * pitch), *grads[PARTS];
        const void *poison = ops_copy(&c, c.dtype, dqkv, tokens * pitch);
        float *cosine = ops_draw_as(&c, TD_F32, angles), *sine = ops_draw_as(&c, TD_F32, angles);

        shape.dtype = c.dtype;
        for (int part = Q; part < PARTS; part++)
            grads[part] = ops_draw(&c, count);
        OPS_RUN(&c, c.dtype, dqkv, tokens * pitch, NULL,
                td_qkv_split_backward(ops_dev, &shape, on(grads[Q]), on(grads[K]), on(grads[V]), on(cosine),
                                      on(sine), on(dqkv)));
        for (int part = Q; part < V; part++)
            ops_assert_close(&c, names[part], c.dtype, picked(&c, &shape, part, dqkv),
                             turned(&c, &shape, cosine, sine, -1, grads[part]), count, 1);
        td_assert_identical("dv", c.dtype, picked(&c, &shape, V, dqkv), grads[V], count);
        for (int64_t token = 0; token < tokens; token++) {
            const size_t gap = (size_t)(token * pitch + taken) * td_dtype_size(c.dtype);

            assert_memory_equal((const char *)dqkv + gap, (const char *)poison + gap,
                                (size_t)(pitch - taken) * td_dtype_size(c.dtype));
        }
        ops_finish(&c);
    }
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
    static const int64_t counts[] = {1, 15, 16, 17, 1009, 20011};

    for (int from = 0; from < ops_dtype_count; from++)
        for (int to = 0; to < ops_dtype_count; to++)
            for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
                int64_t count = counts[n];
                ops_case c = ops_begin(ops_dtypes[to], "round %d %d %d", from, to, (int)count);
                void *src = ops_draw_as(&c, ops_dtypes[from], count), *dst = ops_room(&c, c.dtype, count);
                void *want = ops_room(&c, c.dtype, count);

                td_assert_ok(td_convert(count, ops_dtypes[from], src, c.dtype, want));
                OPS_RUN(&c, c.dtype, dst, count, NULL,
                        td_round(ops_dev, count, ops_dtypes[from], on(src), c.dtype, on(dst)));
                td_assert_identical(c.name, c.dtype, dst, want, count);
                ops_finish(&c);
            }

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

TD_TEST(residual_adds_in_place_or_not)
{
    static const int64_t counts[] = {1, 15, 16, 17, 1009, 4096, 20011};

    for (int d = 0; d < ops_dtype_count; d++)
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            int64_t count = counts[n];
            ops_case c = ops_begin(ops_dtypes[d], "residual %d %d", d, (int)count);
            void *a = ops_draw(&c, count), *b = ops_draw(&c, count), *y = ops_room(&c, c.dtype, count);
            void *own = ops_room(&c, c.dtype, count), *want = ops_room(&c, c.dtype, count);
            double *x = ops_f64(&c, c.dtype, a, count), *z = ops_f64(&c, c.dtype, b, count);

            for (int64_t i = 0; i < count; i++) {
                float sum = (float)(x[i] + z[i]); /* exact in float64 */

                td_assert_ok(
                    td_convert(1, TD_F32, &sum, c.dtype, (char *)want + (size_t)i * td_dtype_size(c.dtype)));
            }
            OPS_RUN(&c, c.dtype, y, count, NULL,
                    td_residual_add(ops_dev, count, c.dtype, on(a), on(b), on(y)));
            td_assert_identical(c.name, c.dtype, y, want, count);
            OPS_RUN(&c, c.dtype, own, count, a,
                    td_residual_add(ops_dev, count, c.dtype, on(own), on(b), on(own)));
            td_assert_identical(c.name, c.dtype, own, want, count);
            OPS_RUN(&c, c.dtype, own, count, b,
                    td_residual_add(ops_dev, count, c.dtype, on(a), on(own), on(own)));
            td_assert_identical(c.name, c.dtype, own, want, count);
            ops_finish(&c);
        }
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

static const embedding_case embedding_cases[] = {
    {"embedding one", {1, 1, 1, TD_F32, 0}},
    {"embedding ragged", {257, 53, 83, TD_F32, 0}},
    {"embedding repeated tokens", {512, 7, 80, TD_F32, 0}},
    {"embedding one token only", {301, 1, 24, TD_F32, 0}},
    {"embedding mostly empty rows", {19, 701, 33, TD_F32, 0}},
    {"embedding wider than a piece", {40, 31, 1025, TD_F32, 0}},
    {"embedding in vectors", {300, 90, 776, TD_F32, 0}},
    {"embedding large vocabulary", {600, 150001, 4, TD_F32, 0}},
    {"embedding a chunk and one", {4097, 1500, 9, TD_F32, 0}},
    {"embedding chunks", {9001, 301, 16, TD_F32, 0}},
    {"embedding many chunks", {37001, 401, 4, TD_F32, 0}},
};

static const heads_case heads_cases[] = {
    {"heads one", {1, 1, 1, 2, 0, TD_F32}},
    {"heads small model", {2, 12, 16, 64, 0, TD_F32}},
    {"heads ragged", {3, 5, 37, 80, 0, TD_F32}},
    {"heads with a gap behind v", {2, 3, 19, 80, 3 * 3 * 80 + 7, TD_F32}},
    {"heads with a gap of whole vectors", {2, 3, 21, 80, 3 * 3 * 80 + 16, TD_F32}},
    {"heads 25 of 64", {1, 25, 70, 64, 0, TD_F32}},
    {"heads of pairs alone, the pitch said", {2, 4, 33, 30, 3 * 4 * 30, TD_F32}},
};

int ops_layout_group(void)
{
    size_t heads = sizeof heads_cases / sizeof *heads_cases;
    size_t tables = sizeof embedding_cases / sizeof *embedding_cases;

    while (td_gpu_small() && embedding_cases[tables - 1].shape.tokens > 5000)
        tables--;
    return ops_run_cases("embedding", embedding_cases, tables, sizeof *embedding_cases,
                         embedding_copies_rows_and_sums_them_back) +
           ops_run_cases("rope table", heads_cases, heads, sizeof *heads_cases, rope_table_holds_the_angles) +
           ops_run_cases("qkv", heads_cases, heads, sizeof *heads_cases, qkv_is_split_into_heads_and_turned) +
           ops_run_cases("dqkv", heads_cases, heads, sizeof *heads_cases,
                         qkv_gradients_are_turned_back_into_rows) +
           td_run_tests("layout", NULL, NULL);
}
