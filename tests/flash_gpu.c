#include "support/attention_kit.h"

#include "device/sms.h"
#include "flash/flash.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/gpu.h"
#include "support/test.h"

#include <inttypes.h>
#include <math.h>

static td_device *gpu;

/* ---- a run of a shape on the GPU ---- */

typedef struct results {
    void *o, *dq, *dk, *dv;
    float *lse; /* the tensor that forward saves */
} results;

static void free_results(results *r)
{
    free(r->o);
    free(r->dq);
    free(r->dk);
    free(r->dv);
    free(r->lse);
}

/* Inputs on the host, for td_attend_truth_of. */
static td_attend_run inputs_of(const char *name, const td_attention_shape *shape)
{
    td_attend_run run = {.impl = &td_attention_flash, .shape = *shape};

    if (run.shape.seq_k == 0)
        run.shape.seq_k = shape->seq;
    run.rows = shape->batch * shape->heads * shape->seq;
    run.queries = run.rows * shape->head_dim;
    run.keys = shape->batch * shape->heads * run.shape.seq_k * shape->head_dim;
    run.q = td_draw_normal(name, 1, shape->dtype, run.queries);
    run.k = td_draw_normal(name, 2, shape->dtype, run.keys);
    run.v = td_draw_normal(name, 3, shape->dtype, run.keys);
    run.dout = td_draw_normal(name, 4, shape->dtype, run.queries);
    return run;
}

static void free_inputs(td_attend_run *run)
{
    td_fence_free(run->q);
    td_fence_free(run->k);
    td_fence_free(run->v);
    td_fence_free(run->dout);
}

typedef struct blocks {
    void *q, *k, *v, *dout, *o, *dq, *dk, *dv, *lse, *forward_work, *backward_work;
    td_attention_sizes sizes;
} blocks;

/* Every tensor starts `skip` elements into its block. */
static blocks open_blocks(const td_attend_run *run, size_t skip)
{
    const size_t element = td_dtype_size(run->shape.dtype), shift = skip * element;
    const size_t queries = (size_t)run->queries * element, keys = (size_t)run->keys * element;
    td_attention_sizes sizes;

    td_assert_ok(run->impl->sizes(gpu, &run->shape, &sizes));
    const blocks b = {.q = td_gpu_block(gpu, NULL, queries + shift),
                      .k = td_gpu_block(gpu, NULL, keys + shift),
                      .v = td_gpu_block(gpu, NULL, keys + shift),
                      .dout = td_gpu_block(gpu, NULL, queries + shift),
                      .o = td_gpu_block(gpu, NULL, queries + shift),
                      .dq = td_gpu_block(gpu, NULL, queries + shift),
                      .dk = td_gpu_block(gpu, NULL, keys + shift),
                      .dv = td_gpu_block(gpu, NULL, keys + shift),
                      .lse = td_gpu_block(gpu, NULL, sizes.saved),
                      .forward_work = td_gpu_block(gpu, NULL, sizes.forward_work),
                      .backward_work = td_gpu_block(gpu, NULL, sizes.backward_work),
                      .sizes = sizes};

    td_assert_ok(td_device_upload(gpu, (char *)b.q + shift, run->q, queries));
    td_assert_ok(td_device_upload(gpu, (char *)b.k + shift, run->k, keys));
    td_assert_ok(td_device_upload(gpu, (char *)b.v + shift, run->v, keys));
    td_assert_ok(td_device_upload(gpu, (char *)b.dout + shift, run->dout, queries));
    return b;
}

static void close_blocks(const blocks *b)
{
    void *const all[] = {
        b->q, b->k, b->v, b->dout, b->o, b->dq, b->dk, b->dv, b->lse, b->forward_work, b->backward_work};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        td_gpu_free(gpu, all[i]);
}

