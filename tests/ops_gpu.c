/* The operations on a GPU: the groups of test_ops, and tests that need a GPU. */
#include "base/float16.h"
#include "device/sms.h"
#include "support/ops_kit.h"

/* Weights that a replayed graph or calls update, and the inputs of these updates. */
typedef struct trained {
    td_adamw *adamw;
    td_update_state *now;
    float *p, *m, *v, *norm;
    void *work;
} trained;

static trained trained_make(ops_case *c, td_adamw adamw, const float *p, int64_t count)
{
    trained t = {.adamw = ops_adamw(c, adamw), .now = ops_state(c, 0, 0), .p = ops_copy(c, TD_F32, p, count)};
    size_t bytes = 0;

    t.m = ops_room(c, TD_F32, count);
    t.v = ops_room(c, TD_F32, count);
    memset(t.m, 0, (size_t)count * sizeof *t.m);
    memset(t.v, 0, (size_t)count * sizeof *t.v);
    t.norm = ops_room(c, TD_F32, 1);
    td_assert_ok(td_global_norm_work_bytes(ops_dev, count, TD_F32, &bytes));
    t.work = ops_bytes(c, bytes);
    return t;
}

/* A whole step: it counts itself, and averages and clips its gradients. */
static void train(const trained *t, const float *g, int64_t count, float gain, float max_norm)
{
    const td_update_tensors tensors = {
        .count = count, .dtype = TD_F32, .p = on(t->p), .g = on(g), .m = on(t->m), .v = on(t->v)};

    td_assert_ok(td_update_begin(ops_dev, on(t->now), gain));
    td_assert_ok(td_global_norm(ops_dev, count, TD_F32, on(g), on(t->norm), on(t->work)));
    td_assert_ok(td_update_clip(ops_dev, max_norm, on(t->norm), on(t->now)));
    td_assert_ok(td_adamw_update(ops_dev, on(t->adamw), on(t->now), &tensors));
}

/* A captured update uses the step number that it counts itself, new gradients, and the learning rate that was
 * assigned last. */
TD_TEST(a_replayed_update_goes_on)
{
    enum { N = 1009, STEPS = 3 };
    ops_case c = ops_begin(TD_F32, "replayed update");
    const float gain = 0.37f, max_norm = 5;
    td_adamw given = {.variant = TD_ADAMW_TORCH, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    float *p = ops_draw(&c, N), *g = ops_draw(&c, N), *g_later = ops_draw(&c, N);
    const trained replayed = trained_make(&c, given, p, N), plain = trained_make(&c, given, p, N);
    double *truth = ops_f64(&c, TD_F32, p, N), *first = ops_zeros(&c, N), *second = ops_zeros(&c, N);
    td_update_state now = {.step = 0};
    td_graph *graph = NULL;

    for (int i = 0; i < N; i++)
        g_later[i] /= 64; /* small enough that it is not clipped */
    ops_upload();
    td_assert_ok(td_graph_begin(ops_dev));
    train(&replayed, g, N, gain, max_norm);
    td_assert_ok(td_graph_end(ops_dev, &graph));
    for (int step = 1; step <= STEPS; step++) {
        given.lr /= 2;
        td_assert_ok(td_assign(ops_dev, on(&replayed.adamw->lr), &given.lr, sizeof given.lr));
        td_assert_ok(td_assign(ops_dev, on(plain.adamw), &given, sizeof given));
        if (step == STEPS)
            td_assert_ok(td_device_copy(ops_dev, on(g), on(g_later), N * sizeof *g));
        td_assert_ok(td_graph_launch(graph));
        train(&plain, g, N, gain, max_norm);

        double *grad = ops_f64(&c, TD_F32, step == STEPS ? g_later : g, N);
        const double norm = (double)gain * sqrt(ops_dot(grad, grad, N));
        now.step = step;
        now.gain = gain * (float)fmin(1, (double)max_norm / (norm + 1e-6));
        ops_adamw_truth(&given, &now, N, truth, grad, first, second);
    }
    ops_download();
    assert_true(replayed.now->step == STEPS && plain.now->step == STEPS);
    assert_true(replayed.now->gain == gain && replayed.adamw->lr == given.lr);
    td_assert_identical("p", TD_F32, replayed.p, plain.p, N);
    ops_assert_close(&c, "p", TD_F32, replayed.p, truth, N, STEPS);
    td_graph_destroy(graph);
    ops_finish(&c);
}

/* Each replay assigns the bytes that were captured, although the host's memory has changed. */
TD_TEST(a_replayed_assignment_has_its_bytes)
{
    ops_case c = ops_begin(TD_F32, "replayed assignment");
    td_sgd *sgd = ops_sgd(&c, 0.5), kept = {.lr = 0.25};
    td_graph *graph = NULL;

    ops_upload();
    td_assert_ok(td_graph_begin(ops_dev));
    td_assert_ok(td_assign(ops_dev, on(sgd), &kept, sizeof kept));
    td_assert_ok(td_graph_end(ops_dev, &graph));
    kept.lr = 77;
    ops_download();
    assert_true(sgd->lr == 0.5);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_device_fill(ops_dev, on(sgd), 0, sizeof *sgd));
        td_assert_ok(td_graph_launch(graph));
        ops_download();
        assert_true(sgd->lr == 0.25);
    }
    td_graph_destroy(graph);
    ops_finish(&c);
}

