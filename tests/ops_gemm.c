#include "device/sms.h"
#include "support/ops_kit.h"

#include <dnnl.h>
#include <omp.h>

/* This program has these functions instead of the library's: calls that fail, and a processor without bf16
 * GEMMs. */
static dnnl_status_t sgemm_fails = dnnl_success, create_fails = dnnl_success, execute_fails = dnnl_success;
static bool without_bf16;
static int sgemm_calls;

dnnl_status_t __real_dnnl_sgemm(char trans_a, char trans_b, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k,
                                float alpha, const float *a, dnnl_dim_t lda, const float *b, dnnl_dim_t ldb,
                                float beta, float *c, dnnl_dim_t ldc);
dnnl_status_t __wrap_dnnl_sgemm(char trans_a, char trans_b, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k,
                                float alpha, const float *a, dnnl_dim_t lda, const float *b, dnnl_dim_t ldb,
                                float beta, float *c, dnnl_dim_t ldc)
{
#pragma omp atomic
    sgemm_calls++;
    if (sgemm_fails != dnnl_success)
        return sgemm_fails;
    return __real_dnnl_sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

dnnl_status_t __real_dnnl_primitive_create(dnnl_primitive_t *primitive, const_dnnl_primitive_desc_t desc);
dnnl_status_t __wrap_dnnl_primitive_create(dnnl_primitive_t *primitive, const_dnnl_primitive_desc_t desc)
{
    return create_fails != dnnl_success ? create_fails : __real_dnnl_primitive_create(primitive, desc);
}

dnnl_status_t __real_dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream, int count,
                                            const dnnl_exec_arg_t *args);
dnnl_status_t __wrap_dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream, int count,
                                            const dnnl_exec_arg_t *args)
{
    if (execute_fails != dnnl_success)
        return execute_fails;
    return __real_dnnl_primitive_execute(primitive, stream, count, args);
}

dnnl_cpu_isa_t __real_dnnl_get_effective_cpu_isa(void);
dnnl_cpu_isa_t __wrap_dnnl_get_effective_cpu_isa(void)
{
    return without_bf16 ? dnnl_cpu_isa_avx2 : __real_dnnl_get_effective_cpu_isa();
}

/* The processor's instructions that oneDNN uses. ONEDNN_MAX_CPU_ISA can make them fewer than the processor
 * has. */
static bool has_bf16(void)
{
    return ((unsigned)__real_dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) ==
           dnnl_cpu_isa_avx512_core_bf16;
}

/* How numbers are multiplied. bf16 is tested on processors without bf16 GEMMs too. */
typedef struct product {
    char name[32];
    td_dtype dtype;
    bool without_bf16;
} product;

static const product products[] = {
    {"bf16", TD_BF16, false}, {"bf16 without bf16 products", TD_BF16, true}, {"f32", TD_F32, false}};
enum { PRODUCTS = sizeof products / sizeof *products, BF16_PRODUCTS = 2 };

/* Types and orders of a GEMM's matrices. */
typedef struct variant {
    const char *name;
    td_dtype dtype, out_dtype;
    bool trans_a, trans_b;
} variant;

