/** Times the training step of a model: forward, backward and optimizer separately, or whole steps. With a
 * communicator several ranks run the steps together (ddp/, shard/). Then communication is timed too, and each
 * rank's memory is measured.
 *
 * Four times describe communication:
 *
 *   collectives  the sum of the times of a step's collectives (td_comm_watch)
 *   exposed      a step's time minus the time of the same step without communication
 *   waits        the time that passes waited for gathered weights
 *   tail         from the end of the backward pass to the end of the last collective. The host waits for the
 *                device at the end of the backward pass. If weights are updated during the backward pass, the
 *                tail includes updates that collectives wait for.
 *
 * A process alone runs one series of steps. Ranks run three series together, with one trainer:
 *
 *   1. with communication; gives the step's times
 *   2. with communication, and collectives are watched. The host waits for the device after both passes.
 *   3. without communication. With TD_BENCH_STATE_FULL passes read the weights that series 2 gathered last.
 *
 * Steps of series 1 and 3 may be captured. Series 2 is queued, because graphs cannot be watched. With
 * TD_BENCH_STATE_FLAT the schedules then differ: only captured steps gather weights at the begin of the next
 * step. */
#ifndef TD_BENCH_BENCH_H
#define TD_BENCH_BENCH_H

#include "base/stats.h"
#include "ddp/ddp.h"
#include "shard/shard.h"

TD_BEGIN_DECLS