/* The memory for known GEMM shapes is bounded: after a thousand other shapes one is forgotten. A graph that
 * captured it still replays. A later call finds it again, with the same bits. */
TD_TEST(a_captured_product_outlives_what_is_kept_of_it)
{
    enum { M = 33, N = 40, K = 24, OTHERS = 1000, WIDE = 8 };
    ops_case c = ops_begin(TD_F32, "captured product");
    const td_gemm_shape shape = {
        .batch = 1, .m = M, .n = N, .k = K, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    float *a = ops_draw(&c, M * K), *b = ops_draw(&c, K * N), *many = ops_draw(&c, OTHERS * WIDE);
    float *eager = ops_room(&c, TD_F32, M * N), *replayed = ops_room(&c, TD_F32, M * N),
          *again = ops_room(&c, TD_F32, M * N), *out = ops_room(&c, TD_F32, OTHERS * WIDE);
    td_graph *graph = NULL;
    size_t bytes = 0;
    void *work;

    td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &bytes));
    td_assert_ok(td_device_alloc(ops_dev, bytes, &work));
    ops_upload();
    td_assert_ok(td_gemm(ops_dev, &shape, on(a), on(b), on(eager), work));
    td_assert_ok(td_graph_begin(ops_dev));
    td_assert_ok(td_gemm(ops_dev, &shape, on(a), on(b), on(replayed), work));
    td_assert_ok(td_graph_end(ops_dev, &graph));
    for (int64_t m = 1; m <= OTHERS; m++) {
        td_gemm_shape other = shape;

        other.m = m;
        other.n = other.k = WIDE;
        td_assert_ok(td_gemm(ops_dev, &other, on(many), on(a), on(out), work));
    }
    td_assert_ok(td_graph_launch(graph));
    td_assert_ok(td_gemm(ops_dev, &shape, on(a), on(b), on(again), work));
    ops_download();
    td_assert_identical("replayed", TD_F32, replayed, eager, M * N);
    td_assert_identical("again", TD_F32, again, eager, M * N);
    td_graph_destroy(graph);
    td_assert_ok(td_device_free(ops_dev, work));
    ops_finish(&c);
}

/* cuBLASLt clears a counter before a GEMM of so many tiles. In each launch of a graph one kernel clears the
 * counters of all. */