static const variant variants[] = {
    {"f32", TD_F32, TD_F32, false, false},
    {"f32, a transposed", TD_F32, TD_F32, true, false},
    {"f32, b transposed", TD_F32, TD_F32, false, true},
    {"f32, both transposed", TD_F32, TD_F32, true, true},
    {"bf16", TD_BF16, TD_BF16, false, false},
    {"bf16, a transposed", TD_BF16, TD_BF16, true, false},
    {"bf16, b transposed", TD_BF16, TD_BF16, false, true},
    {"bf16, both transposed", TD_BF16, TD_BF16, true, true},
    {"bf16 to f32", TD_BF16, TD_F32, false, false},
    {"bf16 to f32, a transposed", TD_BF16, TD_F32, true, false},
    {"bf16 to f32, b transposed", TD_BF16, TD_F32, false, true},
    {"bf16 to f32, both transposed", TD_BF16, TD_F32, true, true},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* One matrix of a batch with its layout in memory. */
typedef struct layout {
    int64_t rows, cols, pitch, stride, count;
} layout;

static layout lay(int64_t batch, int64_t rows, int64_t cols, int64_t more, int64_t gap)
{
    layout l = {.rows = rows, .cols = cols, .pitch = cols + more, .stride = rows * (cols + more) + gap};

    l.count = batch * l.stride;
    return l;
}

/* Integers from -3 to 3 at the elements, poison between them. */
static void *draw_integers(ops_case *c, td_dtype dtype, int64_t batch, layout l)
{
    int64_t *drawn = ops_draw_ids(c, l.count, 7);
    char *block = ops_room(c, dtype, l.count);
    float *values = malloc((size_t)l.count * sizeof *values);

    assert_non_null(values);
    for (int64_t i = 0; i < l.count; i++)
        values[i] = (float)(drawn[i] - 3);
    for (int64_t row = 0; row < batch * l.rows; row++) {
        const int64_t at = row / l.rows * l.stride + row % l.rows * l.pitch;

        td_assert_ok(
            td_convert(l.cols, TD_F32, values + at, dtype, block + (size_t)at * td_dtype_size(dtype)));
    }
    free(values);
    return block;
}

/* Replaces the elements of c, in float64, but not the memory between them. */
TD_TRUTH static void reference(const td_gemm_shape *s, const double *a, const double *b, double *c)
{
    for (int64_t batch = 0; batch < s->batch; batch++)
        for (int64_t i = 0; i < s->m; i++)
            for (int64_t j = 0; j < s->n; j++) {
                const double *x = a + batch * s->stride_a, *y = b + batch * s->stride_b;
                double *z = c + batch * s->stride_c + i * s->ldc + j;
                double sum = 0;

                for (int64_t l = 0; l < s->k; l++)
                    sum += x[s->trans_a ? l * s->lda + i : i * s->lda + l] *
                           y[s->trans_b ? j * s->ldb + l : l * s->ldb + j];
                *z = s->alpha * sum + (s->beta == 0 ? 0 : s->beta * *z);
            }
}

static void *work_for(ops_case *c, const td_gemm_shape *shape)
{
    size_t bytes = 1;

    td_assert_ok(td_gemm_work_bytes(ops_dev, shape, &bytes));
    return ops_bytes(c, bytes);
}

typedef struct exact_case {
    char name[64];
    int64_t batch, m, n, k;
    float alpha, beta;
    int64_t more, gap; /* elements after each row, and after each matrix */
} exact_case;

/* Small integers have one right answer for any order of the sums, and bf16 output rounds it once. Poison lies
 * after every row and every matrix. If it is read, the result shows it; if it is written, the comparison
 * finds it. */
static void integers_are_exact(void **state)
{
    const exact_case *row = *state;

    for (const variant *v = variants; v < variants + VARIANTS; v++) {
        const td_dtype dtype = v->dtype, out_dtype = v->out_dtype;
        ops_case c = ops_begin(dtype, "%s, %s", row->name, v->name);
        layout a = v->trans_a ? lay(row->batch, row->k, row->m, row->more, row->gap)
                              : lay(row->batch, row->m, row->k, row->more, row->gap);
        layout b = v->trans_b ? lay(row->batch, row->n, row->k, 2 * row->more, row->gap)
                              : lay(row->batch, row->k, row->n, 2 * row->more, row->gap);
        layout out = lay(row->batch, row->m, row->n, 3 * row->more, row->gap);
        td_gemm_shape shape = {
            .batch = row->batch,
            .m = row->m,
            .n = row->n,
            .k = row->k,
            .lda = row->more ? a.pitch : 0,
            .ldb = row->more ? b.pitch : 0,
            .ldc = row->more ? out.pitch : 0,
            .stride_a = a.stride,
            .stride_b = b.stride,
            .stride_c = out.stride,
            .trans_a = v->trans_a,
            .trans_b = v->trans_b,
            .alpha = row->alpha,
            .beta = row->beta,
            .dtype = dtype,
            .out_dtype = out_dtype,
        };
        td_gemm_shape full = shape;
        void *x = draw_integers(&c, dtype, row->batch, a), *y = draw_integers(&c, dtype, row->batch, b);
        void *before = row->beta != 0 ? draw_integers(&c, out_dtype, row->batch, out)
                                      : ops_room(&c, out_dtype, out.count);
        void *z = ops_room(&c, out_dtype, out.count), *want = ops_room(&c, out_dtype, out.count);
        double *truth = ops_f64(&c, out_dtype, before, out.count);

        full.lda = a.pitch;
        full.ldb = b.pitch;
        full.ldc = out.pitch;
        reference(&full, ops_f64(&c, dtype, x, a.count), ops_f64(&c, dtype, y, b.count), truth);
        memcpy(want, before, (size_t)out.count * td_dtype_size(out_dtype));
        for (int64_t i = 0; i < out.count; i++)
            if (!isnan(truth[i]))
                td_assert_ok(td_convert(1, TD_F64, &truth[i], out_dtype,
                                        (char *)want + (size_t)i * td_dtype_size(out_dtype)));
        OPS_RUN(&c, out_dtype, z, out.count, before, td_gemm(ops_dev, &shape, x, y, z, work_for(&c, &shape)));
        td_assert_identical(c.name, out_dtype, z, want, out.count);
        ops_finish(&c);
    }
}

/* The heads of a token are neighbours, so the matrices of c interleave row by row. */
TD_TEST(interleaved_output)
{
    enum { HEADS = 3, SEQ = 130, DIM = 64, K = 26 };
    ops_case c = ops_begin(TD_BF16, "interleaved output");
    layout a = lay(HEADS, SEQ, K, 0, 0), b = lay(HEADS, K, DIM, 0, 0);
    td_gemm_shape shape = {
        .batch = HEADS,
        .m = SEQ,
        .n = DIM,
        .k = K,
        .lda = K,
        .ldb = DIM,
        .ldc = HEADS * DIM,
        .stride_a = a.stride,
        .stride_b = b.stride,
        .stride_c = DIM,
        .alpha = 1,
        .dtype = TD_BF16,
        .out_dtype = TD_BF16,
    };
    void *x = draw_integers(&c, TD_BF16, HEADS, a), *y = draw_integers(&c, TD_BF16, HEADS, b);
    void *z = ops_room(&c, TD_BF16, HEADS * SEQ * DIM);
    double *truth = ops_zeros(&c, HEADS * SEQ * DIM);

    reference(&shape, ops_f64(&c, TD_BF16, x, a.count), ops_f64(&c, TD_BF16, y, b.count), truth);
    OPS_RUN(&c, TD_BF16, z, HEADS * SEQ * DIM, NULL, td_gemm(ops_dev, &shape, x, y, z, work_for(&c, &shape)));
    for (int i = 0; i < HEADS * SEQ * DIM; i++)
        assert_true(td_value_at(TD_BF16, z, i) == truth[i]);
    ops_finish(&c);
}

/* 257 + 2 is 259, a tie that is rounded to 260. If 257 were rounded to 256 before the addition, the result
 * would be 258. */
TD_TEST(bf16_output_is_rounded_once)
{
    ops_case c = ops_begin(TD_BF16, "rounded once");
    td_gemm_shape shape = {
        .batch = 1, .m = 1, .n = 1, .k = 257, .alpha = 1, .beta = 1, .dtype = TD_BF16, .out_dtype = TD_BF16};
    float one = 1, two = 2;
    char *ones = ops_room(&c, TD_BF16, 257);
    void *out = ops_room(&c, TD_BF16, 1);

    for (int i = 0; i < 257; i++)
        td_assert_ok(td_convert(1, TD_F32, &one, TD_BF16, ones + 2 * i));
    td_assert_ok(td_convert(1, TD_F32, &two, TD_BF16, out));
    td_assert_ok(td_gemm(ops_dev, &shape, ones, ones, out, work_for(&c, &shape)));
    assert_true(td_value_at(TD_BF16, out, 0) == 260);
    ops_finish(&c);
}

static void nan_and_infinity_travel(void **state)
{
    enum { M = 133, N = 117, K = 119 };
    const product *p = *state;
    ops_case c = ops_begin(p->dtype, "nan %s", p->name);
    td_gemm_shape shape = {
        .batch = 1, .m = M, .n = N, .k = K, .alpha = 1, .dtype = c.dtype, .out_dtype = c.dtype};
    char *a = ops_draw(&c, M * K), *b = ops_draw(&c, K * N);
    void *out = ops_room(&c, c.dtype, M * N);
    size_t size = td_dtype_size(c.dtype);
    float nan = NAN, infinity = INFINITY;

    without_bf16 = p->without_bf16;
    td_assert_ok(td_convert(1, TD_F32, &nan, c.dtype, a + (5 * K + 3) * size));
    td_assert_ok(td_convert(1, TD_F32, &infinity, c.dtype, b + (7 * N + 2) * size));
    td_assert_ok(td_gemm(ops_dev, &shape, a, b, out, work_for(&c, &shape)));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double value = td_value_at(c.dtype, out, i * N + j);

            if (i == 5)
                assert_true(isnan(value));
            else if (j == 2)
                assert_true(isinf(value) && signbit(value) == signbit(td_value_at(c.dtype, a, i * K + 7)));
            else
                assert_true(isfinite(value));
        }
    without_bf16 = false;
    ops_finish(&c);
}

