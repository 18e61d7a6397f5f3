/** Times the training step of several ranks (ddp/, shard/) and the part of communication, and measures each
 * rank's memory.
 *
 * Four numbers describe communication:
 *
 *   collectives  the sum of the times of a step's collectives (td_comm_watch)
 *   exposed      a step's time minus the time of the same step without communication
 *   waits        how long passes waited for gathered weights
 *   tail         from the end of the backward pass to the end of the last collective. The host waits for the
 *                device at the end of the backward pass. If weights are updated during the backward pass, the
 *                tail includes updates that collectives wait for.
 *
 * All ranks run three series of steps together. The first has no communication. The second has it, and gives
 * the times of the step. In the third collectives are watched, and the host waits for the device at the end
 * of both passes. Steps of the first two series may be captured. The third series is queued, because graphs
 * cannot be watched. If state is split flat, its schedule then differs: captured steps gather weights at the
 * begin of the next step. With TD_BENCH_STATE_FULL, steps without communication run after one step with it,
 * and use the weights that this step gathered last. */
#ifndef TD_BENCH_RANKS_H
#define TD_BENCH_RANKS_H

#include "base/stats.h"
#include "ddp/ddp.h"
#include "shard/shard.h"

TD_BEGIN_DECLS

/** How ranks divide the optimizer's state. */
typedef enum td_bench_state {
    TD_BENCH_STATE_WHOLE = 0, /* every rank has all of it */
    TD_BENCH_STATE_TENSORS,   /* TD_SHARD_TENSORS */
    TD_BENCH_STATE_FLAT,      /* TD_SHARD_FLAT */
    TD_BENCH_STATE_FULL       /* TD_SHARD_FULL: weights and gradients are split as well */
} td_bench_state;

#define TD_BENCH_MOST_STEPS 4096

typedef struct td_bench_ranks_config {
    td_transformer_config model; /* batch: of a rank; `use` is the run's */
    td_hyperparameters hyper;
    td_update_time time;
    int32_t update_sms;       /* as td_train_config has it */
    int64_t micro_batches;    /* 0: 1 */
    td_ddp_strategy strategy; /* of the reduction; ignored with TD_BENCH_STATE_FLAT and _FULL */
    double bucket_mb;         /* as in td_ddp_link_create and td_shard_options */
    td_bench_state state;
    int64_t prefetch; /* this and the next three as in td_shard_options */
    bool keep_weights, reduce_last, keep_gradients;
    int64_t warmup, steps; /* of each series; warmup may be 0, steps 1 to TD_BENCH_MOST_STEPS */
    uint64_t seed;         /* weights and tokens; each rank has tokens of its own */
    bool graph;            /* steps of the first two series are captured, as in td_bench_config */
} td_bench_ranks_config;

/** *out = memory of this rank's trainer; `step` includes the memory of its link (td_shard_info).
 * All ranks of comm may call it, or one. TD_BAD_ARGUMENT: a NULL, an unknown state; as td_train_plan and
 * td_shard_link_create. */
TD_API td_status td_bench_ranks_plan(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                     td_train_bytes *out);

/** Called after every step of each series; done counts from 1 to total. A
 * status other than TD_OK ends the run and is returned. */
typedef td_status (*td_bench_ranks_progress)(void *user, int64_t done, int64_t total);

/** When memory is measured. A trainer allocates all of its memory when it is created. */
typedef enum td_bench_point {
    TD_BENCH_MADE = 0,      /* model, optimizer and links are created */
    TD_BENCH_BEFORE_UPDATE, /* after the backward pass; if it updates weights: after the forward pass */
    TD_BENCH_AFTER_UPDATE
} td_bench_point;

#define TD_BENCH_POINTS 3

/** Measurements of one rank. Bytes are of its trainer and links, without earlier blocks of the device. */
typedef struct td_bench_rank {
    td_stats step, silent;           /* ms */
    td_stats collectives, beside;    /* ms; beside: the part before the end of the backward pass */
    td_stats tail;                   /* ms */
    td_stats waits;                  /* ms that passes waited for weights; 0 without a shard link */
    double exposed_ms;               /* median of step minus median of silent */
    int64_t calls, bytes;            /* of a step's collectives */
    int64_t windows;                 /* blocks that are windows: td_comm_window_create */
    double first_loss, last_loss;    /* of the second series, warm-up included */
    size_t current[TD_BENCH_POINTS]; /* at each point */
    size_t peak[TD_BENCH_POINTS];    /* between the point before and this one */
    size_t parameters;               /* masters */
    size_t gradients;                /* 0 if they share memory with activations */
    size_t optimizer_state;          /* moments: 8 an element that this rank updates, with AdamW */
    size_t activations;
    size_t buffers; /* the rest before the update: scratch, tokens, tables, hyperparameters, links */
    size_t gathered_layers, gathered_tables, reduced_layers, reduced_tables; /* of these: td_shard_info */
    bool shares_gradients;                                                   /* likewise */
} td_bench_rank;

/** A collective of the step whose timeline is kept. */
typedef struct td_bench_span {
    const char *call; /* this and bytes as in td_comm_span */
    int64_t bytes;
    double begin_ms, end_ms;
} td_bench_span;

/** A pass reads weights. The device has done all earlier work at begin_ms, and waits until the weights are
 * gathered at end_ms. */
typedef struct td_bench_wait {
    td_pass pass;
    td_range range;
    double begin_ms, end_ms;
} td_bench_wait;

/** The last watched step of one rank, in ms since this rank left the barrier before the step. The passes are
 * of the last micro-batch. */
typedef struct td_bench_timeline {
    double forward_ms, backward_ms, step_ms; /* the ends of the passes, and of everything */
    const td_bench_span *spans;              /* [count], in the order of the calls; the result's */
    int64_t count;
    const td_bench_wait *waits; /* [wait_count], in the order of the reads; the result's */
    int64_t wait_count;         /* 0 without a shard link */
} td_bench_timeline;

typedef struct td_bench_ranks_result td_bench_ranks_result;

typedef struct td_bench_ranks_summary {
    int64_t ranks;
    const td_bench_rank *of;  /* [ranks]; the result's */
    td_stats step;            /* ms of each step on the rank that was slowest in it */
    const double *samples;    /* [steps] of them; the result's */
    double tokens_per_second; /* of all ranks, by the median */
    int32_t update_sms;       /* td_train_update_sms of the trainers */
} td_bench_ranks_summary;

/** Runs the three series together with all ranks of comm. Every rank gets the measurements of all ranks.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown state, steps or warmup out of range; as td_train_create,
 * td_ddp_link_create and td_shard_link_create, as is TD_UNSUPPORTED. TD_NO_MEMORY. Errors of collectives.
 * *out is then NULL, and nothing is left on the device but what collectives may still use. */
TD_API td_status td_bench_ranks_run(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                    td_bench_ranks_progress progress, void *user,
                                    td_bench_ranks_result **out);
TD_API void td_bench_ranks_result_destroy(td_bench_ranks_result *result); /* accepts NULL */
TD_API td_status td_bench_ranks_summary_of(const td_bench_ranks_result *result, td_bench_ranks_summary *out);

/** *out = the timeline of any rank. TD_BAD_ARGUMENT: a NULL, a rank that is none. */
TD_API td_status td_bench_ranks_timeline_of(const td_bench_ranks_result *result, int64_t rank,
                                            td_bench_timeline *out);

TD_END_DECLS

#endif
