/** Times the training step of several ranks (ddp/, shard/) and its communication, and measures each rank's
 * memory.
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
 * All ranks run three series of steps together, with one trainer:
 *
 *   1. with communication; gives the step's times
 *   2. with communication, and collectives are watched. The host waits for the device after both passes.
 *   3. without communication. With TD_BENCH_STATE_FULL passes read the weights that series 2 gathered last.
 *
 * Steps of series 1 and 3 may be captured. Series 2 is queued, because graphs cannot be watched. With
 * TD_BENCH_STATE_FLAT the schedules then differ: only captured steps gather weights at the begin of the next
 * step. */
#ifndef TD_BENCH_RANKS_H
#define TD_BENCH_RANKS_H

#include "base/stats.h"
#include "ddp/ddp.h"
#include "shard/shard.h"

TD_BEGIN_DECLS

/** How ranks divide the optimizer's state. */
typedef enum td_bench_state {
    TD_BENCH_STATE_WHOLE = 0, /* every rank has the whole state */
    TD_BENCH_STATE_TENSORS,   /* TD_SHARD_TENSORS */
    TD_BENCH_STATE_FLAT,      /* TD_SHARD_FLAT */
    TD_BENCH_STATE_FULL       /* TD_SHARD_FULL: weights and gradients are split as well */
} td_bench_state;

#define TD_BENCH_MOST_STEPS 4096

typedef struct td_bench_ranks_config {
    td_transformer_config model; /* batch: per rank; `use` is ignored */
    td_hyperparameters hyper;
    td_update_time time;
    int32_t update_sms;       /* as in td_train_config */
    int64_t micro_batches;    /* per step; 0: 1 */
    td_ddp_strategy strategy; /* how gradients are reduced; TD_BENCH_STATE_FLAT and _FULL ignore it */
    double bucket_mb;         /* as in td_ddp_link_create and td_shard_options */
    td_bench_state state;
    int64_t prefetch; /* this and the next two as in td_shard_options */
    bool keep_weights, reduce_last;
    int64_t warmup, steps; /* of each series, at most TD_BENCH_MOST_STEPS; steps at least 1 */
    uint64_t seed;         /* of weights and tokens; each rank has different tokens */
    bool graph;            /* steps of series 1 and 3 are captured, as in td_bench_config */
} td_bench_ranks_config;

/** *out = planned bytes of this rank's trainer. out->step includes the buffers of its link (td_shard_info).
 * Sends nothing: one rank may call it alone. TD_BAD_ARGUMENT: a NULL, an unknown state, steps, warmup or
 * micro_batches out of range. Other errors: as td_train_plan and td_shard_link_create. */
TD_API td_status td_bench_ranks_plan(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                     td_train_bytes *out);

/** Called after every step of each series; done counts from 1 to total. A status other than TD_OK ends the
 * run and is returned. */
typedef td_status (*td_bench_ranks_progress)(void *user, int64_t done, int64_t total);

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

typedef struct td_bench_ranks_result td_bench_ranks_result;

/** The arrays live as long as the result. */
typedef struct td_bench_ranks_summary {
    int64_t ranks;
    const td_bench_rank *of;  /* [ranks] */
    td_stats step;            /* over samples */
    const double *samples;    /* [steps] ms of each step of series 1, on the rank that was slowest in it */
    double tokens_per_second; /* tokens of all ranks / median step */
    int32_t update_sms;       /* td_train_update_sms of the trainers */
} td_bench_ranks_summary;

/** Runs the three series. All ranks of comm call it with the same config. Every rank gets the measurements of
 * all ranks.
 *
 *   progress  NULL: not wanted; user is passed to it
 *   out       the caller destroys it
 *
 * TD_BAD_ARGUMENT: a NULL except progress and user, an unknown state, steps, warmup or micro_batches out of
 * range. TD_NO_MEMORY. Other errors: as td_train_create, td_ddp_link_create, td_shard_link_create, and of
 * collectives. After an error *out is NULL, and the device has only blocks that collectives may still use. */
TD_API td_status td_bench_ranks_run(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                    td_bench_ranks_progress progress, void *user,
                                    td_bench_ranks_result **out);
TD_API void td_bench_ranks_result_destroy(td_bench_ranks_result *result); /* accepts NULL */

/** *out = the summary of a result. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_bench_ranks_summary_of(const td_bench_ranks_result *result, td_bench_ranks_summary *out);

/** *out = the timeline of rank `rank`. TD_BAD_ARGUMENT: a NULL, a rank out of range. */
TD_API td_status td_bench_ranks_timeline_of(const td_bench_ranks_result *result, int64_t rank,
                                            td_bench_timeline *out);

TD_END_DECLS

#endif
