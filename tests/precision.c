/** The accumulation loops bit by bit, the autocast rules compared with results of PyTorch, and every
 * refusal. */
#include "precision/precision.h"

#include "support/compare.h"
#include "support/test.h"

#include <math.h>

/** Fails unless the two are the same double; NaN equals NaN. */
static void assert_same(const char *name, double got, double want)
{
    if (!(got == want || (isnan(got) && isnan(want))))
        fail_msg("%s is %.17g, needs %.17g", name, got, want);
}

static double sum_of(int64_t count, double value, td_dtype addend, td_dtype accumulator, td_sum_method method,
                     int64_t *stalled)
{
    const td_sum_case c = {
        .count = count, .value = value, .addend = addend, .accumulator = accumulator, .method = method};
    double sum = NAN;

    *stalled = -1;
    td_assert_ok(td_precision_sum(&c, &sum, stalled));
    return sum;
}

/* ---- the accumulation loops ---- */

TD_TEST(the_four_loops_of_the_handout)
{
    static const double exact[] = {10.000133514404297, 9.953125, 10.00213623046875, 10.00213623046875};
    static const char *const printed[] = {"10.0001", "9.9531", "10.0021", "10.0021"};

    for (int i = 0; i < 4; i++) {
        td_sum_case c;
        double sum = NAN, again = NAN;
        char text[32];

        memset(&c, 0xFF, sizeof c);
        td_assert_ok(td_precision_handout_case(i, &c));
        assert_int_equal(c.count, 1000);
        td_assert_ok(td_precision_sum(&c, &sum, NULL));
        assert_same(printed[i], sum, exact[i]);
        snprintf(text, sizeof text, "%.4f", sum);
        assert_string_equal(text, printed[i]);
        td_assert_ok(td_precision_sum(&c, &again, NULL));
        assert_same("the second call", again, sum);
    }
}

/* Every value was computed by tensors of PyTorch 2.13, one operation at a time. */
TD_TEST(sums_of_every_dtype)
{
    static const struct {
        td_dtype addend, accumulator;
        int64_t count;
        double value, sequential;
        int64_t stalled;
        double kahan, pairwise;
    } rows[] = {
        {TD_F32, TD_F32, 1000, 0.01, 10.000133514404297, 1000, 10.0, 10.0},
        {TD_F32, TD_F32, 3001, 0.1, 300.1091003417969, 3001, 300.1000061035156, 300.1000061035156},
        {TD_F16, TD_F16, 1000, 0.01, 9.953125, 1000, 10.0, 10.0},
        {TD_F16, TD_F16, 100000, 0.1, 256.0, 2207, 9992.0, 10000.0},
        {TD_F16, TD_F32, 1000, 0.01, 10.00213623046875, 1000, 10.00213623046875, 10.00213623046875},
        {TD_F16, TD_F32, 3001, 0.1, 300.0267333984375, 3001, 300.0267333984375, 300.0267333984375},
        {TD_BF16, TD_BF16, 1000, 0.01, 4.0, 350, 10.0, 10.0},
        {TD_BF16, TD_BF16, 100000, 0.1, 32.0, 276, 8192.0, 9984.0},
        {TD_BF16, TD_F32, 1000, 0.01, 10.009765625, 1000, 10.009765625, 10.009765625},
        {TD_F64, TD_F64, 1000, 0.01, 9.999999999999831, 1000, 10.0, 10.000000000000002},
        {TD_F64, TD_F64, 3001, 0.1, 300.09999999999974, 3001, 300.1, 300.1},
        {TD_F32, TD_F64, 1000, 0.01, 9.999999776482582, 1000, 9.999999776482582, 9.999999776482582},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[64];
        int64_t stalled;

        snprintf(name, sizeof name, "%d times %g, %s into %s", (int)rows[i].count, rows[i].value,
                 td_dtype_name(rows[i].addend), td_dtype_name(rows[i].accumulator));
        assert_same(name,
                    sum_of(rows[i].count, rows[i].value, rows[i].addend, rows[i].accumulator,
                           TD_SUM_SEQUENTIAL, &stalled),
                    rows[i].sequential);
        assert_int_equal(stalled, rows[i].stalled);
        assert_same(
            name,
            sum_of(rows[i].count, rows[i].value, rows[i].addend, rows[i].accumulator, TD_SUM_KAHAN, &stalled),
            rows[i].kahan);
        assert_int_equal(stalled, rows[i].count);
        assert_same(name,
                    sum_of(rows[i].count, rows[i].value, rows[i].addend, rows[i].accumulator, TD_SUM_PAIRWISE,
                           &stalled),
                    rows[i].pairwise);
        assert_int_equal(stalled, rows[i].count);
    }
}

