/* Random cases of attention, naive and flash. The formulas are computed in float64, with estimates of the
 * errors that f32 may make. A test of the judge shows that it tells wrong results from rounded ones. */
#include "support/fuzz_kit.h"

#include "attention/attention.h"
#include "flash/flash.h"

/* A shape with its defaults filled in, and the roundings of its implementation. */
typedef struct problem {
    td_attention_shape s;
    bool naive;    /* P is kept in dtype, and so are S, dP and dS */
    bool rounds_p; /* P and dS are rounded to dtype before they are multiplied */
    const double *q, *k, *v, *dout;
} problem;

/* The expected results. All tensors but lse have the order of q, k and v. */
typedef struct results {
    td_estimate *o, *lse, *dq, *dk, *dv, *p;
    td_sum *dk_sums, *dv_sums;
    /* magnitudes of the terms that go into dk through D; O, or P, may be nearly equal in all rows */
    double *dk_through;
    double *cut; /* the error that a GPU's matrix units may make in each lse by cutting off bits */
} results;

static int64_t queries_of(const td_attention_shape *s)
{
    return s->batch * s->heads * s->seq * s->head_dim;
}

static int64_t keys_of(const td_attention_shape *s)
{
    return s->batch * s->heads * s->seq_k * s->head_dim;
}

static td_estimate *estimates(int64_t count)
{
    td_estimate *made = calloc((size_t)count, sizeof *made);

    assert_non_null(made);
    return made;
}

/* The index of element d of query i of one head, in o or dout, in both layouts. */
static int64_t place_of_o(const td_attention_shape *s, int64_t matrix, int64_t i, int64_t d)
{
    const int64_t b = matrix / s->heads, h = matrix % s->heads;

    return s->o_bshd ? ((b * s->seq + i) * s->heads + h) * s->head_dim + d
                     : (matrix * s->seq + i) * s->head_dim + d;
}

static td_estimate stored(const problem *p, bool rounds, td_estimate x)
{
    return rounds ? td_stored(x, p->s.dtype) : x;
}

static double squared(double x)
{
    return x * x;
}

/* 16-bit numbers that are nearly equal are rounded by the same factor. A sum of them is then wrong by a
 * fraction of the sum of its terms' magnitudes. */
static double like_roundings(td_dtype dtype, double terms)
{
    return dtype == TD_F32 ? 0 : squared(td_dtype_eps(dtype) / 2 / TD_ULP_HALF * terms / 4);
}

/* The same error, if P and dS are rounded. */
static double alike(const problem *p, td_sum sum)
{
    return p->rounds_p ? like_roundings(p->s.dtype, sum.terms) : 0;
}

/* One query's row of scores and probabilities, forward and backward. There are three kinds of errors. Each
 * key has errors of its score, which are independent. The row's sum has an error. D, the row's sum of dP P,
 * has an error. The last two change all keys of the row in the same way, so they count in dq as one error. */
typedef struct row {
    int64_t seen;
    td_estimate *score, *p, *dp;
    td_sum *dq;
    double *own;   /* relative errors of each P, squared */
    double *cut;   /* the error that a GPU's matrix units may make in each score by cutting off bits */
    double sum;    /* relative error of the row's sum by its roundings, squared */
    double spread; /* relative error of the row's sum by the errors of the scores, squared */
} row;