static void run_passes(const td_attend_run *run, const blocks *b, size_t shift)
{
    td_assert_ok(run->impl->forward(gpu, &run->shape, (char *)b->q + shift, (char *)b->k + shift,
                                    (char *)b->v + shift, (char *)b->o + shift, b->lse, b->forward_work));
    td_assert_ok(run->impl->backward(gpu, &run->shape, (char *)b->q + shift, (char *)b->k + shift,
                                     (char *)b->v + shift, (char *)b->o + shift, (char *)b->dout + shift,
                                     b->lse, (char *)b->dq + shift, (char *)b->dk + shift,
                                     (char *)b->dv + shift, b->backward_work));
}

/* Reads the tensor after the first `skip` elements of a block. These elements must still be poison. */
static void *read_behind(const td_attend_run *run, void *block, int64_t count, size_t skip)
{
    const size_t element = td_dtype_size(run->shape.dtype), bytes = (size_t)count * element;
    unsigned char *data = td_gpu_read(gpu, block, bytes + skip * element);

    for (size_t i = 0; i < skip * element; i++)
        assert_int_equal(data[i], 0xFF);
    memmove(data, data + skip * element, bytes);
    return data;
}

static results compute(const td_attend_run *run, size_t skip)
{
    const blocks b = open_blocks(run, skip);
    results r;

    run_passes(run, &b, skip * td_dtype_size(run->shape.dtype));
    td_assert_ok(td_device_synchronize(gpu));
    r = (results){.o = read_behind(run, b.o, run->queries, skip),
                  .dq = read_behind(run, b.dq, run->queries, skip),
                  .dk = read_behind(run, b.dk, run->keys, skip),
                  .dv = read_behind(run, b.dv, run->keys, skip),
                  .lse = td_gpu_read(gpu, b.lse, b.sizes.saved)};
    free(td_gpu_read(gpu, b.forward_work, b.sizes.forward_work)); /* reading the block checks its fences */
    free(td_gpu_read(gpu, b.backward_work, b.sizes.backward_work));
    close_blocks(&b);
    return r;
}

/* ---- against float64 ---- */

typedef struct trial {
    char name[112];
    td_attention_shape shape;
} trial;

/* f32: P is computed from an L of f32. tf32 and the 16-bit types: operands, P and dS are rounded, then the
 * outputs. Errors of single terms average out, so tolerances are a few units of the type's rounding. */
static double tolerance_of(const td_attention_shape *shape)
{
    if (shape->dtype == TD_F32)
        return shape->tf32 ? 3e-3 : 3e-6;
    return shape->dtype == TD_BF16 ? 8e-3 : 1.5e-3;
}

static void assert_identical_results(const td_attend_run *run, const results *a, const results *b,
                                     bool with_dq)
{
    const td_dtype dtype = run->shape.dtype;

    td_assert_identical("lse", TD_F32, a->lse, b->lse, run->rows);
    td_assert_identical("o", dtype, a->o, b->o, run->queries);
    td_assert_identical("dk", dtype, a->dk, b->dk, run->keys);
    td_assert_identical("dv", dtype, a->dv, b->dv, run->keys);
    if (with_dq)
        td_assert_identical("dq", dtype, a->dq, b->dq, run->queries);
}

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
static const struct {
    td_dtype dtype;
    bool tf32;
} kinds[] = {{TD_F32, false}, {TD_F32, true}, {TD_BF16, false}, {TD_F16, false}};