TD_TEST(a_graph_clears_the_counters_of_its_products)
{
    enum { M = 2048, N = 6144, K = 768, PRODUCTS = 3 };
    const td_gemm_shape shape = {.batch = 1,
                                 .m = M,
                                 .n = N,
                                 .k = K,
                                 .trans_b = true,
                                 .alpha = 1,
                                 .dtype = TD_BF16,
                                 .out_dtype = TD_BF16};
    ops_case c = ops_begin(TD_BF16, "counters");
    void *a = ops_draw(&c, M * K), *b = ops_draw(&c, N * K), *out[PRODUCTS + 1], *work;
    td_graph *graph = NULL;
    size_t bytes = 0;

    for (int i = 0; i <= PRODUCTS; i++)
        out[i] = ops_room(&c, TD_BF16, (int64_t)M * N);
    td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &bytes));
    td_assert_ok(td_device_alloc(ops_dev, bytes, &work));
    ops_upload();
    td_assert_ok(td_gemm(ops_dev, &shape, on(a), on(b), on(out[PRODUCTS]), work));
    td_assert_ok(td_graph_begin(ops_dev));
    for (int i = 0; i < PRODUCTS; i++)
        td_assert_ok(td_gemm(ops_dev, &shape, on(a), on(b), on(out[i]), work));
    td_assert_ok(td_graph_end(ops_dev, &graph));
    for (int launch = 0; launch < 3; launch++) {
        for (int i = 0; i < PRODUCTS; i++)
            td_assert_ok(td_device_fill(ops_dev, on(out[i]), 0xFF, (size_t)M * N * 2));
        td_assert_ok(td_graph_launch(graph));
    }
    ops_download();
    for (int i = 0; i < PRODUCTS; i++)
        td_assert_identical("replayed", TD_BF16, out[i], out[PRODUCTS], (int64_t)M * N);
    td_graph_destroy(graph);
    td_assert_ok(td_device_free(ops_dev, work));
    ops_finish(&c);
}

/* The GEMMs of a layer of xl and large, next to an update. On an H100 many of them have a measured algorithm
 * for these numbers of SMs. For 4 SMs less cuBLASLt chooses. Both give the same sums, rounded to bf16. */
TD_TEST(products_agree_for_other_numbers_of_sms)
{
    enum { TOKENS = 2048, MOST = 12800 * TOKENS };
    static const int64_t wide[] = {1600, 1280};
    ops_case c = ops_begin(TD_BF16, "measured products");
    const size_t bytes = MOST * sizeof(td_bf16);
    const td_bf16 *const drawn = ops_draw(&c, MOST);
    td_bf16 *const got[] = {ops_room(&c, TD_BF16, MOST), ops_room(&c, TD_BF16, MOST)};
    void *in, *out, *work;
    size_t work_bytes;

    td_assert_ok(td_device_alloc(ops_dev, bytes, &in));
    td_assert_ok(td_device_alloc(ops_dev, bytes, &out));
    td_assert_ok(td_device_upload(ops_dev, in, drawn, bytes));
    for (int i = 0; i < 2 * 4 * 3; i++) {
        const int64_t d = wide[i / 12], rows[] = {8 * d, d, 3 * d, d}, cols[] = {d, 4 * d, d, d};
        const int64_t o = rows[i / 3 % 4], w = cols[i / 3 % 4], t = TOKENS;
        const td_gemm_shape kinds[] = {{.m = o, .n = w, .k = t, .trans_a = true}, /* gradients of weights */
                                       {.m = t, .n = w, .k = o},                  /* and of inputs */
                                       {.m = t, .n = o, .k = w, .trans_b = true}};
        td_gemm_shape shape = kinds[i % 3];

        shape.batch = 1, shape.alpha = 1, shape.dtype = shape.out_dtype = TD_BF16;
        td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &work_bytes));
        td_assert_ok(td_device_alloc(ops_dev, work_bytes, &work));
        for (int way = 0; way < 2; way++) {
            td_device_reserve_sms(ops_dev, TD_SMS_UPDATE, (i % 3 == 2 ? 0 : 20) + 4 * way);
            td_assert_ok(td_device_fill(ops_dev, out, 0xFF, bytes));
            td_assert_ok(td_gemm(ops_dev, &shape, in, in, out, work));
            td_assert_ok(td_device_download(ops_dev, got[way], out, bytes));
        }
        td_assert_ok(td_device_free(ops_dev, work));
        for (int64_t j = 0; j < shape.m * shape.n; j++) {
            const float x = td_bf16_to_f32(got[0][j]), y = td_bf16_to_f32(got[1][j]);

            if (!(fabsf(x - y) <= 0.01f * fabsf(x) + 0.01f))
                fail_msg("m %d, n %d, k %d: element %ld is %g and %g", (int)shape.m, (int)shape.n,
                         (int)shape.k, (long)j, (double)x, (double)y);
        }
    }
    td_device_reserve_sms(ops_dev, TD_SMS_UPDATE, 0);
    td_assert_ok(td_device_free(ops_dev, in));
    td_assert_ok(td_device_free(ops_dev, out));
    ops_finish(&c);
}