static void row_forward(const problem *a, int64_t matrix, int64_t i, row *r, const results *out)
{
    const td_attention_shape *s = &a->s;
    const double *q = a->q + (matrix * s->seq + i) * s->head_dim, *k = a->k + matrix * s->seq_k * s->head_dim;
    const double *v = a->v + matrix * s->seq_k * s->head_dim;
    double max = -INFINITY, sum = 0, gamma = 0;

    r->seen = s->causal && i + 1 < s->seq_k ? i + 1 : s->seq_k;
    for (int64_t j = 0; j < r->seen; j++) {
        td_sum dot = {0};

        for (int64_t d = 0; d < s->head_dim; d++)
            td_accumulate(&dot, td_exact(q[d]), td_exact(k[j * s->head_dim + d]));
        r->cut[j] = fabs((double)s->scale) * td_cut_off(dot);
        r->score[j] = stored(a, a->naive, td_times(td_exact((double)s->scale), td_summed(dot)));
        max = fmax(max, r->score[j].value);
    }
    for (int64_t j = 0; j < r->seen; j++) {
        const double score = r->score[j].value, e = exp(score - max);

        /* Errors of the score, of the subtraction of the maximum (in base 2 in flash attention), and of
         * exp. */
        r->own[j] = r->score[j].square + 2 * squared(score - max) + 4 +
                    (a->naive ? 0 : squared(score) + squared(max));
        sum += e;
        gamma += sum * sum;
        r->p[j].value = e;
    }
    r->sum = gamma / (sum * sum);
    r->spread = r->sum;
    for (int64_t j = 0; j < r->seen; j++) {
        r->p[j].value /= sum;
        r->spread += squared(r->p[j].value) * r->own[j];
    }
    for (int64_t j = 0; j < r->seen; j++) {
        const double p2 = squared(r->p[j].value);

        r->p[j].square = p2 * (r->own[j] + r->sum + 3);
        if (a->naive)
            out->p[(matrix * s->seq + i) * s->seq_k + j] =
                (td_estimate){r->p[j].value, r->p[j].square + p2 * r->spread};
        r->p[j] = stored(a, a->rounds_p, r->p[j]);
    }
    const double lse = max + log(sum);
    double *cut = &out->cut[matrix * s->seq + i];
    for (int64_t j = 0; j < r->seen; j++)
        *cut += r->p[j].value * r->cut[j];
    out->lse[matrix * s->seq + i] = (td_estimate){lse, r->spread + squared(log(sum)) + 3 * lse * lse};
    for (int64_t d = 0; d < s->head_dim; d++) {
        td_sum sums = {0};
        double own = 0;

        for (int64_t j = 0; j < r->seen; j++)
            td_accumulate(&sums, td_exact(r->p[j].value), td_exact(v[j * s->head_dim + d]));
        td_estimate o = td_summed(sums);
        for (int64_t j = 0; j < r->seen; j++) {
            const double p2 = squared(r->p[j].value), rounding = r->p[j].square - p2 * (r->own[j] + r->sum);

            /* An error of a score also changes the sum. */
            own += p2 * r->own[j] * squared(v[j * s->head_dim + d] - o.value) +
                   rounding * squared(v[j * s->head_dim + d]);
        }
        o.square += own + squared(o.value) * (r->sum + 2) + alike(a, sums);
        out->o[place_of_o(s, matrix, i, d)] = o;
    }
}

static void row_backward(const problem *a, int64_t matrix, int64_t i, row *r, const results *out)
{
    const td_attention_shape *s = &a->s;
    const int64_t width = s->head_dim, first = matrix * s->seq_k * width;
    const double *q = a->q + (matrix * s->seq + i) * width, *k = a->k + first, *v = a->v + first;
    const double lse = out->lse[matrix * s->seq + i].value;
    td_sum products = {0};
    double through_p = 0;

    for (int64_t j = 0; j < r->seen; j++) {
        td_sum dot = {0};

        for (int64_t d = 0; d < width; d++)
            td_accumulate(&dot, td_exact(a->dout[place_of_o(s, matrix, i, d)]), td_exact(v[j * width + d]));
        r->dp[j] = stored(a, a->naive, td_summed(dot));
        if (a->naive)
            td_accumulate(&products, r->p[j], r->dp[j]);
    }
    for (int64_t d = 0; d < width && !a->naive; d++) /* D = rowsum(dO O), with O as it was stored */
        td_accumulate(&products, td_exact(a->dout[place_of_o(s, matrix, i, d)]),
                      td_stored(out->o[place_of_o(s, matrix, i, d)], s->dtype));
    td_estimate delta = td_summed(products);
    for (int64_t j = 0; j < r->seen; j++)
        through_p += r->p[j].square * squared(r->dp[j].value - delta.value);
    delta.square += through_p + (a->naive ? r->spread * squared(delta.value) : 0);
    delta.square += like_roundings(s->dtype, products.terms);

    /* P is computed again from lse in f32, so the rounding of lse is an error of the whole row. */
    const double common = r->spread + (a->naive ? 0 : 3 * lse * lse);
    const double scale = (double)s->scale;
    td_estimate *dq = out->dq + (matrix * s->seq + i) * width;
    memset(r->dq, 0, (size_t)width * sizeof *r->dq);
    for (int64_t j = 0; j < r->seen; j++) {
        const double p = r->p[j].value, centred = r->dp[j].value - delta.value, ds = scale * p * centred;
        const double own =
            squared(scale) * (r->p[j].square * squared(centred) + p * p * r->dp[j].square) + 3 * ds * ds;
        const double shared = squared(scale * p) * delta.square + common * ds * ds;
        const td_estimate alone = stored(a, a->rounds_p, (td_estimate){ds, own});
        const td_estimate all = {alone.value, alone.square + shared};
        const td_estimate probability = {p, r->p[j].square + common * p * p};

        for (int64_t d = 0; d < width; d++) {
            td_accumulate(&r->dq[d], alone, td_exact(k[j * width + d]));
            td_accumulate(&out->dk_sums[first + j * width + d], all, td_exact(q[d]));
            out->dk_through[first + j * width + d] += fabs(scale * p * q[d]) * products.terms;
            td_accumulate(&out->dv_sums[first + j * width + d], probability,
                          td_exact(a->dout[place_of_o(s, matrix, i, d)]));
        }
    }
    for (int64_t d = 0; d < width; d++) {
        double weighted = 0;

        for (int64_t j = 0; j < r->seen; j++)
            weighted += r->p[j].value * k[j * width + d];
        dq[d] = td_summed(r->dq[d]);
        dq[d].square += squared(scale * weighted) * delta.square + (common + 2) * squared(dq[d].value) +
                        alike(a, r->dq[d]);
    }
}