enum {
    EXTENTS = sizeof extents / sizeof *extents,
    HEAD_DIMS = sizeof head_dims / sizeof *head_dims,
    KINDS = sizeof kinds / sizeof *kinds,
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

/* ---- properties ---- */

/* Rows that do not start at 16 bytes are read element by element. In f32 the order of sums is the same.
 * With 16 bits the portable kernels run instead of Hopper's. */
TD_BODY(takes_tensors_at_any_address)
{
    for (int kind = 0; kind < KINDS; kind++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 150,
                                          .seq_k = 90,
                                          .head_dim = 64,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = true,
                                          .deterministic = true};
        td_attend_run run = inputs_of("addresses", &shape);
        results aligned = compute(&run, 0), shifted = compute(&run, 1);

        const struct {
            const char *name;
            const void *aligned, *shifted;
            int64_t count;
        } outputs[] = {{"o", aligned.o, shifted.o, run.queries},
                       {"dv", aligned.dv, shifted.dv, run.keys},
                       {"dq", aligned.dq, shifted.dq, run.queries},
                       {"dk", aligned.dk, shifted.dk, run.keys}};
        for (int i = 0; i < 4; i++) {
            /* rowsum(dO * O) is summed by other lanes, so the last bits of dq and dk may differ. */
            if (shape.dtype == TD_F32 && i < 2) {
                td_assert_identical(outputs[i].name, shape.dtype, outputs[i].aligned, outputs[i].shifted,
                                    outputs[i].count);
                continue;
            }
            double *values = td_as_f64(shape.dtype, outputs[i].aligned, outputs[i].count);
            td_assert_close(outputs[i].name, shape.dtype, outputs[i].shifted, values, outputs[i].count,
                            tolerance_of(&shape));
            free(values);
        }
        free_results(&aligned);
        free_results(&shifted);
        free_inputs(&run);
    }
}

/* o_bshd changes only the order of o and dout in memory. Our kernels give the same bits. cuBLASLt is called
 * once for each batch element, so its values differ by rounding. 1100 queries of few heads are cut into
 * parts. Rows of 33 elements are read one by one. In f16 dq is summed by atomics. */
TD_BODY(o_may_lie_as_the_projection_reads_it)
{
    const struct {
        int64_t batch, heads, seq, seq_k, head_dim;
    } shapes[] = {{2, 3, 129, 129, 64},   {3, 2, 70, 150, 80}, {2, 5, 90, 65, 33},
                  {1, 2, 1100, 1100, 64}, {4, 1, 40, 40, 128}, {2, 3, 1, 40, 16}};
    const td_attention_impl *const impls[] = {&td_attention_flash, &td_attention_naive};

    for (size_t i = 0; i < 2 * KINDS * sizeof shapes / sizeof *shapes; i++) {
        const int kind = (int)(i / 2 % KINDS);
        const td_attention_shape shape = {.batch = shapes[i / 2 / KINDS].batch,
                                          .heads = shapes[i / 2 / KINDS].heads,
                                          .seq = shapes[i / 2 / KINDS].seq,
                                          .seq_k = shapes[i / 2 / KINDS].seq_k,
                                          .head_dim = shapes[i / 2 / KINDS].head_dim,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = shapes[i / 2 / KINDS].seq > 1,
                                          .deterministic = kinds[kind].dtype != TD_F16};
        td_attend_run run = inputs_of("layout", &shape);
        void *dout = td_fence_alloc((size_t)run.queries * td_dtype_size(shape.dtype)), *const first =
                                                                                           run.dout;

        run.impl = impls[i % 2];
        results plain = compute(&run, 0);
        td_attend_exchange(&shape, true, first, dout);
        run.dout = dout;
        run.shape.o_bshd = true;
        results other = compute(&run, 0);
        td_attend_exchange(&shape, false, other.o, dout);
        memcpy(other.o, dout, (size_t)run.queries * td_dtype_size(shape.dtype));
        if (i % 2 == 0) {
            assert_identical_results(&run, &plain, &other, shape.deterministic);
        } else {
            void *const got[] = {other.o, other.dq, other.dk, other.dv};
            void *const expected[] = {plain.o, plain.dq, plain.dk, plain.dv};

            for (int which = 0; which < 4; which++) {
                const int64_t count = which < 2 ? run.queries : run.keys;
                double *values = td_as_f64(shape.dtype, expected[which], count);
                td_assert_close("o or a gradient", shape.dtype, got[which], values, count,
                                4 * tolerance_of(&shape)); /* S and P are rounded too */
                free(values);
            }
        }
        td_fence_free(dout);
        run.dout = first;
        free_results(&plain);
        free_results(&other);
        free_inputs(&run);
    }
}

