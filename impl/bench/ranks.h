/** Times the training step of several ranks (ddp/, shard/), tells apart what communication takes of it, and
 * says where each rank's memory goes.
 *
 * Four numbers, of which none stands for another:
 *
 *   collectives  how long a step's collectives ran, one after the other (td_comm_watch)
 *   exposed      a step, less the same step without communication
 *   waits        how long passes waited for weights that links gather
 *   tail         from the end of the backward pass, for which the device is waited there, to the end of the
 *                last collective. With the update along backward, updates that collectives wait for are in
 *                it.
 *
 * Each rank runs three series of steps, at the same time as all others: without communication; with it, one
 * step behind the other, which are the times of the step; and with it, the collectives watched and the device
 * waited for at the end of both passes. Where steps are captured the first two series are, and the third is
 * queued: nothing is watched in a graph. Where state is split flat its schedule is then another than theirs,
 * for captured steps gather at the head of the next. With TD_BENCH_STATE_FULL the steps without communication
 * follow one with it, and compute with the weights that this one has gathered last. */
#ifndef TD_BENCH_RANKS_H
#define TD_BENCH_RANKS_H

#include "base/stats.h"
#include "ddp/ddp.h"
#include "shard/shard.h"

TD_BEGIN_DECLS

/** Who has the optimizer's state. */
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
    int32_t update_sms;    /* as td_train_config has it */
    int64_t micro_batches; /* 0: 1 */
    td_ddp_strategy
        strategy;     /* of the reduction; not looked at with TD_BENCH_STATE_FLAT and _FULL, which have
                               * their own */
    double bucket_mb; /* as td_ddp_link_create and td_shard_options have it */
    td_bench_state state;
    int64_t prefetch; /* these four as td_shard_options has them */
    bool keep_weights, reduce_last, keep_gradients;
    int64_t warmup, steps; /* of each series; warmup may be 0, steps 1 to TD_BENCH_MOST_STEPS */
    uint64_t seed;         /* weights and tokens; each rank has tokens of its own */
    bool graph; /* steps that are timed whole are captured as a graph, as td_bench_config has it; those whose
                 * collectives are watched are queued */
} td_bench_ranks_config;

/** What this rank's trainer takes from the device; `step` includes the memory of its link (td_shard_info).
 * All ranks of comm may call it, or one. TD_BAD_ARGUMENT: a NULL, an unknown state; as td_train_plan and
 * td_shard_link_create. */
TD_API td_status td_bench_ranks_plan(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                     td_train_bytes *out);

/** Called after every step of each series, where it was timed on its own; done counts from 1 to total. A
 * status other than TD_OK ends the run and is returned. */
typedef td_status (*td_bench_ranks_progress)(void *user, int64_t done, int64_t total);

/** When memory is looked at: a trainer takes all of its memory when it is made. */
typedef enum td_bench_point {
    TD_BENCH_MADE = 0,      /* model, optimizer and links are there */
    TD_BENCH_BEFORE_UPDATE, /* the backward pass has ended; where it updates: the forward pass has */
    TD_BENCH_AFTER_UPDATE
} td_bench_point;

#define TD_BENCH_POINTS 3

/** What one rank measured. Bytes are its trainer's and links', without what was on the device before. */
typedef struct td_bench_rank {
    td_stats step, silent;           /* ms */
    td_stats collectives, beside;    /* ms; beside: what of the collectives ran before the backward's end */
    td_stats tail;                   /* ms */
    td_stats waits;                  /* ms in all that passes waited for weights; 0 without a shard link */
    double exposed_ms;               /* step's median less silent's */
    int64_t calls, bytes;            /* of a step's collectives */
    int64_t windows;                 /* blocks that they go from GPU to GPU of: td_comm_window_create */
    double first_loss, last_loss;    /* of the steps with communication that are timed, warm-up included */
    size_t current[TD_BENCH_POINTS]; /* at each point */
    size_t peak[TD_BENCH_POINTS];    /* up to it, since the one before */
    size_t parameters;               /* masters */
    size_t gradients;                /* 0 where they share memory with activations */
    size_t optimizer_state;          /* moments: 8 an element that this rank updates, with AdamW */
    size_t activations;
    size_t buffers; /* the rest of what is there before the update: scratch, tokens, tables, hyperparameters,
                     * the links' */
    size_t gathered_layers, gathered_tables, reduced_layers, reduced_tables; /* of these: td_shard_info */
    bool shares_gradients;                                                   /* likewise */
} td_bench_rank;

/** A collective of the step whose timeline is kept. */
typedef struct td_bench_span {
    const char *call; /* of td_comm_span, as bytes is */
    int64_t bytes;
    double begin_ms, end_ms;
} td_bench_span;

/** A pass is about to read weights. The device waits from begin_ms, when it has ended what was queued
 * before, to end_ms, when the weights are gathered and may be read. */
typedef struct td_bench_wait {
    td_pass pass;
    td_range range;
    double begin_ms, end_ms;
} td_bench_wait;

/** The last watched step of one rank, in ms since this rank left the barrier ahead of it. The passes are
 * those of the last micro-batch. */
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

/** Runs it, together with all ranks of comm, and leaves every rank with what all have measured.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown state, steps or warmup out of range; as td_train_create,
 * td_ddp_link_create and td_shard_link_create, as is TD_UNSUPPORTED. TD_NO_MEMORY. Errors of collectives.
 * *out is then NULL, and nothing is left on the device but what collectives may still use. */
TD_API td_status td_bench_ranks_run(td_device *dev, td_comm *comm, const td_bench_ranks_config *config,
                                    td_bench_ranks_progress progress, void *user,
                                    td_bench_ranks_result **out);
TD_API void td_bench_ranks_result_destroy(td_bench_ranks_result *result); /* accepts NULL */
TD_API td_status td_bench_ranks_summary_of(const td_bench_ranks_result *result, td_bench_ranks_summary *out);

/** Of any of the ranks: every rank has those of all. TD_BAD_ARGUMENT: a NULL, a rank that was not there. */
TD_API td_status td_bench_ranks_timeline_of(const td_bench_ranks_result *result, int64_t rank,
                                            td_bench_timeline *out);

TD_END_DECLS

#endif