/* Computes every result of a problem. The caller frees them with free_results. */
static results solve(const problem *a)
{
    const td_attention_shape *s = &a->s;
    const int64_t rows = s->batch * s->heads * s->seq;
    results out = {.o = estimates(queries_of(s)),
                   .lse = estimates(rows),
                   .cut = calloc((size_t)rows, sizeof(double)),
                   .dq = estimates(queries_of(s)),
                   .dk = estimates(keys_of(s)),
                   .dv = estimates(keys_of(s)),
                   .p = estimates(a->naive ? rows * s->seq_k : 1),
                   .dk_sums = calloc((size_t)keys_of(s), sizeof(td_sum)),
                   .dv_sums = calloc((size_t)keys_of(s), sizeof(td_sum)),
                   .dk_through = calloc((size_t)keys_of(s), sizeof(double))};
    row r = {.score = estimates(s->seq_k),
             .p = estimates(s->seq_k),
             .dp = estimates(s->seq_k),
             .dq = malloc((size_t)s->head_dim * sizeof(td_sum)),
             .own = malloc((size_t)s->seq_k * sizeof(double)),
             .cut = malloc((size_t)s->seq_k * sizeof(double))};

    assert_true(out.cut && out.dk_sums && out.dv_sums && out.dk_through && r.dq && r.own && r.cut);
    for (int64_t matrix = 0; matrix < s->batch * s->heads; matrix++)
        for (int64_t i = 0; i < s->seq; i++) {
            row_forward(a, matrix, i, &r, &out);
            row_backward(a, matrix, i, &r, &out);
        }
    for (int64_t i = 0; i < keys_of(s); i++) { /* the rounding by the scale, or by a store */
        out.dk[i] = td_summed(out.dk_sums[i]);
        out.dv[i] = td_summed(out.dv_sums[i]);
        out.dk[i].square += 2 * squared(out.dk[i].value) + alike(a, out.dk_sums[i]) +
                            like_roundings(s->dtype, out.dk_through[i]);
        out.dv[i].square += 2 * squared(out.dv[i].value) + alike(a, out.dv_sums[i]);
    }
    free(r.score);
    free(r.p);
    free(r.dp);
    free(r.own);
    free(r.cut);
    free(r.dq);
    free(out.dk_sums);
    free(out.dk_through);
    free(out.dv_sums);
    out.dk_sums = out.dv_sums = NULL;
    out.dk_through = NULL;
    return out;
}

static void free_results(results *out)
{
    free(out->o);
    free(out->lse);
    free(out->cut);
    free(out->dq);
    free(out->dk);
    free(out->dv);
    free(out->p);
}

static void expect_all(fuzz_tensor *tensor, const td_estimate *values)
{
    tensor->shared = true;
    for (int64_t i = 0; i < tensor->count; i++)
        fuzz_expect(tensor, i, values[i]);
}