/* Vectors have 16 bytes. Tensors that begin at other addresses give the same bits. */
TD_TEST(tensors_may_begin_anywhere)
{
    enum { ROWS = 5, COLS = 80, ALL = ROWS * COLS };

    for (int d = 0; d < ops_dtype_count; d++) {
        ops_case c = ops_begin(ops_dtypes[d], "beside vectors %d", d);
        size_t size = td_dtype_size(c.dtype);
        char *a = ops_draw(&c, ALL + 1), *b = ops_draw(&c, ALL + 1), *y = ops_room(&c, c.dtype, ALL + 1);
        void *a_plain = ops_copy(&c, c.dtype, a + size, ALL), *b_plain = ops_copy(&c, c.dtype, b + size, ALL);
        void *want = ops_room(&c, c.dtype, ALL);
        td_rows_shape rows = {.rows = ROWS, .cols = COLS, .dtype = c.dtype};

        OPS_CALL(td_residual_add(ops_dev, ALL, c.dtype, on(a_plain), on(b_plain), on(want)));
        OPS_CALL(td_residual_add(ops_dev, ALL, c.dtype, on(a + size), on(b + size), on(y + size)));
        td_assert_identical(c.name, c.dtype, y + size, want, ALL);
        OPS_CALL(td_silu_mul_forward(ops_dev, &rows, on(a_plain), on(b_plain), on(want)));
        OPS_CALL(td_silu_mul_forward(ops_dev, &rows, on(a + size), on(b + size), on(y + size)));
        td_assert_identical(c.name, c.dtype, y + size, want, ALL);
        ops_finish(&c);
    }
}

/* Weights and moments of an update. */
typedef struct updated {
    void *p; /* numbers, or high planes */
    uint16_t *low;
    float *m, *v;
} updated;

/* Draws `count` numbers, and gives another `count` the same bits from number `begin` on. */
static void draw_updated(ops_case *c, td_dtype dtype, bool planes, int64_t count, int64_t begin, updated *x,
                         updated *y)
{
    const td_dtype stored = planes ? TD_BF16 : dtype;
    const size_t size = td_dtype_size(stored);

    *x = (updated){.p = ops_draw_as(c, stored, count),
                   .low = planes ? ops_draw_as(c, TD_BF16, count) : NULL,
                   .m = ops_draw_as(c, TD_F32, count),
                   .v = ops_draw_as(c, TD_F32, count)};
    for (int64_t i = 0; i < count; i++)
        x->v[i] *= x->v[i];
    *y = (updated){.p = ops_copy(c, stored, (char *)x->p + (size_t)begin * size, count - begin),
                   .low = planes ? ops_copy(c, TD_BF16, x->low + begin, count - begin) : NULL,
                   .m = ops_copy(c, TD_F32, x->m + begin, count - begin),
                   .v = ops_copy(c, TD_F32, x->v + begin, count - begin)};
}

static td_update_tensors tensors_of(td_dtype dtype, td_dtype grad, const updated *x, int64_t begin,
                                    int64_t count, const void *g)
{
    return (td_update_tensors){.count = count,
                               .dtype = dtype,
                               .grad_dtype = grad,
                               .p =
                                   on((char *)x->p + (size_t)begin * td_dtype_size(x->low ? TD_BF16 : dtype)),
                               .low = x->low ? on(x->low + begin) : NULL,
                               .g = on(g),
                               .m = on(x->m + begin),
                               .v = on(x->v + begin)};
}

