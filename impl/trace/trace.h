/** Traces: a device's operations and kernels under the labels of a step.
 *
 * A trace records a device from td_trace_begin to td_trace_end. Its ranges are labels ("forward", "layers.3",
 * "scaled dot product attention") and operations, with times of the host's clock. Its activities are:
 *
 *   on a GPU  kernels, copies and fills, with CUPTI's times of the GPU. An activity belongs to the range
 *             of its launch. An activity of a captured graph belongs to the range of its capture.
 *   on a CPU  the operations, with times of the host's clock
 *
 * Ranges with the label "step" (td_device_push_label) are steps. Tables leave out everything outside of
 * steps, such as the warm-up. Without such a label the whole trace is one step. A trace also passes its
 * ranges to NVTX (domain "tandem"), so that Nsight Systems shows them.
 *
 * CUPTI serves one user per process. If another trace or profiler uses it, a trace has no GPU activities, and
 * td_trace_info gives the reason. All times of a trace are ns of one clock; CUPTI's clock counts from
 * 1970. */
#ifndef TD_TRACE_TRACE_H
#define TD_TRACE_TRACE_H

#include "base/stats.h"
#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_trace td_trace;

/** Begins a trace of dev, which must stay open until td_trace_end. Waits for the device. On a GPU, call it
 * before captures: later replays of an earlier captured graph have no ranges. *out belongs to the caller;
 * free it with td_trace_destroy. TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_trace_begin(td_device *dev, td_trace **out);

/** Waits for the device, ends the trace, and finds the range of every activity. The functions below need this
 * call first. TD_BAD_ARGUMENT: NULL. TD_BAD_STATE: the trace has ended already. TD_LIBRARY_ERROR, with
 * CUPTI's text. TD_NO_MEMORY. */
TD_API td_status td_trace_end(td_trace *trace);
TD_API void td_trace_destroy(td_trace *trace); /* ends it first if necessary; accepts NULL */

/** What a trace contains. */
typedef struct td_trace_info {
    bool gpu;              /* activities ran on a GPU */
    const char *cupti;     /* a sentence: why GPU activities are missing; "" if they are not missing */
    const char *nvtx;      /* a sentence: why NVTX gets no ranges; "" if it gets them */
    int cupti_version;     /* 130001 is 13.0 Update 1; 0: not used */
    int64_t steps;         /* number of steps, at least 1 */
    int64_t activities;    /* number of activities in steps */
    int64_t unattributed;  /* number of activities in steps that were launched outside of every range */
    int64_t without_times; /* number of activities without times from CUPTI; they are left out */
    int64_t dropped;       /* activities or ranges that were lost because memory was missing */
} td_trace_info;

/** *out = the contents of a trace. Its texts belong to the trace. TD_BAD_ARGUMENT: a NULL; here and in all
 * functions below also a trace that has not ended. */
TD_API td_status td_trace_info_of(const td_trace *trace, td_trace_info *out);

typedef enum td_trace_phase {
    TD_TRACE_FORWARD = 0, /* "forward" */
    TD_TRACE_LOSS,        /* "loss" */
    TD_TRACE_BACKWARD,    /* "backward" */
    TD_TRACE_OPTIMIZER,   /* "optimizer", also for updates during the backward pass */
    TD_TRACE_ELSEWHERE    /* "elsewhere": the rest of a step */
} td_trace_phase;

#define TD_TRACE_PHASES 5

/** The phase's label, as in the enum's comments; NULL for any other value. */
TD_API const char *td_trace_phase_name(td_trace_phase phase);

/** All phases. A set of phases has the bit 1 << phase for each of them. */
#define TD_TRACE_ALL_PHASES 31

/** Parts of attention, found by their labels. */
typedef enum td_trace_part {
    TD_TRACE_NO_ATTENTION = 0,
    TD_TRACE_SCORES,  /* "computing attention scores" */
    TD_TRACE_SOFTMAX, /* "computing softmax" */
    TD_TRACE_VALUES,  /* "final matmul" */
    TD_TRACE_FUSED    /* everything else in attention; all of a fused attention */
} td_trace_part;

#define TD_TRACE_PARTS 5

typedef enum td_trace_kind {
    TD_TRACE_OPERATION = 0, /* an operation on a CPU */
    TD_TRACE_KERNEL,
    TD_TRACE_COPY,
    TD_TRACE_FILL
} td_trace_kind;

/** A label or an operation. */
typedef struct td_trace_range {
    const char *name;
    int64_t parent;           /* the range around it; -1: none */
    int64_t begin_ns, end_ns; /* times of the host */
    int64_t step;             /* number of the step, from 0; -1: in no step */
    bool operation;           /* true: an operation; false: a label */
    td_op_class op_class;     /* class of the operation, or of the operation around it */
    double flops, bytes;      /* of an operation; 0: not known */
    td_trace_phase phase;
    td_trace_part part;
} td_trace_range;

typedef struct td_trace_activity {
    const char *name; /* a kernel's name is demangled */
    td_trace_kind kind;
    td_op_class op_class;
    td_trace_phase phase;
    td_trace_part part;
    int64_t step;  /* -1: in no step */
    int64_t range; /* index of the innermost range; -1: none */
    int64_t begin_ns, end_ns;
    int64_t bytes; /* size of a copy or fill */
    int64_t call;  /* index of its launch in td_trace_calls; -1: none */
    uint32_t device, context, stream, correlation;
    uint32_t graph; /* CUPTI's id of the graph; 0: not part of a graph */
    uint64_t node;  /* CUPTI's id of the graph's node */
    int32_t grid[3], block[3], cluster[3];
    int32_t registers, static_shared, dynamic_shared; /* registers per thread; bytes per block */
} td_trace_activity;