/* ---- random cases ---- */

static td_attention_shape draw_shape(const char *name)
{
    static const int64_t dims[] = {1, 2, 7, 8, 16, 24, 31, 32, 33, 64, 64, 80, 96, 127, 128, 160, 256};
    const bool same = td_fuzz_chance(50);
    td_attention_shape s = {.batch = fuzz_extent(3),
                            .heads = fuzz_extent(4),
                            .seq = fuzz_extent(300),
                            .head_dim =
                                td_fuzz_chance(70) ? fuzz_named_or(TD_FUZZ_PICK(dims)) : fuzz_extent(256),
                            .dtype = fuzz_dtype(),
                            .causal = td_fuzz_chance(60),
                            .o_bshd = td_fuzz_chance(30),
                            .deterministic = td_fuzz_chance(50)};

    s.seq_k = same ? fuzz_named_or(0) : fuzz_extent(300);
    if (!fuzz_on_gpu() && td_fuzz_chance(25))
        s.mask = TD_MASK_ADD_1E6;
    if (td_fuzz_chance(40))
        s.scale = (float)td_fuzz_uniform(0.01, td_fuzz_chance(20) ? 1 : 0.3);
    while (s.batch * s.heads * s.seq * (s.seq_k ? s.seq_k : s.seq) * s.head_dim > 2500000) {
        s.batch = (s.batch + 1) / 2;
        if (s.heads > 1)
            s.heads--;
        else if (s.batch == 1)
            s.seq = (s.seq + 1) / 2, s.seq_k = s.seq_k ? (s.seq_k + 1) / 2 : 0;
    }
    td_fuzz_describe("%s batch=%" PRId64 " heads=%" PRId64 " seq=%" PRId64 " seq_k=%" PRId64
                     " head_dim=%" PRId64 " %s%s%s%s%s scale=%.9g",
                     name, s.batch, s.heads, s.seq, s.seq_k, s.head_dim, td_dtype_name(s.dtype),
                     s.causal ? " causal" : "", s.mask == TD_MASK_ADD_1E6 ? " add_1e6" : "",
                     s.o_bshd ? " bshd" : "", s.deterministic ? " deterministic" : "", (double)s.scale);
    return s;
}

static problem problem_of(const td_attention_shape *given, bool naive, const double *q, const double *k,
                          const double *v, const double *dout)
{
    problem a = {.s = *given, .naive = naive, .q = q, .k = k, .v = v, .dout = dout};

    if (a.s.seq_k == 0)
        a.s.seq_k = a.s.seq;
    if (a.s.scale == 0)
        a.s.scale = (float)(1.0 / sqrt((double)a.s.head_dim));
    a.rounds_p = a.s.dtype != TD_F32 && (naive || fuzz_on_gpu());
    return a;
}