static void assert_updated(const ops_case *c, td_dtype dtype, const updated *x, int64_t begin,
                           const updated *y, int64_t count)
{
    const td_dtype stored = x->low ? TD_BF16 : dtype;

    td_assert_identical(c->name, stored, (char *)x->p + (size_t)begin * td_dtype_size(stored), y->p, count);
    if (x->low)
        td_assert_identical(c->name, TD_BF16, x->low + begin, y->low, count);
    td_assert_identical(c->name, TD_F32, x->m + begin, y->m, count);
    td_assert_identical(c->name, TD_F32, x->v + begin, y->v, count);
}

/* Every combination of the types of an update. */
static const struct {
    td_dtype dtype, grad;
    bool planes;
} update_types[] = {{TD_F32, TD_F32, false}, {TD_F32, TD_BF16, false}, {TD_F32, TD_F16, false},
                    {TD_F32, TD_F32, true},  {TD_F32, TD_BF16, true},  {TD_F32, TD_F16, true},
                    {TD_F16, TD_F16, false}, {TD_BF16, TD_BF16, false}};

enum { UPDATE_TYPES = sizeof update_types / sizeof *update_types };

/* The same for a list of updates. */
TD_TEST(updates_may_begin_anywhere)
{
    enum { ALL = 403 };

    for (int i = 0; i < 2 * UPDATE_TYPES; i++) {
        const td_dtype dtype = update_types[i / 2].dtype, grad = update_types[i / 2].grad;
        ops_case c = ops_begin(dtype, "updates beside vectors %d", i);
        const void *on_adamw = on(ops_adamw(&c, td_adamw_defaults(TD_ADAMW_COURSE2026))),
                   *on_sgd = on(ops_sgd(&c, 0.1)), *on_state = on(ops_state(&c, 2, 0.37f));
        char *g = ops_draw_as(&c, grad, ALL + 1), *later = g + td_dtype_size(grad);
        const void *plain_g = ops_copy(&c, grad, later, ALL);
        updated x, plain;

        draw_updated(&c, dtype, update_types[i / 2].planes, ALL + 1, 1, &x, &plain);
        for (int beside = 0; beside < 2; beside++) {
            const td_update_tensors t = beside ? tensors_of(dtype, grad, &x, 1, ALL, later)
                                               : tensors_of(dtype, grad, &plain, 0, ALL, plain_g);

            if (i % 2)
                OPS_CALL(td_sgd_update(ops_dev, on_sgd, on_state, &t));
            else
                OPS_CALL(td_adamw_update(ops_dev, on_adamw, on_state, &t));
        }
        assert_updated(&c, dtype, &x, 1, &plain, ALL);
        ops_finish(&c);
    }
}

/* Updates on a few SMs have the bits of updates on all SMs. Tested with every combination of types, and twice
 * with one work area. Sizes are around 16 bytes, around a chunk of 2,048, and around the elements that all
 * SMs take at a time. */
TD_TEST(updates_on_some_sms_have_the_same_bits)
{
    static const int64_t counts[] = {1, 7, 8, 9, 2047, 2048, 2049, 12293, 200003};

    if (!td_update_has_sms(ops_dev))
        return; /* there is only the kernel for all SMs, which other tests check */
    for (int i = 0; i < UPDATE_TYPES; i++)
        for (size_t j = 0; j < sizeof counts / sizeof *counts; j++)
            for (int sgd = 0; sgd < 2; sgd++) {
                const int64_t n = counts[j];
                const td_dtype dtype = update_types[i].dtype, grad = update_types[i].grad;
                ops_case c = ops_begin(dtype, "updates on SMs, types %d, %d", i, (int)n);
                const void *on_adamw = on(ops_adamw(&c, td_adamw_defaults(TD_ADAMW_TORCH))),
                           *on_sgd = on(ops_sgd(&c, 0.1)), *on_state = on(ops_state(&c, 2, 0.37f));
                const void *g = ops_draw_as(&c, grad, n);
                int64_t *work = ops_room(&c, TD_F32, TD_UPDATE_WORK_BYTES / 4);
                updated x[2];

                memset(work, 0, TD_UPDATE_WORK_BYTES);
                draw_updated(&c, dtype, update_types[i].planes, n, 0, &x[0], &x[1]);
                for (int way = 0; way < 2; way++) {
                    td_update_tensors t = tensors_of(dtype, grad, &x[way], 0, n, g);

                    t.sms = way ? 3 + (int)j * 4 : 0;
                    t.work = on(work);
                    for (int turn = 0; turn < 2; turn++) {
                        if (sgd)
                            OPS_CALL(td_sgd_update(ops_dev, on_sgd, on_state, &t));
                        else
                            OPS_CALL(td_adamw_update(ops_dev, on_adamw, on_state, &t));
                    }
                }
                assert_updated(&c, dtype, &x[1], 0, &x[0], n);
                for (size_t k = 0; k < TD_UPDATE_WORK_BYTES / sizeof *work; k++)
                    assert_int_equal(work[k], 0);
                ops_finish(&c);
            }
}

