/* The operations on a GPU: the groups of test_ops, and what only a GPU has. */
#include "ops_kit.h"

/* A captured update sees the learning rate that was uploaded and the step that was counted since. */
static void a_replayed_update_goes_on(void **state)
{
    enum { N = 1009, STEPS = 3 };
    ops_case c = ops_begin(TD_F32, "replayed update");
    td_adamw given = {.variant = TD_ADAMW_TORCH, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    td_adamw *adamw = ops_bytes(&c, sizeof *adamw);
    float *p = ops_draw(&c, N), *g = ops_draw(&c, N), *m = ops_room(&c, TD_F32, N),
          *v = ops_room(&c, TD_F32, N);
    float *p_plain = ops_copy(&c, TD_F32, p, N), *m_plain = ops_room(&c, TD_F32, N),
          *v_plain = ops_room(&c, TD_F32, N);
    td_adamw_tensors t = {.count = N, .dtype = TD_F32, .p = on(p), .g = on(g), .m = on(m), .v = on(v)};
    td_graph *graph = NULL;

    (void)state;
    for (int i = 0; i < N; i++)
        m[i] = v[i] = m_plain[i] = v_plain[i] = 0;
    *adamw = given;
    ops_upload();
    td_assert_ok(td_graph_begin(ops_dev));
    td_assert_ok(td_adamw_advance(ops_dev, on(adamw)));
    td_assert_ok(td_adamw_update(ops_dev, on(adamw), true, &t));
    td_assert_ok(td_graph_end(ops_dev, &graph));
    for (given.step = 1; given.step <= STEPS; given.step++) {
        given.lr /= 2;
        td_assert_ok(td_device_upload(ops_dev, on(&adamw->lr), &given.lr, sizeof given.lr));
        td_assert_ok(td_graph_launch(graph));
        td_assert_ok(td_adamw_step(ops_dev, &given, N, TD_F32, on(p_plain), on(g), on(m_plain), on(v_plain)));
    }
    ops_download();
    assert_int_equal(adamw->step, STEPS);
    td_assert_identical("p", TD_F32, p, p_plain, N);
    td_graph_destroy(graph);
    ops_finish(&c);
}

/* What is kept of a product is bounded: after a thousand others it is forgotten. A graph that has captured it replays, and it is
 * found again, with the same bits. */
static void a_captured_product_outlives_what_is_kept_of_it(void **state)
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

    (void)state;
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

/* Vectors are 16 bytes: tensors that begin beside them give the same bits. */
static void tensors_may_begin_anywhere(void **state)
{
    enum { ROWS = 5, COLS = 80, ALL = ROWS * COLS };

    (void)state;
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

int main(void)
{
    const struct CMUnitTest gpu_tests[] = {
        cmocka_unit_test(a_replayed_update_goes_on),
        cmocka_unit_test(a_captured_product_outlives_what_is_kept_of_it),
        cmocka_unit_test(tensors_may_begin_anywhere),
    };
    int failed = 0;

    ops_open("cuda");
    failed += cmocka_run_group_tests_name("gpu", gpu_tests, NULL, NULL);
    failed += ops_layout_group();
    failed += ops_gate_group();
    failed += ops_rmsnorm_group();
    failed += ops_softmax_group();
    failed += ops_cross_entropy_group();
    failed += ops_optimizers_group();
    failed += ops_linear_adamw_group();
    td_device_close(ops_dev);
    return failed != 0;
}