/* Puts the heads of rows one after the other, and checks that nothing was written between rows. */
static void *heads_of(const td_attention_shape *s, int64_t seq, int64_t first, int64_t end, void *block)
{
    const size_t element = td_dtype_size(s->dtype), head = (size_t)s->head_dim * element;
    unsigned char *const rows = td_gpu_read(gpu, block, (size_t)(s->batch * seq * s->grad_pitch) * element),
                         *const heads = malloc((size_t)(s->batch * seq * s->heads) * head);

    assert_non_null(heads);
    for (int64_t row = 0; row < s->batch * seq; row++) {
        unsigned char *const from = rows + (size_t)(row * s->grad_pitch) * element;

        for (int64_t h = 0; h < s->heads; h++)
            memcpy(heads + (size_t)((row / seq * s->heads + h) * seq + row % seq) * head,
                   from + (size_t)first * element + (size_t)h * head, head);
        for (size_t i = (size_t)end * element; i < (size_t)s->grad_pitch * element; i++)
            assert_int_equal(from[i], 0xFF);
    }
    free(rows);
    return heads;
}

/* Rotates the rows of heads back, as the gradient of rotary position embedding does. */
static void turn_back(double *x, int64_t heads, int64_t seq, int64_t head_dim, const float *cosine,
                      const float *sine)
{
    for (int64_t pair = 0; pair < heads * seq * head_dim / 2; pair++) {
        const int64_t angle = pair % (seq * head_dim / 2);
        const double even = x[2 * pair], odd = x[2 * pair + 1];

        x[2 * pair] = even * (double)cosine[angle] + odd * (double)sine[angle];
        x[2 * pair + 1] = odd * (double)cosine[angle] - even * (double)sine[angle];
    }
}

/* Lengths on both sides of a tile; sequences whose keys are cut into parts; heads filled up with zeros. */
TD_BODY(gradients_may_be_slices_of_rows_before_the_rotation)
{
    const struct {
        int64_t batch, heads, seq, seq_k, head_dim;
    } shapes[] = {{2, 3, 129, 129, 64},   {3, 2, 70, 150, 80},   {2, 5, 90, 65, 24}, {1, 3, 300, 300, 128},
                  {1, 2, 1100, 1100, 64}, {40, 4, 128, 128, 96}, {1, 1, 40, 1, 16}};

    for (size_t i = 0; i < 4 * (sizeof shapes / sizeof *shapes); i++) {
        const int64_t heads = shapes[i / 4].heads, head_dim = shapes[i / 4].head_dim,
                      most =
                          shapes[i / 4].seq > shapes[i / 4].seq_k ? shapes[i / 4].seq : shapes[i / 4].seq_k;
        const td_attention_shape plain = {.batch = shapes[i / 4].batch,
                                          .heads = heads,
                                          .seq = shapes[i / 4].seq,
                                          .seq_k = shapes[i / 4].seq_k,
                                          .head_dim = head_dim,
                                          .dtype = i % 2 ? TD_F16 : TD_BF16,
                                          .causal = true,
                                          .deterministic = i / 4 == 5};
        td_attend_run run = inputs_of("rows", &plain);
        td_attend_truth truth = td_attend_truth_of(&run);
        const blocks b = open_blocks(&run, 0);
        const size_t angles = (size_t)(most * head_dim / 2) * sizeof(float);
        float *const cosine = malloc(angles), *const sine = malloc(angles);

        assert_true(cosine && sine);
        for (int64_t at = 0; at < most * head_dim / 2; at++) {
            cosine[at] = cosf((float)at);
            sine[at] = sinf((float)at);
        }
        void *const c = td_gpu_block(gpu, cosine, angles), *const s = td_gpu_block(gpu, sine, angles);
        td_attention_shape *const shape = &run.shape;
        shape->grad_pitch = 2 * heads * head_dim + 8;
        if (i / 2 % 2) {
            shape->cos = c;
            shape->sin = s;
            turn_back(truth.dq, plain.batch * heads, plain.seq, head_dim, cosine, sine);
            turn_back(truth.dk, plain.batch * heads, plain.seq_k, head_dim, cosine, sine);
        }
        const size_t row = (size_t)shape->grad_pitch * 2;
        char *const dq = td_gpu_block(gpu, NULL, (size_t)(plain.batch * plain.seq) * row),
                    *const dk = td_gpu_block(gpu, NULL, (size_t)(plain.batch * plain.seq_k) * row),
                    *const dv = dk + heads * head_dim * 2;

        td_assert_ok(td_flash_forward(gpu, shape, b.q, b.k, b.v, b.o, b.lse, b.forward_work));
        if (b.sizes.packs) {
            td_assert_ok(td_flash_backward(gpu, shape, b.q, b.k, b.v, b.o, b.dout, b.lse, dq, dk, dv,
                                           b.backward_work));
            void *const got[] = {heads_of(shape, plain.seq, 0, heads * head_dim, dq),
                                 heads_of(shape, plain.seq_k, 0, 2 * heads * head_dim, dk),
                                 heads_of(shape, plain.seq_k, heads * head_dim, 2 * heads * head_dim, dk)};
            if (plain.seq_k > 1) {
                td_assert_close("dq", plain.dtype, got[0], truth.dq, run.queries, tolerance_of(&plain));
                td_assert_close("dk", plain.dtype, got[1], truth.dk, run.keys, tolerance_of(&plain));
            }
            td_assert_close("dv", plain.dtype, got[2], truth.dv, run.keys, tolerance_of(&plain));
            for (int which = 0; which < 3; which++)
                free(got[which]);
        }
        td_assert_refused(
            td_flash_backward(gpu, shape, b.q, b.k, b.v, b.o, b.dout, b.lse, dq + 2, dk, dv, b.backward_work),
            TD_UNSUPPORTED, "grad_pitch is");
        td_gpu_free(gpu, dq);
        td_gpu_free(gpu, dk);
        td_gpu_free(gpu, c);
        td_gpu_free(gpu, s);
        free(cosine);
        free(sine);
        close_blocks(&b);
        td_attend_truth_free(&truth);
        free_inputs(&run);
    }
}