/* Three outer products of 23 MB each in f32: more than one copy moves at a time, and fewer slots than
 * threads. */
TD_TEST(large_bf16_matrices_take_turns)
{
    enum { BATCH = 3, SIDE = 2400 };
    ops_case c = ops_begin(TD_BF16, "large matrices");
    layout side = lay(BATCH, SIDE, 1, 0, 0);
    td_gemm_shape shape = {
        .batch = BATCH,
        .m = SIDE,
        .n = SIDE,
        .k = 1,
        .stride_a = SIDE,
        .stride_b = SIDE,
        .stride_c = (int64_t)SIDE * SIDE,
        .alpha = 1,
        .dtype = TD_BF16,
        .out_dtype = TD_BF16,
    };
    uint16_t *x = draw_integers(&c, TD_BF16, BATCH, side), *y = draw_integers(&c, TD_BF16, BATCH, side);
    uint16_t *z = ops_room(&c, TD_BF16, (int64_t)BATCH * SIDE * SIDE);
    double *a = ops_f64(&c, TD_BF16, x, BATCH * SIDE), *b = ops_f64(&c, TD_BF16, y, BATCH * SIDE);
    size_t bytes;

    td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &bytes));
    assert_in_range(bytes, 1, 80 << 20);
    td_assert_ok(td_cpu_set_threads(3));
    td_assert_ok(td_gemm(ops_dev, &shape, x, y, z, work_for(&c, &shape)));
    for (int64_t m = 0; m < BATCH; m++)
        for (int64_t i = 0; i < SIDE; i++)
            for (int64_t j = 0; j < SIDE; j += 7) {
                uint32_t bits = (uint32_t)z[(m * SIDE + i) * SIDE + j] << 16;
                float got;

                memcpy(&got, &bits, sizeof got);
                if (!((double)got == a[m * SIDE + i] * b[m * SIDE + j]))
                    fail_msg("c[%d][%d][%d] is %g", (int)m, (int)i, (int)j, (double)got);
            }
    ops_finish(&c);
}