/** A CUDA call that launched activities. */
typedef struct td_trace_call {
    const char *name;
    int64_t begin_ns, end_ns;
    uint32_t correlation, thread;
} td_trace_call;

/** *out = all ranges, activities or calls, sorted by their begin; *count = their number. The array belongs to
 * the trace. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_trace_ranges(const td_trace *trace, const td_trace_range **out, int64_t *count);
TD_API td_status td_trace_activities(const td_trace *trace, const td_trace_activity **out, int64_t *count);
TD_API td_status td_trace_calls(const td_trace *trace, const td_trace_call **out, int64_t *count);

/* ---- tables; values are averages over the steps ---- */

/** Totals of some phases of a step. */
typedef struct td_trace_total {
    double window_ms;                  /* from the begin of the first activity to the end of the last */
    double busy_ms;                    /* the part of the window in which at least one activity ran */
    double sum_ms;                     /* sum of the activities' durations */
    double host_ms;                    /* host time of the ranges with the phases' labels */
    double by_class_ms[TD_OP_CLASSES]; /* the time in which at least one activity of the class ran */
    /* Numbers of activities; the second kernel of a split-K GEMM is not counted. */
    double activities, by_class[TD_OP_CLASSES];
    double operations[TD_OP_CLASSES]; /* number of operations */
    double flops[TD_OP_CLASSES];      /* FLOPs of the operations by class */
} td_trace_total;

/** *out = the totals of a set of phases. TD_BAD_ARGUMENT: a NULL, phases is 0 or has a bit that is not a
 * phase. TD_NO_MEMORY. */
TD_API td_status td_trace_total_of(const td_trace *trace, unsigned phases, td_trace_total *out);

/** All activities with one name. */
typedef struct td_trace_kernel {
    const char *name;
    td_op_class op_class; /* the class with most of the time */
    int64_t instances;
    double per_pass; /* instances per step */
    double total_ns; /* the time in which at least one of them ran, in all steps */
    double alone_ns; /* the part of total_ns in which no other activity ran, of any phase */
    double share;    /* total_ns over the phases' busy time, 0 to 1; shares may add up to more than 1 */
    td_stats ns;     /* durations, which include a kernel's waits for another kernel */
} td_trace_kernel;

/** Fills rows with the names that take the most time, longest first. *count = the number of all names, which
 * may exceed capacity.
 *
 *   rows  [capacity]  out; min(*count, capacity) rows are written
 *
 * TD_BAD_ARGUMENT: a NULL, a capacity below 1, invalid phases. TD_NO_MEMORY. */
TD_API td_status td_trace_kernels(const td_trace *trace, unsigned phases, int64_t capacity,
                                  td_trace_kernel *rows, int64_t *count);

/** All ranges with one label, as in nvtx_gpu_proj_sum of Nsight Systems. The projection of a range is the
 * time from the begin of its first activity to the end of its last activity. */
typedef struct td_trace_label {
    const char *name;
    int64_t instances, activities;
    double total_ns;      /* projected */
    double host_total_ns; /* sum of the ranges' host times */
    td_stats ns;          /* projected */
} td_trace_label;

/** Fills rows with the labels in steps, longest projection first, without "step", the warm-up and "layers.N".
 * rows, *count and errors as for td_trace_kernels. */
TD_API td_status td_trace_labels(const td_trace *trace, int64_t capacity, td_trace_label *rows,
                                 int64_t *count);

/** Attention in the forward pass of one step, by td_trace_part. */
typedef struct td_trace_attention {
    double ms[TD_TRACE_PARTS], flops[TD_TRACE_PARTS], bytes[TD_TRACE_PARTS];
} td_trace_attention;

/** *out = the times of attention. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_trace_attention_of(const td_trace *trace, td_trace_attention *out);

/** *out = the class of a kernel of tandem, PyTorch, cuBLAS or NCCL by its name, mangled or not; TD_OP_OTHER
 * for an unknown name. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_trace_classify(const char *name, td_op_class *out);

/* ---- files; an existing file is replaced when the new one is complete ---- */

/** Writes all ranges, calls and activities in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens.
 * pid 0 is the host, pid 1 + n is GPU n, whose tids are 100 * stream + lane. Times are microseconds since
 * "baseTimeNanoseconds".
 *
 * TD_BAD_ARGUMENT: a NULL, an empty path. TD_IO_ERROR, naming the path and the reason: `path` is not a
 * regular file, the folder is missing or not writable, the disk is full. The old file is then unchanged.
 * TD_NO_MEMORY. If the process may reach RLIMIT_FSIZE, it must ignore SIGXFSZ; otherwise the signal kills
 * it. */
TD_API td_status td_trace_write_json(const td_trace *trace, const char *path);

/** Writes an SVG picture of the last step: one lane for each class, the phases as bands. Errors as for
 * td_trace_write_json. */
TD_API td_status td_trace_write_timeline(const td_trace *trace, const char *path);

TD_END_DECLS

#endif