/** The machine's float addition equals TD_F32's. */
TD_TEST(f32_adds_as_the_machine_does)
{
    for (int64_t count = 0; count < 400; count += 7) {
        volatile float sum = 0.0f;
        int64_t stalled;
        for (int64_t i = 0; i < count; i++)
            sum = sum + 0.3f;
        assert_same("f32 loop", sum_of(count, (double)0.3f, TD_F32, TD_F32, TD_SUM_SEQUENTIAL, &stalled),
                    (double)sum);
    }
}

static double halves(td_dtype dtype, double x, int64_t count)
{
    uint16_t bits;
    double sum;

    if (count < 2)
        return count == 0 ? 0.0 : x;
    sum = halves(dtype, x, count / 2) + halves(dtype, x, count - count / 2);
    td_convert(1, TD_F64, &sum, dtype, &bits);
    td_convert(1, dtype, &bits, TD_F64, &sum);
    return sum;
}

TD_TEST(pairwise_is_the_recursion_over_halves)
{
    static const td_dtype dtypes[] = {TD_F16, TD_BF16};

    for (int i = 0; i < 2; i++)
        for (int64_t count = 0; count < 300; count++) {
            int64_t stalled;
            double x = sum_of(1, 0.1, dtypes[i], dtypes[i], TD_SUM_SEQUENTIAL, &stalled);
            assert_same("pairwise", sum_of(count, 0.1, dtypes[i], dtypes[i], TD_SUM_PAIRWISE, &stalled),
                        halves(dtypes[i], x, count));
        }
}

TD_TEST(edges)
{
    static const td_sum_method methods[] = {TD_SUM_SEQUENTIAL, TD_SUM_KAHAN, TD_SUM_PAIRWISE};
    int64_t stalled;

    for (int i = 0; i < 3; i++) {
        assert_same("no addition", sum_of(0, 0.01, TD_F16, TD_F16, methods[i], &stalled), 0.0);
        assert_int_equal(stalled, 0);
        assert_same("one", sum_of(1, 0.01, TD_F16, TD_F16, methods[i], &stalled), 0.01000213623046875);
        assert_int_equal(stalled, 1);
        assert_same("negative", sum_of(8, -0.25, TD_BF16, TD_BF16, methods[i], &stalled), -2.0);
        assert_same("NaN", sum_of(1000, NAN, TD_F16, TD_F32, methods[i], &stalled), NAN);
        assert_same("small integers", sum_of(200, 1.0, TD_BF16, TD_BF16, methods[i], &stalled), 200.0);
    }
    assert_same("zeros", sum_of(1000, 0.0, TD_F32, TD_F32, TD_SUM_SEQUENTIAL, &stalled), 0.0);
    assert_int_equal(stalled, 0);
    assert_same("infinity", sum_of(9, INFINITY, TD_F32, TD_F32, TD_SUM_SEQUENTIAL, &stalled), INFINITY);
    assert_int_equal(stalled, 1);
    /* Beyond f16's largest finite value, 65504, the addend is infinite before the first addition. */
    assert_same("70000 in f16", sum_of(3, 70000, TD_F16, TD_F32, TD_SUM_SEQUENTIAL, &stalled), INFINITY);
    /* 2047 x 32 is 65504, the largest finite value; 65536 is beyond it. */
    assert_same("f16 overflows", sum_of(5000, 32, TD_F16, TD_F16, TD_SUM_SEQUENTIAL, &stalled), INFINITY);
    assert_int_equal(stalled, 2048);
    assert_same("sums end where they stall",
                sum_of(INT64_MAX, 1.0, TD_F32, TD_F32, TD_SUM_SEQUENTIAL, &stalled), 16777216.0);
    assert_int_equal(stalled, 16777216);
    assert_same("pairwise of 2^62", sum_of(INT64_C(1) << 62, 1.0, TD_F32, TD_F32, TD_SUM_PAIRWISE, &stalled),
                0x1p62);
}

/* ---- autocast ---- */