/* A GEMM of ones that all threads share: every element of c is WIDE_K. */
enum { WIDE_M = 256, WIDE_N = 384, WIDE_K = 768 };

typedef struct wide {
    ops_case c;
    td_gemm_shape shape;
    void *ones;
    float *out;
    void *work;
} wide;

static wide wide_begin(td_dtype dtype, const char *name)
{
    wide w = {.c = ops_begin(dtype, "wide, %s", name),
              .shape = {.batch = 1,
                        .m = WIDE_M,
                        .n = WIDE_N,
                        .k = WIDE_K,
                        .trans_b = true,
                        .alpha = 1,
                        .dtype = dtype,
                        .out_dtype = TD_F32}};
    const int64_t count = (int64_t)WIDE_N * WIDE_K;
    double *values = ops_zeros(&w.c, count);

    for (int64_t i = 0; i < count; i++)
        values[i] = 1;
    w.ones = ops_room(&w.c, dtype, count);
    td_assert_ok(td_convert(count, TD_F64, values, dtype, w.ones));
    w.out = ops_room(&w.c, TD_F32, (int64_t)WIDE_M * WIDE_N);
    w.work = work_for(&w.c, &w.shape);
    return w;
}

static td_status wide_run(const wide *w)
{
    td_fence_poison(w->out);
    return td_gemm(ops_dev, &w->shape, w->ones, w->ones, w->out, w->work);
}

static void assert_whole(const wide *w)
{
    for (int64_t i = 0; i < (int64_t)WIDE_M * WIDE_N; i++)
        if (!(w->out[i] == WIDE_K))
            fail_msg("%s: c[%d][%d] is %g", w->c.name, (int)(i / WIDE_N), (int)(i % WIDE_N),
                     (double)w->out[i]);
}

/* If OpenMP gives oneDNN fewer threads than it asked for, the missing threads' parts of c are not
 * computed. */