/* More keys than queries under a causal mask: keys after the last query have a gradient of 0, which must
 * be written. */
TD_BODY(keys_that_no_query_sees_have_no_gradient)
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
TD_BODY(lse_of_one_key_is_its_score)
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
TD_BODY(tiles_of_keys_at_minus_infinity_have_no_weight)
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

TD_BODY(nan_goes_where_it_must)
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
TD_BODY(a_part_of_nan_keys_spoils_every_row)
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

/* A captured graph gives the same bits as the calls. */
TD_BODY(may_be_captured_in_a_graph)
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
TD_BODY(owned_sms_change_no_bit)
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
TD_BODY(deterministic_gradients_repeat_during_other_work)
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
TD_BODY(memory_is_linear)
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

TD_BODY(refuses_what_it_has_no_kernel_for)
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

TD_BODY(work_may_be_null_where_none_is_needed)
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_tensors_at_any_address), /* the only test if td_gpu_small() */
        cmocka_unit_test(o_may_lie_as_the_projection_reads_it),
        cmocka_unit_test(gradients_may_be_slices_of_rows_before_the_rotation),
        cmocka_unit_test(keys_that_no_query_sees_have_no_gradient),
        cmocka_unit_test(lse_of_one_key_is_its_score),
        cmocka_unit_test(tiles_of_keys_at_minus_infinity_have_no_weight),
        cmocka_unit_test(nan_goes_where_it_must),
        cmocka_unit_test(a_part_of_nan_keys_spoils_every_row),
        cmocka_unit_test(may_be_captured_in_a_graph),
        cmocka_unit_test(owned_sms_change_no_bit),
        cmocka_unit_test(deterministic_gradients_repeat_during_other_work),
        cmocka_unit_test(memory_is_linear),
        cmocka_unit_test(refuses_what_it_has_no_kernel_for),
        cmocka_unit_test(work_may_be_null_where_none_is_needed),
    };

    gpu = td_gpu_open();
    const int failed =
        run_trials() + _cmocka_run_group_tests("flash attention on a GPU", tests,
                                               td_gpu_small() ? 1 : sizeof tests / sizeof *tests, NULL, NULL);
    td_device_close(gpu);
    return failed;
}
