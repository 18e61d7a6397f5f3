/** Times the training step of a model: forward, backward and optimizer separately, or whole steps. */
#ifndef TD_BENCH_BENCH_H
#define TD_BENCH_BENCH_H

#include "base/stats.h"
#include "train/train.h"

TD_BEGIN_DECLS

typedef enum td_bench_mode {
    TD_BENCH_FORWARD = 0, /* "forward": forward only, a model for inference */
    TD_BENCH_BACKWARD,    /* "backward": forward, loss, backward */
    TD_BENCH_TRAIN        /* "train": forward, loss, backward, AdamW (defaults of TD_ADAMW_COURSE2025) */
} td_bench_mode;

/** *out = the mode with this name. TD_BAD_ARGUMENT: a NULL or an unknown name; the message lists the known
 * names. */
TD_API td_status td_bench_mode_parse(const char *name, td_bench_mode *out);

/** "forward", "backward" or "train"; "unknown mode" for any other value. Never NULL. */
TD_API const char *td_bench_mode_name(td_bench_mode mode);

/** Which parts are timed, and by which clock. */
typedef enum td_bench_timed {
    /* "phases": forward, backward and optimizer, each from its call until the device is done, by the host's
     * clock */
    TD_TIMED_PHASES = 0,
    /* "events": the same phases by events on the device; the host does not wait between them */
    TD_TIMED_EVENTS,
    /* "whole": whole steps by events on the device; the host does not wait between them */
    TD_TIMED_WHOLE
} td_bench_timed;

/** *out = the td_bench_timed with this name. TD_BAD_ARGUMENT: a NULL or an unknown name; the message lists
 * the known names. */
TD_API td_status td_bench_timed_parse(const char *name, td_bench_timed *out);

/** "phases", "events" or "whole"; "unknown way" for any other value. Never NULL. */
TD_API const char *td_bench_timed_name(td_bench_timed timed);

typedef struct td_bench_config {
    td_transformer_config model; /* `use` is set by the mode */
    td_bench_mode mode;
    int64_t warmup, steps; /* untimed and timed steps; warmup at least 0, steps at least 1 */
    int64_t micro_batches; /* per step; more than 1 needs TD_TIMED_WHOLE; 0: 1 */
    uint64_t seed;         /* of weights and tokens */

    /* Each phase is captured as a graph and replayed; a whole step is one graph. The first step is queued,
     * the second is captured. So all timed steps are replays if there are at least two warm-up steps. */
    bool graph;

    td_bench_timed timed;

    /* AdamW updates the weights during the backward pass (TD_UPDATE_ALONG). Needs TD_BENCH_TRAIN and
     * TD_TIMED_WHOLE. */
    bool overlap;
    int32_t update_sms; /* as in td_train_config */
} td_bench_config;

/** *out = the config of the trainer whose steps td_bench_run times. TD_BAD_ARGUMENT: a NULL, an unknown
 * mode. */
TD_API td_status td_bench_train_config(const td_bench_config *config, td_train_config *out);

/** Called once for each step, warm-up steps included: after the step, or, if steps are timed by events on a
 * GPU, after the last step. done counts from 1 to total, warmup + steps. A status other than TD_OK ends the
 * run and is returned. */
typedef td_status (*td_bench_progress)(void *user, int64_t done, int64_t total, double step_ms);

typedef struct td_bench_result td_bench_result;

typedef struct td_bench_phase {
    td_stats ms;           /* over the timed steps */
    const double *samples; /* [steps] ms, in order; owned by the result */
} td_bench_phase;

typedef struct td_bench_summary {
    /* A phase that was not timed has ms.n = 0: the mode leaves it out, or steps are timed whole. Forward
     * includes the loss if backward follows. */
    td_bench_phase forward, backward, optimizer, step;
    int64_t steps;
    double tokens_per_second;     /* tokens of all micro-batches / median step */
    double first_loss, last_loss; /* of the first and last step, warm-up included; NaN in the mode forward */
    size_t peak_bytes;            /* the device's peak memory during the run */

    /* A GPU during the timed steps: the clock of its SMs, its power, and whether the driver lowers the clock
     * because power or temperature is at its limit. 0 on a CPU, without NVML, and with TD_TIMED_PHASES. */
    int32_t sm_mhz;
    double watts;
    bool slowed;
    double flops_per_step; /* of the GEMMs that run (td_account_model_flops) */

    /* FLOPs for the model FLOPs utilisation (MFU): GEMMs of forward, and twice as many for backward. Masked
     * parts of attention and recomputation do not count. */
    double model_flops_per_step;
} td_bench_summary;

/** Creates a model, runs warmup + steps steps on one random batch, and returns the times. Resets the device's
 * peak. Waits for the device.
 *
 *   progress  NULL: not wanted; user is passed to it
 *   out       the caller destroys it
 *
 * TD_BAD_ARGUMENT: a NULL; steps below 1; warmup below 0; steps or warmup above 2^57; an unknown mode or
 * `timed`; micro_batches above 1 without TD_TIMED_WHOLE, below 0, or above 2^31 - 1; overlap without
 * TD_BENCH_TRAIN and TD_TIMED_WHOLE. TD_UNSUPPORTED: a graph on a device without graphs. TD_NO_MEMORY. Other
 * errors: as td_train_create and the calls of a step. After an error *out is NULL, and nothing is left on the
 * device. */
TD_API td_status td_bench_run(td_device *dev, const td_bench_config *config, td_bench_progress progress,
                              void *user, td_bench_result **out);
TD_API void td_bench_result_destroy(td_bench_result *result); /* accepts NULL */

/** *out = the summary of a result, which owns the samples. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_bench_summary_of(const td_bench_result *result, td_bench_summary *out);

TD_END_DECLS

#endif