static void fuzz_attend(const td_attention_impl *impl, bool naive)
{
    const td_attention_shape shape = draw_shape(impl->name);
    td_attention_shape whole = shape;
    td_attention_sizes sizes;
    const int threads = naive ? 3 : 1; /* a library may add up in another order on another number */

    whole.seq_k = shape.seq_k ? shape.seq_k : shape.seq;
    const td_dtype dtype = shape.dtype;
    const int64_t queries = queries_of(&whole), keys = keys_of(&whole), rows = queries / shape.head_dim;
    fuzz_tensor *q = fuzz_draw("q", dtype, queries), *k = fuzz_draw("k", dtype, keys),
                *v = fuzz_draw("v", dtype, keys);
    fuzz_tensor *dout = fuzz_draw("dout", dtype, queries), *o = fuzz_room("o", dtype, queries);
    fuzz_tensor *dq = fuzz_room("dq", dtype, queries), *dk = fuzz_room("dk", dtype, keys);
    fuzz_tensor *dv = fuzz_room("dv", dtype, keys);
    fuzz_tensor *saved =
        naive ? fuzz_room("saved", dtype, rows * whole.seq_k) : fuzz_room("lse", TD_F32, rows);

    td_assert_ok(impl->sizes(fuzz_dev, &shape, &sizes));
    assert_int_equal(sizes.saved, saved->bytes);
    fuzz_tensor *forward_work = sizes.forward_work ? fuzz_scratch(sizes.forward_work) : NULL;
    fuzz_tensor *backward_work = sizes.backward_work ? fuzz_scratch(sizes.backward_work) : NULL;
    FUZZ_CALL_ON(threads,
                 impl->forward(fuzz_dev, &shape, at(q), at(k), at(v), at(o), at(saved), at(forward_work)));

    const problem a = problem_of(&shape, naive, q->x, k->x, v->x, dout->x);
    results out = solve(&a);
    expect_all(o, out.o);
    if (naive)
        for (int64_t i = 0; i < saved->count; i++)
            if (out.p[i].value == 0 && out.p[i].square == 0)
                fuzz_expect_exact(saved, i, 0); /* masked */
            else
                fuzz_expect(saved, i, out.p[i]);
    else
        expect_all(saved, out.lse);
    for (int64_t i = 0; i < saved->count && !naive && dtype != TD_F32 && fuzz_on_gpu(); i++)
        fuzz_lean(saved, i, out.cut[i]);
    fuzz_accept(o);
    fuzz_accept(saved);
    if (fuzz_on_gpu() && !naive && !shape.deterministic)
        FUZZ_CALL_ONCE(impl->backward(fuzz_dev, &shape, at(q), at(k), at(v), at(o), at(dout), at(saved),
                                      at(dq), at(dk), at(dv), at(backward_work)));
    else
        FUZZ_CALL_ON(threads, impl->backward(fuzz_dev, &shape, at(q), at(k), at(v), at(o), at(dout),
                                             at(saved), at(dq), at(dk), at(dv), at(backward_work)));
    expect_all(dq, out.dq);
    expect_all(dk, out.dk);
    expect_all(dv, out.dv);
    free_results(&out);
}

/* Shapes of attention around the sizes of tiles (64 x 64), groups of 16 columns, and 6 rows in registers: one
 * of everything, two tiles and a tail, primes, and fewer or more keys than queries. */
/* clang-format off */
#define ATTENTION_SHAPES \
    {{1, 1, 1, 64}, ""}, {{1, 2, 1, 16, 37}, ""}, {{1, 1, 1, 3, 200}, ""}, {{2, 1, 37, 3, 1}, ""}, \
    {{1, 1, 2, 1}, ""}, {{1, 2, 15, 7}, ""}, {{1, 2, 16, 16}, ""}, {{2, 3, 17, 6}, ""}, \
    {{1, 1, 63, 64}, ""}, {{1, 3, 64, 64}, ""}, {{1, 1, 65, 64}, ""}, {{1, 1, 127, 1}, ""}, \
    {{1, 1, 128, 80}, ""}, {{1, 2, 129, 96}, ""}, {{1, 5, 131, 17}, ""}, {{1, 1, 100, 20, 259}, ""}, \
    {{1, 1, 259, 20, 100}, ""}, {{1, 1, 64, 16, 65}, ""}, {{1, 1, 65, 16, 64}, ""}, \
    {{1, 1, 48, 128, 40}, ""}, {{1, 1, 66, 200}, ""}, {{1, 1, 67, 256, 129}, ""}, {{2, 2, 81, 24, 70}, ""}
/* clang-format on */

FUZZ(naive, 3, 8, ATTENTION_SHAPES)
{
    fuzz_attend(&td_attention_naive, true);
}

FUZZ(flash, 5, 8, ATTENTION_SHAPES)
{
    fuzz_attend(&td_attention_flash, false);
}

/* ---- the test of the judge ---- */

/* Mistakes in an implementation of attention. */
typedef enum mistake {
    NONE,
    DROPPED_KEY,    /* the last key of the last row is left out */
    LAST_COLUMN,    /* the last element of a head is left out of the scores */
    MASK_LATE,      /* a query sees the key after its own */
    MASK_EARLY,     /* a query, except the first, does not see its own key */
    SCALE,          /* the scale is off by 0.1 % */
    NO_SCALE,       /* the scale is 1 instead of 1 / sqrt(head_dim) */
    ROWS_SWAPPED,   /* queries 3 and 4 are swapped */
    ROW_ZEROED,     /* o and dq of query 5 are 0 */
    P_ROUNDED,      /* P is rounded to bf16 */
    INPUTS_ROUNDED, /* q, k and v are rounded to bf16 */
    NO_DELTA,       /* dS is computed without D */
    LAST_QUERY,     /* the last query is left out of dk and dv */
    TWICE,          /* dv is accumulated twice */
    MISTAKES
} mistake;