static void a_product_is_whole_on_fewer_threads_than_asked_for(void **state)
{
    enum { MANY = 4 };
    const product *p = *state;
    const int levels = omp_get_max_active_levels();
    td_status status = TD_BAD_STATE;

    td_assert_ok(td_cpu_set_threads(MANY));
    wide w = wide_begin(p->dtype, p->name);
    without_bf16 = p->without_bf16;
#pragma omp parallel num_threads(2)
#pragma omp single
    status = wide_run(&w);
    td_assert_ok(status);
    assert_whole(&w);

    omp_set_dynamic(1);
    status = wide_run(&w);
    omp_set_dynamic(0);
    td_assert_ok(status);
    assert_whole(&w);

    omp_set_max_active_levels(0);
    status = wide_run(&w);
    omp_set_max_active_levels(levels);
    td_assert_ok(status);
    assert_whole(&w);
    assert_int_equal(td_cpu_threads(), MANY);
    without_bf16 = false;
    td_assert_ok(td_cpu_set_threads(3));
    ops_finish(&w.c);
}

/* If the scratch is too small for all threads, fewer threads multiply. */
TD_TEST(many_threads_share_the_scratch)
{
    wide w = wide_begin(TD_BF16, "many threads");

    td_assert_ok(td_cpu_set_threads(64));
    sgemm_calls = 0;
    td_assert_ok(wide_run(&w));
    assert_whole(&w);
    assert_int_equal(sgemm_calls == 0, has_bf16());
    assert_int_equal(td_cpu_threads(), 64);
    td_assert_ok(td_cpu_set_threads(3));
    ops_finish(&w.c);
}

TD_TEST(what_onednn_refuses_is_multiplied_in_f32)
{
    wide w = wide_begin(TD_BF16, "refused");

    create_fails = dnnl_unimplemented;
    sgemm_calls = 0;
    td_assert_ok(wide_run(&w));
    create_fails = dnnl_success;
    assert_true(sgemm_calls > 0);
    assert_whole(&w);
    ops_finish(&w.c);
}

TD_TEST(a_failing_bf16_product_is_reported)
{
    wide w = wide_begin(TD_BF16, "failing");

    execute_fails = dnnl_runtime_error;
    if (has_bf16()) {
        td_assert_refused(wide_run(&w), TD_LIBRARY_ERROR, "oneDNN's matmul of");
        td_assert_refused(wide_run(&w), TD_LIBRARY_ERROR, "runtime_error");
    } else {
        td_assert_ok(wide_run(&w));
    }
    execute_fails = dnnl_success;
    td_assert_ok(wide_run(&w));
    assert_whole(&w);
    ops_finish(&w.c);
}

/* The processor's bf16 GEMMs treat subnormals as 0, and f32 GEMMs keep them. Both keep normal numbers. */
static void subnormal_inputs_count_in_full_or_as_zero(void **state)
{
    const product *p = *state;
    wide w = wide_begin(p->dtype, p->name);
    const uint16_t smallest = 1;
    uint16_t *row = w.ones; /* the first of both operands */
    float tiny;

    td_assert_ok(td_convert(1, TD_BF16, &smallest, TD_F32, &tiny));
    for (int i = 0; i < WIDE_K; i++)
        row[i] = smallest;
    without_bf16 = p->without_bf16;
    td_assert_ok(wide_run(&w));
    for (int64_t i = 0; i < (int64_t)WIDE_M * WIDE_N; i++) {
        const float whole = i == 0 ? 0.0f : i / WIDE_N == 0 || i % WIDE_N == 0 ? tiny * WIDE_K : WIDE_K;
        if (whole == WIDE_K || without_bf16 || !has_bf16())
            assert_true(w.out[i] == whole);
        else
            assert_true(w.out[i] == whole || w.out[i] == 0.0f);
    }
    without_bf16 = false;
    ops_finish(&w.c);
}

/* Random shapes, each also with one extent larger. A model's plan measures only its largest step. */
TD_TEST(scratch_grows_with_every_extent)
{
    enum { SHAPES = 20000 };
    ops_case c = ops_begin(TD_BF16, "scratch grows");
    const int64_t *drawn = ops_draw_ids(&c, SHAPES * 9, 1 << 20);

    for (int i = 0; i < SHAPES; i++) {
        const int64_t *d = drawn + (ptrdiff_t)i * 9;
        /* Uniform over the orders of magnitude, up to 4096. */
        td_gemm_shape shape = {.batch = 1 + d[0] % 1000 % (1 << d[1] % 13),
                               .m = 1 + d[1] / 13 % (1 << d[2] % 13),
                               .n = 1 + d[2] / 13 % (1 << d[3] % 13),
                               .k = 1 + d[3] / 13 % (1 << d[4] % 13),
                               .dtype = TD_BF16,
                               .out_dtype = d[5] % 2 ? TD_BF16 : TD_F32,
                               .alpha = 1};
        int64_t *const extents[] = {&shape.batch, &shape.m, &shape.n, &shape.k};
        size_t smaller, larger;

        shape.stride_a = d[6] % 4 ? 1 : 0;
        shape.stride_b = d[7] % 4 ? 1 : 0;
        shape.stride_c = 1;
        td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &smaller));
        *extents[d[8] % 4] += 1 + d[8] / 4 % 17;
        td_assert_ok(td_gemm_work_bytes(ops_dev, &shape, &larger));
        if (larger < smaller)
            fail_msg("%d x %d x %d x %d takes %zu bytes, with extent %d smaller %zu", (int)shape.batch,
                     (int)shape.m, (int)shape.n, (int)shape.k, larger, (int)(d[8] % 4), smaller);
    }
    ops_finish(&c);
}

