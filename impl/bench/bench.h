/** Times the training step of a model: forward, backward and optimizer apart, or whole steps. */
#ifndef TD_BENCH_BENCH_H
#define TD_BENCH_BENCH_H

#include "base/stats.h"
#include "train/train.h"

TD_BEGIN_DECLS

typedef enum td_bench_mode {
    TD_BENCH_FORWARD = 0, /* "forward": forward only, a model for inference */
    TD_BENCH_BACKWARD,    /* "backward": forward, loss, backward */
    TD_BENCH_TRAIN        /* "train": and the AdamW step */
} td_bench_mode;

/** TD_BAD_ARGUMENT: NULL or an unknown name; the message lists the known ones. */
TD_API td_status td_bench_mode_parse(const char *name, td_bench_mode *out);

/** "forward", "backward" or "train"; "unknown mode" for any other value. Never NULL. */
TD_API const char *td_bench_mode_name(td_bench_mode mode);

/** Which parts are timed, and by which clock. */
typedef enum td_bench_timed {
    /* "phases": forward, backward and optimizer by the host's clock, each until the device is done */
    TD_TIMED_PHASES = 0,
    /* "events": the same by events on the device; the host waits for nothing in between */
    TD_TIMED_EVENTS,
    /* "whole": steps by events on the device, without a wait; only `step` is timed */
    TD_TIMED_WHOLE
} td_bench_timed;

/** TD_BAD_ARGUMENT: NULL or an unknown name; the message lists the known ones. */
TD_API td_status td_bench_timed_parse(const char *name, td_bench_timed *out);

/** "phases", "events" or "whole"; "unknown way" for any other value. Never NULL. */
TD_API const char *td_bench_timed_name(td_bench_timed timed);

typedef struct td_bench_config {
    td_transformer_config model; /* `use` is set by the mode */
    td_bench_mode mode;
    int64_t warmup, steps; /* untimed and timed steps; warmup may be 0, steps at least 1 */
    int64_t micro_batches; /* of a step; more than 1 needs whole steps; 0: 1 */
    uint64_t seed;         /* weights and tokens */

    /* Each phase is captured as a graph and replayed; a whole step is one graph. The first step is queued,
     * the second is captured. So all timed steps are replays if there are at least two warm-up steps. */
    bool graph;

    td_bench_timed timed;

    /* With TD_TIMED_WHOLE, for training: AdamW updates the weights along the backward pass
     * (TD_UPDATE_ALONG). */
    bool overlap;
    int32_t update_sms; /* as td_train_config's */
} td_bench_config;

/** The trainer whose steps td_bench_run times. TD_BAD_ARGUMENT: a NULL, an unknown mode. */
TD_API td_status td_bench_train_config(const td_bench_config *config, td_train_config *out);

/** Called after every step, warm-up steps included; with events on a GPU it is called for all steps after the
 * last one. done counts from 1 to warmup + steps. A status other than TD_OK ends the run and is returned. */
typedef td_status (*td_bench_progress)(void *user, int64_t done, int64_t total, double step_ms);

typedef struct td_bench_result td_bench_result;

typedef struct td_bench_phase {
    td_stats ms;           /* over the timed steps */
    const double *samples; /* [steps] ms, in order; owned by the result */
} td_bench_phase;

typedef struct td_bench_summary {
    /* A phase that the mode leaves out has ms.n = 0. Forward includes the loss if backward follows. */
    td_bench_phase forward, backward, optimizer, step;
    int64_t steps;
    double tokens_per_second;     /* of all micro-batches / median step */
    double first_loss, last_loss; /* of all steps, warm-up included; NaN in the mode forward */
    size_t peak_bytes;            /* device memory, over the run */

    /* Of a GPU during the timed steps: the clock of its SMs, its power, and whether the driver lowers the
     * clock because power or temperature is at its limit. 0 on a CPU, and without NVML. */
    int32_t sm_mhz;
    double watts;
    bool slowed;
    double flops_per_step; /* of the GEMMs that run, by accounting.h */

    /* For the model's FLOPs utilisation (MFU): GEMMs of forward and twice as many for backward, without
     * masked parts of attention, and without anything that is computed again. */
    double model_flops_per_step;
} td_bench_summary;

/** Times steps with the update after the backward pass, and with the update on 8, 12, ... 32 SMs during it.
 * Each has a new trainer. *out = the number of SMs of the fastest; 0: after the pass. TD_BAD_ARGUMENT: a
 * NULL, a mode other than train, a way to time other than whole. TD_UNSUPPORTED: the device cannot update on
 * a part of its SMs. Else as td_bench_run. */
TD_API td_status td_bench_tune(td_device *dev, const td_bench_config *config, int32_t *out);

/** Creates a model, runs warmup + steps steps on one random batch, and returns the times. Errors: those of
 * td_train_create and its step; TD_BAD_ARGUMENT for a NULL, steps below 1, warmup below 0, an unknown mode
 * or way to time, micro-batches or an overlap without whole steps, too many micro-batches;
 * TD_UNSUPPORTED for a graph on a device without them; TD_NO_MEMORY. *out is then NULL, and nothing is left
 * on the device. */
TD_API td_status td_bench_run(td_device *dev, const td_bench_config *config, td_bench_progress progress,
                              void *user, td_bench_result **out);
TD_API void td_bench_result_destroy(td_bench_result *result); /* accepts NULL */
TD_API td_status td_bench_summary_of(const td_bench_result *result, td_bench_summary *out);

TD_END_DECLS

#endif
