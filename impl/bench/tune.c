/* Measures on how many SMs the update makes steps fastest. td_train_update_sms estimates it by a formula. */
#include "base/check.h"
#include "bench/bench.h"
#include "ops/ops.h"

enum { FIRST = 8, STEP = 4, LAST = 32, WARMUP = 3, STEPS = 5 };

static td_status time_of(td_device *dev, const td_bench_config *config, int32_t sms, double *ms)
{
    td_status status = TD_OK;
    td_bench_config with = *config;
    td_bench_result *result = NULL;
    td_bench_summary summary;

    with.warmup = WARMUP;
    with.steps = STEPS;
    with.update_sms = sms;
    with.overlap = sms > 0;
    TD_TRY(td_bench_run(dev, &with, NULL, NULL, &result));
    TD_TRY(td_bench_summary_of(result, &summary));
    *ms = summary.step.ms.median;
cleanup:
    td_bench_result_destroy(result);
    return status;
}

td_status td_bench_tune(td_device *dev, const td_bench_config *config, int32_t *out)
{
    td_status status = TD_OK;
    double best, ms;
    int32_t fastest = 0;

    TD_NOT_NULL(out, dev, config);
    TD_CHECK(config->mode == TD_BENCH_TRAIN && config->timed == TD_TIMED_WHOLE,
             "mode is %s (%d) and timed %s (%d), needs train and whole: else no update comes along the "
             "backward pass",
             td_bench_mode_name(config->mode), (int)config->mode, td_bench_timed_name(config->timed),
             (int)config->timed);
    TD_FAIL_IF(!td_update_has_sms(dev), TD_UNSUPPORTED, "%s cannot update on a part of its SMs",
               td_device_name(dev));
    TD_TRY(time_of(dev, config, 0, &best));
    for (int32_t sms = FIRST; sms <= LAST; sms += STEP) {
        TD_TRY(time_of(dev, config, sms, &ms));
        if (ms < best) {
            best = ms;
            fastest = sms;
        }
    }
    *out = fastest;
cleanup:
    return status;
}
