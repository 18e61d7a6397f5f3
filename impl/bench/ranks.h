/** Internal to bench/: a run, and what ranks add to it. */
#ifndef TD_BENCH_RANKS_H
#define TD_BENCH_RANKS_H

#include "bench/bench.h"

/** The times of a step: its phases and the whole of series 1, the whole of series 3, and the times of series
 * 2. */
typedef enum td_bench_row {
    TD_ROW_FORWARD = 0,
    TD_ROW_BACKWARD,
    TD_ROW_OPTIMIZER,
    TD_ROW_STEP,
    TD_ROW_SILENT,
    TD_ROW_COLLECTIVES,
    TD_ROW_HIDDEN,
    TD_ROW_TAIL,
    TD_ROW_WAITS,
    TD_BENCH_ROWS
} td_bench_row;

struct td_bench_result {
    td_bench_summary summary;
    double *samples;              /* [TD_BENCH_ROWS, warmup + steps] of this rank */
    td_bench_rank *of;            /* [ranks] */
    td_bench_timeline *timelines; /* [ranks] */
    td_bench_span *spans;         /* [ranks, calls] */
    td_bench_wait *waits;         /* [ranks, waits] */
};

/** A point of time between parts of steps: by the device's event, or, if steps are timed in phases, by the
 * host's clock. */
typedef struct td_bench_mark {
    td_event *event;
    int64_t ns;
} td_bench_mark;

/** A read of weights: when a pass asked for them, and when it could read them. */
typedef struct td_bench_reading {
    td_pass pass;
    td_range range;
    td_event *asked, *there;
} td_bench_reading;

/** Two hooks: the first of the chain and the last. */
typedef struct td_bench_probe {
    td_hook before; /* waits for the device at the end of a pass, before hooks that communicate */
    td_hook after;  /* after all other hooks */
    td_device *dev;
    bool last;          /* the gradients of the current backward pass become final */
    int64_t forward_ns; /* the time when the device had done the last forward pass */
    int64_t end_ns;     /* the time when the device had done the last backward pass with final gradients */
    td_event *begin;    /* of the step; NULL: readings are not watched */
    td_bench_reading *readings; /* [count] of this step; readings count to made - 1 have unused events */
    int64_t count, made;
} td_bench_probe;

/** A step's time is taken after this number of later steps was queued, so that a GPU never waits for the
 * host. A process alone takes the time at once on a CPU and with TD_TIMED_PHASES. Ranks learn of a dead rank
 * only after all queued steps, so they queue few. TD_BENCH_MARKS: of a step, at most. */
enum { TD_BENCH_AHEAD = 8, TD_BENCH_RANKS_AHEAD = 2, TD_BENCH_MARKS = 4 };

typedef struct td_bench_job {
    td_device *dev;
    td_comm *comm;     /* NULL: a process alone, and then all that ranks add stays 0 */
    td_comm_info info; /* alone: rank 0 of 1 */
    const td_bench_config *config;
    int64_t micro_batches, count; /* count: steps of a series, warm-up included */
    td_train_config trainer;      /* with its links */
    td_ddp_link *ddp;             /* NULL: none */
    td_shard_link *shard;         /* NULL: none */
    td_train *train;
    int64_t *ids, *targets;   /* [micro-batches, batch, context], on the device */
    bool labelled;            /* a label of ours is pushed */
    td_bench_row first, last; /* what a step of the current series consists of */
    /* The begin of a step and the ends of its parts. */
    td_bench_mark marks[TD_BENCH_AHEAD + 1][TD_BENCH_MARKS];
    double *samples;     /* of the result */
    int64_t done, total; /* steps of all series */
    size_t base_bytes;   /* on the device before the run */
    td_bench_progress progress;
    void *user;
    td_bench_probe probe;
    td_bench_rank rank;
    td_bench_timeline timeline; /* of the last watched step, without its spans and waits */
    td_bench_span *spans;       /* [timeline.count] */
    td_bench_wait *waits;       /* [timeline.wait_count] */
} td_bench_job;

/** Adds links and the probe to the trainer's config. */
td_status td_bench_link(td_bench_job *r);

/** Attaches the links to the trainer and measures its memory. */
td_status td_bench_attach(td_bench_job *r);

/** Waits until all queued work is done, on all ranks, so that they begin together. */
td_status td_bench_wait_for_ranks(td_bench_job *r);

/** Counts a step and tells `progress`. */
td_status td_bench_report(td_bench_job *r, double ms);

/** Runs series 2. Later steps do not communicate. */
td_status td_bench_watch(td_bench_job *r);

/** Gives the measurements of all ranks to every rank. The row of steps becomes that of the slowest rank. */
td_status td_bench_share(td_bench_job *r, td_bench_result *result);

#endif