/* More than 2^32 bytes and 2^31 elements, as logits of a long sequence. The last rows must be as in a call
 * with these rows alone. Numbers are small integers, so the order of sums changes no bit. */
enum { LARGE_ROWS = 16384, LARGE_VOCAB = 151936, LARGE_WIDTH = 64, LAST_ROWS = 128 };

typedef struct large {
    char *logits, *few, *x, *weight, *out[2], *work; /* logits of all rows, and of the last */
    int64_t *targets;
    float *loss, *lse;
} large;

static void *large_room(int64_t count, size_t size)
{
    void *room;

    td_assert_ok(td_device_alloc(ops_dev, (size_t)count * size, &room));
    return room;
}

/* `count` whole numbers from -2 to 2, in bf16, on the device. */
static void large_draw(void *to, int64_t count)
{
    float *numbers = calloc((size_t)count, sizeof *numbers);
    uint16_t *narrow = calloc((size_t)count, sizeof *narrow);

    assert_true(numbers && narrow);
    for (int64_t i = 0; i < count; i++)
        numbers[i] = (float)(i * i % 65521 % 5 - 2);
    td_assert_ok(td_convert(count, TD_F32, numbers, TD_BF16, narrow));
    td_assert_ok(td_device_upload(ops_dev, to, narrow, (size_t)count * sizeof *narrow));
    free(numbers);
    free(narrow);
}

static void large_assert_same(const char *name, const void *a, const void *b, int64_t count, td_dtype dtype)
{
    const size_t bytes = (size_t)count * td_dtype_size(dtype);
    char *both = calloc(2, bytes);

    assert_non_null(both);
    td_assert_ok(td_device_download(ops_dev, both, a, bytes));
    td_assert_ok(td_device_download(ops_dev, both + bytes, b, bytes));
    td_assert_identical(name, dtype, both, both + bytes, count);
    free(both);
}

static const int64_t large_before = LARGE_ROWS - LAST_ROWS; /* rows that only the larger call has */

static void large_gemm(const large *t, td_gemm_shape shape, const void *a, const void *b, void *y)
{
    shape.batch = 1;
    shape.alpha = 1;
    shape.dtype = TD_BF16;
    td_assert_ok(td_gemm(ops_dev, &shape, a, b, y, t->work));
}