typedef enum td_bench_mode {
    TD_BENCH_FORWARD = 0, /* "forward": forward only, a model for inference */
    TD_BENCH_BACKWARD,    /* "backward": forward, loss, backward */
    TD_BENCH_TRAIN        /* "train": forward, loss, backward, update */
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

/** How ranks divide the optimizer's state. */
typedef enum td_bench_state {
    TD_BENCH_STATE_WHOLE = 0, /* every rank has the whole state */
    TD_BENCH_STATE_TENSORS,   /* TD_SHARD_TENSORS */
    TD_BENCH_STATE_FLAT,      /* TD_SHARD_FLAT */
    TD_BENCH_STATE_FULL       /* TD_SHARD_FULL: weights and gradients are split as well */
} td_bench_state;

typedef struct td_bench_config {
    td_transformer_config model; /* batch: of each rank; `use` is set by the mode */
    td_bench_mode mode;          /* with a communicator TD_BENCH_TRAIN */
    td_bench_timed timed;        /* with a communicator TD_TIMED_WHOLE */
    int64_t warmup, steps; /* untimed and timed steps of each series; warmup at least 0, steps at least 1 */
    int64_t micro_batches; /* per step; more than 1 needs TD_TIMED_WHOLE; 0: 1 */
    uint64_t seed;         /* of weights and tokens; each rank has different tokens */

    /* Each phase is captured as a graph and replayed; a whole step is one graph. The first step is queued,
     * the second is captured. So all timed steps are replays if there are at least two warm-up steps. */
    bool graph;

    /* AdamW with eps and beta2 0, as all zeros: the defaults of TD_ADAMW_COURSE2025. */
    td_hyperparameters hyper;
    td_update_time time; /* of whole steps; a step in phases has its update after the backward pass */
    int32_t update_sms;  /* as in td_train_config */

    /* How ranks communicate. Ignored without a communicator. */
    td_ddp_strategy strategy; /* how gradients are reduced; TD_BENCH_STATE_FLAT and _FULL ignore it */
    double bucket_mb;         /* as in td_ddp_link_create and td_shard_options */
    td_bench_state state;
    int64_t prefetch; /* this and the next two as in td_shard_options */
    bool keep_weights, reduce_last;
} td_bench_config;

/** *out = planned bytes of this rank's trainer. out->step includes the buffers of its link (td_shard_info).
 * Sends nothing: one rank may call it alone. comm NULL: of a process alone. Errors: as td_bench_run before
 * its first step. */
TD_API td_status td_bench_plan(td_device *dev, td_comm *comm, const td_bench_config *config,
                               td_train_bytes *out);

/** Called once for each step of each series, warm-up steps included: after the step, or, among ranks and if
 * steps are timed by events on a GPU, some steps later. done counts from 1 to total. A status other than
 * TD_OK ends the run and is returned. */
typedef td_status (*td_bench_progress)(void *user, int64_t done, int64_t total, double step_ms);

typedef struct td_bench_result td_bench_result;

typedef struct td_bench_phase {
    td_stats ms;           /* over the timed steps */
    const double *samples; /* [steps] ms, in order; owned by the result */
} td_bench_phase;

/** Points of time at which memory is measured. A trainer allocates all of its memory when it is created. */
typedef enum td_bench_point {
    TD_BENCH_MADE = 0,      /* after model, optimizer and links are created */
    TD_BENCH_BEFORE_UPDATE, /* after the backward pass; with TD_UPDATE_ALONG: after the forward pass */
    TD_BENCH_AFTER_UPDATE   /* at the end of the step */
} td_bench_point;

#define TD_BENCH_POINTS 3

/** Measurements of one rank. Bytes are of its trainer and links, without earlier blocks of the device. */
typedef struct td_bench_rank {
    td_stats step, silent;           /* ms of a step with communication (series 1), and without (series 3) */
    td_stats collectives, hidden;    /* ms; hidden: the part before the end of the backward pass */
    td_stats tail;                   /* ms */
    td_stats waits;                  /* ms that passes waited for weights; 0 without a shard link */
    double exposed_ms;               /* median of step minus median of silent */
    int64_t calls, bytes;            /* of a step's collectives */
    int64_t windows;                 /* number of blocks that are windows: td_comm_window_create */
    double first_loss, last_loss;    /* of series 1, warm-up included */
    size_t current[TD_BENCH_POINTS]; /* at each point */
    size_t peak[TD_BENCH_POINTS];    /* since the previous point */
    size_t parameters;               /* masters */
    size_t gradients;                /* 0 if gradients share memory with activations */
    size_t optimizer_state;          /* moments; AdamW: 8 bytes for each element that this rank updates */
    size_t activations;
    size_t buffers; /* the rest before the update: scratch, tokens, tables, hyperparameters, links */
    /* The next five are as in td_shard_info. The sizes are parts of buffers. */
    size_t gathered_layers, gathered_tables, reduced_layers, reduced_tables;
    bool shares_gradients;
} td_bench_rank;

/** One collective of a timeline. */
typedef struct td_bench_span {
    const char *call; /* `call` and `bytes` as in td_comm_span */
    int64_t bytes;
    double begin_ms, end_ms;
} td_bench_span;

/** One read of weights by a pass. begin_ms: the device has done all earlier work. end_ms: the weights are
 * gathered. */
typedef struct td_bench_wait {
    td_pass pass;
    td_range range;
    double begin_ms, end_ms;
} td_bench_wait;

/** The last watched step of one rank, in ms since this rank left the barrier before the step. forward_ms and
 * backward_ms are of the last micro-batch. The arrays live as long as the result. */
typedef struct td_bench_timeline {
    double forward_ms, backward_ms, step_ms; /* the ends of the passes, and of the step */
    const td_bench_span *spans;              /* [count], in the order of the calls */
    int64_t count;
    const td_bench_wait *waits; /* [wait_count], in the order of the reads */
    int64_t wait_count;         /* 0 without a shard link */
} td_bench_timeline;

typedef struct td_bench_summary {
    /* A phase that was not timed has ms.n = 0: the mode leaves it out, or steps are timed whole. Forward
     * includes the loss if backward follows. Among ranks `step` has the times of the rank that was slowest in
     * each step of series 1. */
    td_bench_phase forward, backward, optimizer, step;
    int64_t steps;
    int64_t ranks;                /* 0: the process was alone */
    const td_bench_rank *of;      /* [ranks]; owned by the result */
    double tokens_per_second;     /* tokens of all ranks and micro-batches / median step */
    double first_loss, last_loss; /* of this rank's series 1, warm-up included; NaN in the mode forward */
    size_t peak_bytes;            /* the device's peak memory during series 1 */
    int32_t update_sms;           /* td_train_update_sms of the trainer */

    /* A GPU during the timed steps: the clock of its SMs, its power, and whether the driver lowers the clock
     * because power or temperature is at its limit. 0 on a CPU, without NVML, and with TD_TIMED_PHASES. */
    int32_t sm_mhz;
    double watts;
    bool slowed;
    double flops_per_step; /* of the GEMMs that one rank runs (td_account_model_flops) */

    /* FLOPs for the model FLOPs utilisation (MFU): GEMMs of forward, and twice as many for backward. Masked
     * parts of attention and recomputation do not count. */
    double model_flops_per_step;
} td_bench_summary;

/** Creates a model, runs the steps on one random batch, and returns the times. Resets the device's peak.
 * Waits for the device. All ranks of comm call it with the same config, and every rank gets the measurements
 * of all ranks.
 *
 *   comm      NULL: this process alone
 *   progress  NULL: not wanted; user is passed to it
 *   out       the caller destroys it
 *
 * TD_BAD_ARGUMENT: a NULL; steps below 1; warmup below 0; steps or warmup above 2^57; an unknown mode,
 * `timed` or state; a comm without TD_BENCH_TRAIN and TD_TIMED_WHOLE; micro_batches above 1 without
 * TD_TIMED_WHOLE, below 0, or above 2^31 - 1. TD_UNSUPPORTED: a graph on a device without graphs.
 * TD_NO_MEMORY. Other errors: as td_train_create, the calls of a step, td_ddp_link_create,
 * td_shard_link_create, and of collectives. After an error *out is NULL, and the device has only blocks that
 * collectives may still use. */
TD_API td_status td_bench_run(td_device *dev, td_comm *comm, const td_bench_config *config,
                              td_bench_progress progress, void *user, td_bench_result **out);
TD_API void td_bench_result_destroy(td_bench_result *result); /* accepts NULL */

/** *out = the summary of a result, which owns the arrays. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_bench_summary_of(const td_bench_result *result, td_bench_summary *out);

/** *out = the timeline of rank `rank`. TD_BAD_ARGUMENT: a NULL; a rank that the result does not have. */
TD_API td_status td_bench_timeline_of(const td_bench_result *result, int64_t rank, td_bench_timeline *out);

TD_END_DECLS

#endif
