#include "support/ops_kit.h"

#include "ops/cpu/vexp.h"

TD_TEST(error_is_below_1_02_ulp_at_every_1021st_float)
{
    int64_t checked = 0;

    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 1021) {
        uint32_t low = (uint32_t)bits;
        float x;

        memcpy(&x, &low, sizeof x);
        double truth = exp((double)x);
        float y = td_exp(x);

        if (isnan(x)) {
            assert_true(isnan(y));
        } else if (truth >= 0x1p-126 && (float)truth < INFINITY) {
            double ulps = fabs((double)y - truth) / ldexp(1, ilogb(truth) - 23);

            checked++;
            if (!(ulps <= 1.02))
                fail_msg("td_exp(%a) is %.3f ulp from the truth", (double)x, ulps);
        } else if (truth < 0x1p-126) {
            assert_true(fabs((double)y - truth) < 0x1p-126);
        } else {
            assert_true(y == INFINITY);
        }
    }
    assert_true(checked > 1000000);
}

TD_TEST(ends_of_the_range)
{
    const struct {
        float x, y;
    } rows[] = {
        {0.0f, 1.0f},       {-0.0f, 1.0f},     {-INFINITY, 0.0f},      {INFINITY, INFINITY},
        {-1e30f, 0.0f},     {1e30f, INFINITY}, {-0x1.5d58a0p6f, 0.0f}, {0x1.62e430p6f, INFINITY},
        {-0x1p-149f, 1.0f}, {0x1p-149f, 1.0f}, {-104.0f, 0.0f},        {89.0f, INFINITY},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!(td_exp(rows[i].x) == rows[i].y))
            fail_msg("td_exp(%a) is %a, needs %a", (double)rows[i].x, (double)td_exp(rows[i].x),
                     (double)rows[i].y);
    assert_true(isnan(td_exp(NAN)) && isnan(td_exp(-NAN)));
    /* The last arguments before each end of the range. */
    assert_true(td_exp(0x1.62e42ep6f) < INFINITY && td_exp(0x1.62e42ep6f) > 0x1.fffp127f);
    assert_true(td_exp(-0x1.5d589ep6f) > 0x1.ffep-127f && td_exp(-0x1.5d589ep6f) < 0x1.001p-126f);
}

int ops_exp_group(void)
{
    return td_run_tests("exp", NULL, NULL);
}