TD_TEST(last_rows_of_large_logits)
{
    const int64_t all = (int64_t)LARGE_ROWS * LARGE_VOCAB, few = (int64_t)LAST_ROWS * LARGE_VOCAB,
                  before = all - few;
    const td_cross_entropy_shape whole = {LARGE_ROWS, LARGE_VOCAB, TD_BF16},
                                 last = {LAST_ROWS, LARGE_VOCAB, TD_BF16};
    int64_t targets[LARGE_ROWS];
    large t = {.logits = NULL};
    void *room;

    if (td_device_alloc(ops_dev, (size_t)all * 2, &room) == TD_NO_MEMORY)
        skip();
    t.logits = room;
    t.few = large_room(few, 2);
    t.x = large_room((int64_t)LARGE_ROWS * LARGE_WIDTH, 2);
    t.weight = large_room((int64_t)LARGE_VOCAB * LARGE_WIDTH, 2);
    for (int i = 0; i < 2; i++)
        t.out[i] = large_room((int64_t)LARGE_VOCAB * LARGE_WIDTH, 4);
    t.work = large_room(1, 64 << 20);
    t.targets = large_room(LARGE_ROWS, 8);
    t.loss = large_room(1, 4);
    t.lse = large_room(2 * LARGE_ROWS, 4);
    const char *const x_last = t.x + large_before * LARGE_WIDTH * 2;
    char *const logits_last = t.logits + before * 2;
    large_draw(t.x, (int64_t)LARGE_ROWS * LARGE_WIDTH);
    large_draw(t.weight, (int64_t)LARGE_VOCAB * LARGE_WIDTH);
    for (int64_t i = 0; i < LARGE_ROWS; i++)
        targets[i] = i * 7919 % LARGE_VOCAB;
    td_assert_ok(td_device_upload(ops_dev, t.targets, targets, sizeof targets));

    td_gemm_shape shape = {.n = LARGE_VOCAB, .k = LARGE_WIDTH, .trans_b = true, .out_dtype = TD_BF16};
    shape.m = LARGE_ROWS;
    large_gemm(&t, shape, t.x, t.weight, t.logits);
    shape.m = LAST_ROWS;
    large_gemm(&t, shape, x_last, t.weight, t.few);
    large_assert_same("logits", logits_last, t.few, few, TD_BF16);

    shape = (td_gemm_shape){.n = LARGE_WIDTH, .k = LARGE_VOCAB, .out_dtype = TD_F32};
    shape.m = LARGE_ROWS;
    large_gemm(&t, shape, t.logits, t.weight, t.out[0]);
    shape.m = LAST_ROWS;
    large_gemm(&t, shape, t.few, t.weight, t.out[1]);
    large_assert_same("input's gradient", t.out[0] + large_before * LARGE_WIDTH * 4, t.out[1],
                      (int64_t)LAST_ROWS * LARGE_WIDTH, TD_F32);

    td_assert_ok(td_cross_entropy_forward(ops_dev, &whole, t.logits, t.targets, t.loss, t.lse, t.work));
    td_assert_ok(
        td_cross_entropy_backward(ops_dev, &whole, t.logits, t.targets, t.lse, LARGE_ROWS, t.logits));
    float *const lse_last = t.lse + LARGE_ROWS;
    int64_t *const targets_last = t.targets + large_before;
    td_assert_ok(td_cross_entropy_forward(ops_dev, &last, t.few, targets_last, t.loss, lse_last, t.work));
    td_assert_ok(td_cross_entropy_backward(ops_dev, &last, t.few, targets_last, lse_last, LAST_ROWS, t.few));
    large_assert_same("lse", t.lse + large_before, lse_last, LAST_ROWS, TD_F32);
    large_assert_same("dlogits", logits_last, t.few, few, TD_BF16);

    /* The weight's gradient of all rows. Only the last rows are not 0. */
    td_assert_ok(td_device_fill(ops_dev, t.logits, 0, (size_t)before * 2));
    large_draw(logits_last, few);
    shape = (td_gemm_shape){.m = LARGE_VOCAB, .n = LARGE_WIDTH, .trans_a = true, .out_dtype = TD_F32};
    shape.k = LARGE_ROWS;
    large_gemm(&t, shape, t.logits, t.x, t.out[0]);
    shape.k = LAST_ROWS;
    large_gemm(&t, shape, logits_last, x_last, t.out[1]);
    large_assert_same("weight's gradient", t.out[0], t.out[1], (int64_t)LARGE_VOCAB * LARGE_WIDTH, TD_F32);

    void *const rooms[] = {t.logits, t.few,  t.x,       t.weight, t.out[0],
                           t.out[1], t.work, t.targets, t.loss,   t.lse};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        td_assert_ok(td_device_free(ops_dev, rooms[i]));
}

int main(void)
{
    int failed = 0;

    ops_open("cuda");
    failed += td_run_tests("gpu", NULL, NULL);
    failed += ops_layout_group();
    failed += ops_gate_group();
    failed += ops_rmsnorm_group();
    failed += ops_softmax_group();
    failed += ops_cross_entropy_group();
    failed += ops_optimizers_group();
    td_device_close(ops_dev);
    return failed != 0;
}