static const char *const mistake_names[MISTAKES] = {
    "none",         "dropped key", "last column", "mask late",      "mask early", "scale",      "no scale",
    "rows swapped", "row zeroed",  "P rounded",   "inputs rounded", "no D",       "last query", "twice"};

typedef struct plain {
    float *o, *p, *lse, *dq, *dk, *dv;
} plain;

static float rounded_to_bf16(float x)
{
    uint16_t bits;

    td_assert_ok(td_convert(1, TD_F32, &x, TD_BF16, &bits));
    td_assert_ok(td_convert(1, TD_BF16, &bits, TD_F32, &x));
    return x;
}

/* Computes one head in f32, one sum after the other, with a mistake. At the end the row of dp holds dS. */
static void plain_attention(const problem *a, mistake wrong, const plain *out)
{
    const td_attention_shape *s = &a->s;
    const int64_t width = s->head_dim, depth = wrong == LAST_COLUMN ? width - 1 : width;
    const float scale = wrong == SCALE ? 1.001f * s->scale : wrong == NO_SCALE ? 1.0f : s->scale;
    float dp[256];

    memset(out->dk, 0, (size_t)(s->seq_k * width) * sizeof(float));
    memset(out->dv, 0, (size_t)(s->seq_k * width) * sizeof(float));
    memset(out->p, 0, (size_t)(s->seq * s->seq_k) * sizeof(float));
    for (int64_t i = 0; i < s->seq; i++) {
        const int64_t from = wrong == ROWS_SWAPPED && (i == 3 || i == 4) ? 7 - i : i;
        int64_t seen = s->causal && i + 1 < s->seq_k ? i + 1 : s->seq_k;
        float *p = out->p + i * s->seq_k, max = -INFINITY, sum = 0, delta = 0;

        seen += wrong == MASK_LATE && seen < s->seq_k;
        seen -= wrong == MASK_EARLY && i > 0;
        seen -= wrong == DROPPED_KEY && i == s->seq - 1;
        for (int64_t j = 0; j < seen; j++) {
            float dot = 0;

            for (int64_t d = 0; d < depth; d++) {
                const float x = (float)a->q[from * width + d], y = (float)a->k[j * width + d];

                dot += wrong == INPUTS_ROUNDED ? rounded_to_bf16(x) * rounded_to_bf16(y) : x * y;
            }
            p[j] = scale * dot;
            max = fmaxf(max, p[j]);
        }
        for (int64_t j = 0; j < seen; j++)
            sum += p[j] = expf(p[j] - max);
        for (int64_t j = 0; j < seen; j++) {
            p[j] /= sum;
            if (wrong == P_ROUNDED)
                p[j] = rounded_to_bf16(p[j]);
        }
        out->lse[i] = max + logf(sum);
        for (int64_t d = 0; d < width; d++) {
            float o = 0;

            for (int64_t j = 0; j < seen; j++)
                o += p[j] * (float)a->v[j * width + d];
            out->o[i * width + d] = wrong == ROW_ZEROED && i == 5 ? 0 : o;
        }
        for (int64_t j = 0; j < seen; j++) {
            dp[j] = 0;
            for (int64_t d = 0; d < width; d++)
                dp[j] += (float)a->dout[i * width + d] * (float)a->v[j * width + d];
            delta += p[j] * dp[j];
        }
        for (int64_t j = 0; j < seen; j++) {
            const float ds = scale * (p[j] * (dp[j] - (wrong == NO_DELTA ? 0 : delta)));

            dp[j] = ds;
            for (int64_t d = 0; d < width && !(wrong == LAST_QUERY && i == s->seq - 1); d++) {
                out->dk[j * width + d] += ds * (float)a->q[from * width + d];
                out->dv[j * width + d] += (wrong == TWICE ? 2 : 1) * (p[j] * (float)a->dout[i * width + d]);
            }
        }
        for (int64_t d = 0; d < width; d++) {
            float dq = 0;

            for (int64_t j = 0; j < seen; j++)
                dq += dp[j] * (float)a->k[j * width + d];
            out->dq[i * width + d] = wrong == ROW_ZEROED && i == 5 ? 0 : dq;
        }
    }
}