TD_TEST(a_failing_library_is_reported)
{
    float a[4] = {1, 2, 3, 4}, c[4];
    td_gemm_shape shape = {.batch = 4,
                           .m = 1,
                           .n = 1,
                           .k = 1,
                           .stride_a = 1,
                           .stride_b = 1,
                           .stride_c = 1,
                           .alpha = 1,
                           .dtype = TD_F32,
                           .out_dtype = TD_F32};

    sgemm_fails = dnnl_out_of_memory;
    td_assert_refused(td_gemm(ops_dev, &shape, a, a, c, NULL), TD_LIBRARY_ERROR, "dnnl_sgemm of 1 x 1 x 1");
    td_assert_refused(td_gemm(ops_dev, &shape, a, a, c, NULL), TD_LIBRARY_ERROR, "out_of_memory");
    sgemm_fails = dnnl_success;
    td_assert_ok(td_gemm(ops_dev, &shape, a, a, c, NULL));
    assert_true(c[0] == 1 && c[1] == 4 && c[2] == 9 && c[3] == 16);
}

static const exact_case exact_cases[] = {
    {"exact one", 1, 1, 1, 1, 1, 0, 0, 0},
    {"exact row by column", 1, 1, 1, 37, 1, 0, 3, 0},
    {"exact row", 2, 1, 31, 17, 1, 0, 0, 0},
    {"exact column", 2, 31, 1, 17, 2, 1, 1, 5},
    {"exact outer product", 1, 13, 17, 1, 1, -1, 0, 0},
    {"exact below a vector", 3, 15, 15, 15, 1, 1, 0, 3},
    {"exact a vector", 2, 16, 16, 16, 2, 0, 0, 0},
    {"exact above a vector", 2, 17, 17, 17, 1, 2, 5, 1},
    {"exact primes", 3, 37, 53, 29, 1, 0, 2, 7},
    {"exact head dim 80", 4, 33, 80, 65, 1, 1, 0, 0},
    {"exact pieces for each thread", 1, 161, 401, 101, 1, 1, 3,
     0}, /* 6.5 million multiplications: cut in three */
    {"exact dense for each thread", 1, 161, 401, 101, 2, 0, 0, 0},
    {"exact dense batch", 5, 65, 97, 131, 1, 1, 0, 0},
    {"exact many terms", 1, 33, 65, 4099, 1, 0, 0, 0},
    {"exact one term short of 64", 4, 452, 4, 63, 1, 0, 0, 0},
    {"exact nothing", 2, 33, 130, 16, 0, 0, 5, 3},
    {"exact nothing but c", 2, 33, 130, 16, 0, 2, 5, 3},
};

int ops_gemm_group(void)
{
    int failed;

    without_bf16 = true;
    failed = ops_run_cases("gemm, exact, without bf16 products", exact_cases,
                           sizeof exact_cases / sizeof *exact_cases, sizeof *exact_cases, integers_are_exact);
    without_bf16 = false;
    return failed +
           ops_run_cases("gemm, exact", exact_cases, sizeof exact_cases / sizeof *exact_cases,
                         sizeof *exact_cases, integers_are_exact) +
           ops_run_cases("gemm, nan and infinity travel", products, PRODUCTS, sizeof *products,
                         nan_and_infinity_travel) +
           ops_run_cases("gemm, a product is whole on fewer threads than asked for", products, PRODUCTS,
                         sizeof *products, a_product_is_whole_on_fewer_threads_than_asked_for) +
           ops_run_cases("gemm, subnormal inputs count in full or as zero", products, BF16_PRODUCTS,
                         sizeof *products, subnormal_inputs_count_in_full_or_as_zero) +
           td_run_tests("gemm", NULL, NULL);
}