TD_TEST(rules_of_the_lists)
{
    static const struct {
        const char *op;
        td_autocast_rule cpu, cuda;
    } rows[] = {
        {"linear", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"matmul", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"bmm", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"einsum", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER}, /* on the CPU as bmm */
        {"scaled_dot_product_attention", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"linalg_multi_dot", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"chain_matmul", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER},
        {"matrix_power", TD_AUTOCAST_LOWER, TD_AUTOCAST_LOWER}, /* through mm */
        {"tensordot", TD_AUTOCAST_LOWER, TD_AUTOCAST_WIDEST},
        {"inner", TD_AUTOCAST_LOWER, TD_AUTOCAST_WIDEST}, /* through tensordot */
        {"mv", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_LOWER},
        {"dot", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_WIDEST},
        {"mse_loss", TD_AUTOCAST_F32, TD_AUTOCAST_F32},
        {"nll_loss", TD_AUTOCAST_F32, TD_AUTOCAST_F32},
        {"cross_entropy_loss", TD_AUTOCAST_F32, TD_AUTOCAST_F32}, /* on CUDA as nll_loss */
        {"layer_norm", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"rms_norm", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"softmax", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"exp", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"rsqrt", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"pow", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"sum", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_F32},
        {"cat", TD_AUTOCAST_WIDEST, TD_AUTOCAST_TYPE_PROMOTION},
        {"addcmul", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_WIDEST},
        {"relu", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_TYPE_PROMOTION},
        {"mean", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_TYPE_PROMOTION},
        {"binary_cross_entropy", TD_AUTOCAST_F32, TD_AUTOCAST_BANNED},
        {"", TD_AUTOCAST_TYPE_PROMOTION, TD_AUTOCAST_TYPE_PROMOTION},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        td_autocast_rule cpu = (td_autocast_rule)-1, cuda = (td_autocast_rule)-1;
        td_assert_ok(td_autocast_rule_find(TD_AUTOCAST_CPU, rows[i].op, &cpu));
        td_assert_ok(td_autocast_rule_find(TD_AUTOCAST_CUDA, rows[i].op, &cuda));
        if (cpu != rows[i].cpu || cuda != rows[i].cuda)
            fail_msg("%s: %s on the CPU, %s on CUDA", rows[i].op, td_autocast_rule_name(cpu),
                     td_autocast_rule_name(cuda));
    }
}

TD_TEST(lists_are_found_entry_by_entry)
{
    static const td_autocast_device devices[] = {TD_AUTOCAST_CPU, TD_AUTOCAST_CUDA};
    static const int64_t sizes[] = {115, 111};

    for (int d = 0; d < 2; d++) {
        assert_int_equal(td_autocast_list_size(devices[d]), sizes[d]);
        for (int64_t i = 0; i < sizes[d]; i++) {
            const char *op = NULL, *other = NULL;
            td_autocast_rule rule, found;
            td_assert_ok(td_autocast_list_entry(devices[d], i, &op, &rule));
            td_assert_ok(td_autocast_rule_find(devices[d], op, &found));
            assert_int_equal(found, rule);
            for (int64_t j = 0; j < i; j++) { /* no name occurs twice */
                td_assert_ok(td_autocast_list_entry(devices[d], j, &other, &rule));
                assert_string_not_equal(op, other);
            }
        }
    }
    assert_int_equal(td_autocast_list_size((td_autocast_device)2), 0);
}