/* Whether the judge accepts `got`. */
static bool accepts(const char *name, td_dtype dtype, const td_estimate *expect, const float *got,
                    int64_t count)
{
    fuzz_tensor t = {
        .name = name, .dtype = dtype, .count = count, .expect = (td_estimate *)expect, .shared = true};
    char text[512];

    t.after = malloc((size_t)count * td_dtype_size(dtype));
    assert_non_null(t.after);
    td_assert_ok(td_convert(count, TD_F32, got, dtype, t.after));
    const bool accepted = fuzz_judge(&t, text, sizeof text);
    if (!accepted)
        print_message("      %s\n", text);
    free(t.after);
    return accepted;
}

static bool accepts_attention(const problem *a, mistake wrong, const results *truth, const plain *got)
{
    const int64_t queries = queries_of(&a->s), keys = keys_of(&a->s);

    plain_attention(a, wrong, got);
    return accepts("o", a->s.dtype, truth->o, got->o, queries) &&
           (a->naive || accepts("lse", TD_F32, truth->lse, got->lse, a->s.seq)) &&
           accepts("dq", a->s.dtype, truth->dq, got->dq, queries) &&
           accepts("dk", a->s.dtype, truth->dk, got->dk, keys) &&
           accepts("dv", a->s.dtype, truth->dv, got->dv, keys);
}

/* Whether the mistake changes the results of this case enough. Roundings to bf16 hide smaller changes. */
static bool shows(const problem *a, mistake wrong)
{
    const bool coarse = a->s.dtype == TD_BF16;

    switch (wrong) {
    case NONE:
        return false;
    case MASK_LATE:
    case MASK_EARLY:
        return a->s.causal;
    case SCALE:
    case P_ROUNDED:
    case INPUTS_ROUNDED:
        return !coarse;
    default:
        return true;
    }
}

static void judge_attention(td_dtype dtype, int64_t seq, int64_t seq_k, int64_t head_dim, bool causal,
                            bool naive)
{
    const td_attention_shape shape = {.batch = 1,
                                      .heads = 1,
                                      .seq = seq,
                                      .seq_k = seq_k,
                                      .head_dim = head_dim,
                                      .dtype = dtype,
                                      .causal = causal};
    fuzz_tensor *q = fuzz_draw("q", dtype, seq * head_dim), *k = fuzz_draw("k", dtype, seq_k * head_dim);
    fuzz_tensor *v = fuzz_draw("v", dtype, seq_k * head_dim),
                *dout = fuzz_draw("dout", dtype, seq * head_dim);
    const problem a = problem_of(&shape, naive, q->x, k->x, v->x, dout->x);
    results truth = solve(&a);
    float *room =
        malloc((size_t)(2 * seq * head_dim + seq * seq_k + seq + 2 * seq_k * head_dim) * sizeof *room);

    assert_non_null(room);
    plain got = {.o = room, .dq = room + seq * head_dim, .p = room + 2 * seq * head_dim};
    got.lse = got.p + seq * seq_k;
    got.dk = got.lse + seq;
    got.dv = got.dk + seq_k * head_dim;
    for (mistake wrong = NONE; wrong < MISTAKES; wrong++)
        if (wrong == NONE || shows(&a, wrong)) {
            print_message("    %s, %s%s, %s:\n", naive ? "naive" : "flash", td_dtype_name(dtype),
                          causal ? " causal" : "", mistake_names[wrong]);
            if (accepts_attention(&a, wrong, &truth, &got) != (wrong == NONE))
                fail_msg("%s was %s", mistake_names[wrong], wrong == NONE ? "refused" : "accepted");
        }
    free(room);
    free_results(&truth);
    fuzz_upload(); /* no call has changed the tensors */
    fuzz_finish();
}

void fuzz_judge_accepts_f32_and_refuses_mistakes(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++)
        for (int naive = 0; naive < 2; naive++) {
            judge_attention(TD_F32, 100, 67, 32, causal, naive);
            judge_attention(TD_F32, 130, 130, 64, causal, naive);
            judge_attention(TD_F32, 9, 200, 7, causal, naive);
            judge_attention(TD_BF16, 65, 97, 48, causal, naive);
        }
}
