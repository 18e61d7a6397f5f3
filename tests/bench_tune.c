/* The number of SMs that a benchmark chooses for the update. A double replaces the steps that it times. */
#include "base/check.h"
#include "bench/bench.h"
#include "ops/ops.h"
#include "support/compare.h"
#include "support/test.h"

static const td_bench_config config = {
    .mode = TD_BENCH_TRAIN, .timed = TD_TIMED_WHOLE, .warmup = 50, .steps = 500, .overlap = true};
/* fastest, last, fails_at: SMs, SMs of the last run, number of the run that fails (0: none) */
static int32_t fastest, last, runs, fails_at;
static bool has_sms;

bool __wrap_td_update_has_sms(td_device *dev)
{
    (void)dev;
    return has_sms;
}

td_status __wrap_td_bench_run(td_device *dev, const td_bench_config *with, td_bench_progress progress,
                              void *user, td_bench_result **out)
{
    (void)dev, (void)progress, (void)user;
    assert_true(with->mode == TD_BENCH_TRAIN && with->timed == TD_TIMED_WHOLE && with->steps < 50);
    assert_int_equal(with->overlap, with->update_sms > 0);
    last = with->update_sms;
    *out = NULL;
    return ++runs == fails_at ? td_fail(TD_NO_MEMORY, "run %d was told to fail", (int)runs) : TD_OK;
}

td_status __wrap_td_bench_summary_of(const td_bench_result *result, td_bench_summary *out)
{
    (void)result;
    *out = (td_bench_summary){.step.ms = {.n = 5, .median = 10 + abs(last - fastest)}};
    return TD_OK;
}

TD_BODY(the_fastest_number_is_chosen)
{
    td_device *dev;
    int32_t sms;

    td_assert_ok(td_device_open("cpu", &dev));
    has_sms = true;
    for (fastest = 0; fastest <= 32; fastest += fastest > 0 ? 4 : 8) {
        td_assert_ok(td_bench_tune(dev, &config, &sms));
        assert_int_equal(sms, fastest);
    }
    for (fails_at = 1, runs = 0; fails_at <= 8; fails_at++, runs = 0) {
        td_assert_refused(td_bench_tune(dev, &config, &sms), TD_NO_MEMORY, "was told to fail");
        assert_int_equal(runs, fails_at);
    }
    fails_at = 0;
    has_sms = false;
    td_assert_refused(td_bench_tune(dev, &config, &sms), TD_UNSUPPORTED,
                      "cpu cannot update on a part of its SMs");
    td_bench_config phases = config;
    phases.timed = TD_TIMED_PHASES;
    td_assert_refused(td_bench_tune(dev, &phases, &sms), TD_BAD_ARGUMENT,
                      "timed phases (0), needs train and whole");
    assert_int_equal(sms, 32); /* unchanged */
    td_device_close(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_fastest_number_is_chosen)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