/* PyTorch 2.13's results on the CPU for two tensors of these dtypes; "-" if it raised an error. */
TD_TEST(results_of_two_inputs)
{
    static const struct {
        td_dtype a, b;
        const char *cat[2], *mse[2], *add; /* under bf16 and under f16 */
    } rows[] = {
        {TD_F64, TD_F64, {"f64", "f64"}, {"f64", "f64"}, "f64"},
        {TD_F64, TD_F32, {"f64", "f64"}, {"f64", "f64"}, "f64"},
        {TD_F64, TD_F16, {"-", "f64"}, {"f64", "f64"}, "f64"},
        {TD_F64, TD_BF16, {"f64", "-"}, {"f64", "f64"}, "f64"},
        {TD_F32, TD_F32, {"f32", "f32"}, {"f32", "f32"}, "f32"},
        {TD_F32, TD_F16, {"f32", "f32"}, {"f32", "f32"}, "f32"},
        {TD_F32, TD_BF16, {"f32", "f32"}, {"f32", "f32"}, "f32"},
        {TD_F16, TD_F32, {"-", "f32"}, {"f32", "f32"}, "f32"},
        {TD_F16, TD_F16, {"-", "f16"}, {"f32", "f32"}, "f16"},
        {TD_F16, TD_BF16, {"-", "-"}, {"f32", "f32"}, "f32"},
        {TD_BF16, TD_F64, {"f64", "-"}, {"f64", "f64"}, "f64"},
        {TD_BF16, TD_F32, {"f32", "-"}, {"f32", "f32"}, "f32"},
        {TD_BF16, TD_F16, {"-", "-"}, {"f32", "f32"}, "f32"},
        {TD_BF16, TD_BF16, {"bf16", "-"}, {"f32", "f32"}, "bf16"},
    };
    static const td_dtype lows[] = {TD_BF16, TD_F16};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int low = 0; low < 2; low++) {
            const td_dtype inputs[] = {rows[i].a, rows[i].b};
            td_dtype out = (td_dtype)-1;

            if (strcmp(rows[i].cat[low], "-") == 0) {
                td_assert_refused(td_autocast_result(TD_AUTOCAST_CPU, lows[low], "cat", 2, inputs, &out),
                                  TD_UNSUPPORTED, "cannot promote input");
            } else {
                td_assert_ok(td_autocast_result(TD_AUTOCAST_CPU, lows[low], "cat", 2, inputs, &out));
                assert_string_equal(td_dtype_name(out), rows[i].cat[low]);
            }
            td_assert_ok(td_autocast_result(TD_AUTOCAST_CPU, lows[low], "mse_loss", 2, inputs, &out));
            assert_string_equal(td_dtype_name(out), rows[i].mse[low]);
            td_assert_ok(td_autocast_result(TD_AUTOCAST_CPU, lows[low], "add", 2, inputs, &out));
            assert_string_equal(td_dtype_name(out), rows[i].add);
            if (rows[i].a != TD_F64 && rows[i].b != TD_F64) {
                td_assert_ok(td_autocast_result(TD_AUTOCAST_CUDA, lows[low], "matmul", 2, inputs, &out));
                assert_int_equal(out, lows[low]);
            }
        }
}

TD_TEST(toy_model)
{
    static const char *const names[] = {"parameters", "fc1", "relu", "ln", "logits", "loss", "gradients"};
    static const struct {
        td_autocast_device device;
        const char *loss;
        const char *want; /* l: the low precision, 3: f32 */
    } rows[] = {
        {TD_AUTOCAST_CUDA, "cross_entropy_loss", "3ll3l33"},
        {TD_AUTOCAST_CUDA, "mse_loss", "3ll3l33"},
        {TD_AUTOCAST_CUDA, "mean", "3ll3ll3"},
        {TD_AUTOCAST_CPU, "cross_entropy_loss", "3llll33"},
        {TD_AUTOCAST_CPU, "mse_loss", "3llll33"},
        {TD_AUTOCAST_CPU, "mean", "3lllll3"},
    };
    static const td_dtype lows[] = {TD_BF16, TD_F16};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int low = 0; low < 2; low++) {
            td_toy_component got[8];
            int64_t count = -1;

            memset(got, 0xFF, sizeof got);
            td_assert_ok(td_autocast_toy_model(rows[i].device, lows[low], rows[i].loss, got, &count));
            assert_int_equal(count, 7);
            for (int64_t j = 0; j < count; j++) {
                assert_string_equal(got[j].name, names[j]);
                if (got[j].dtype != (rows[i].want[j] == 'l' ? lows[low] : TD_F32))
                    fail_msg("%s under %s, loss %s: %s", names[j], td_dtype_name(lows[low]), rows[i].loss,
                             td_dtype_name(got[j].dtype));
            }
        }
}

TD_TEST(refused_autocast)
{
    const td_dtype f32 = TD_F32;
    td_dtype out = TD_F64;

    td_assert_refused(td_autocast_result(TD_AUTOCAST_CUDA, TD_F16, "binary_cross_entropy", 1, &f32, &out),
                      TD_UNSUPPORTED, "op is binary_cross_entropy, which autocast refuses");
    assert_int_equal(out, TD_F64);
}

TD_MAIN("precision", NULL, NULL)
