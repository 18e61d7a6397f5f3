/** Traces: a device's operations and kernels under the labels of a step.
 *
 * A trace listens to a device from td_trace_begin to td_trace_end. Its ranges are labels ("forward",
 * "layers.3", "scaled dot product attention") and operations, by the host's clock. Its activities are:
 *
 *   on a GPU  kernels, copies and fills with times of CUPTI by the GPU's clock. An activity belongs to the
 *             range of its launch. An activity of a captured graph belongs to the range of its capture.
 *   on a CPU  the operations, by the host's clock
 *
 * Steps are ranges labelled "step". Tables leave out everything outside of steps: the warm-up. Without such a
 * label everything is one step. A trace also gives its ranges to NVTX, with these names, in the domain
 * "tandem", so that Nsight Systems shows them.
 *
 * CUPTI has one listener in a process. During another trace or another profiler, a trace has no activities of
 * a GPU and says why (td_trace_info). Times are ns of one clock; CUPTI's begin in 1970. */
#ifndef TD_TRACE_TRACE_H
#define TD_TRACE_TRACE_H

#include "base/stats.h"
#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_trace td_trace;

/** Begins to listen to dev, which must outlive td_trace_end. On a GPU, call it before captures: CUPTI knows
 * only the ranges of later captures. Waits for the device. TD_BAD_ARGUMENT: a NULL.
 * TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_trace_begin(td_device *dev, td_trace **out);

/** Waits for the device, stops listening, and finds the range of every activity. Other functions of the trace
 * need this call first. TD_BAD_STATE: it ended already. TD_NO_MEMORY. */
TD_API td_status td_trace_end(td_trace *trace);
TD_API void td_trace_destroy(td_trace *trace); /* ends it; accepts NULL */

/** What the tables of a trace are made of. */
typedef struct td_trace_info {
    bool gpu;              /* activities are a GPU's */
    const char *cupti;     /* why a GPU's activities are missing: a sentence; "" if they are there */
    const char *nvtx;      /* why NVTX has no ranges; "": it has them */
    int cupti_version;     /* 130001 is 13.0 Update 1; 0: not used */
    int64_t steps;         /* at least 1 */
    int64_t activities;    /* of the steps */
    int64_t unattributed;  /* of them: launched outside of every range */
    int64_t without_times; /* activities without times of CUPTI: left out */
    int64_t dropped;       /* activities or ranges that were lost for lack of memory */
} td_trace_info;

/** TD_BAD_ARGUMENT: a NULL, here and below also a trace that did not end. The texts are the trace's. */
TD_API td_status td_trace_info_of(const td_trace *trace, td_trace_info *out);

typedef enum td_trace_phase {
    TD_TRACE_FORWARD = 0, /* "forward" */
    TD_TRACE_LOSS,        /* "loss" */
    TD_TRACE_BACKWARD,    /* "backward" */
    TD_TRACE_OPTIMIZER,   /* "optimizer"; also updates during the backward pass */
    TD_TRACE_ELSEWHERE    /* "elsewhere" in a step */
} td_trace_phase;

#define TD_TRACE_PHASES 5

/** NULL for any other value. */
TD_API const char *td_trace_phase_name(td_trace_phase phase);

/** Sets of phases, as bits 1 << phase. */
#define TD_TRACE_ALL_PHASES 31

/** Parts of an attention, by its labels. */
typedef enum td_trace_part {
    TD_TRACE_NO_ATTENTION = 0,
    TD_TRACE_SCORES,  /* "computing attention scores" */
    TD_TRACE_SOFTMAX, /* "computing softmax" */
    TD_TRACE_VALUES,  /* "final matmul" */
    TD_TRACE_FUSED    /* the rest; all of a fused attention */
} td_trace_part;

#define TD_TRACE_PARTS 5

typedef enum td_trace_kind {
    TD_TRACE_OPERATION = 0, /* on a CPU */
    TD_TRACE_KERNEL,
    TD_TRACE_COPY,
    TD_TRACE_FILL
} td_trace_kind;

/** A label or an operation. */
typedef struct td_trace_range {
    const char *name;
    int64_t parent;           /* the range around it; -1: none */
    int64_t begin_ns, end_ns; /* of the host */
    int64_t step;             /* from 0; -1: outside of all */
    bool operation;           /* otherwise a label */
    td_op_class op_class;     /* of the operation that it is or is part of */
    double flops, bytes;      /* of an operation; 0: not told */
    td_trace_phase phase;
    td_trace_part part;
} td_trace_range;

typedef struct td_trace_activity {
    const char *name; /* a kernel's is demangled */
    td_trace_kind kind;
    td_op_class op_class;
    td_trace_phase phase;
    td_trace_part part;
    int64_t step;  /* -1: outside of all */
    int64_t range; /* the innermost one; -1: none */
    int64_t begin_ns, end_ns;
    int64_t bytes; /* of a copy or fill */
    int64_t call;  /* number of its launch in td_trace_calls; -1: none */
    uint32_t device, context, stream, correlation;
    uint32_t graph; /* 0: was no graph's */
    uint64_t node;
    int32_t grid[3], block[3], cluster[3];
    int32_t registers, static_shared, dynamic_shared; /* a thread's; bytes of a block */
} td_trace_activity;

/** A call of CUDA that launched activities. */
typedef struct td_trace_call {
    const char *name;
    int64_t begin_ns, end_ns;
    uint32_t correlation, thread;
} td_trace_call;

/** All of them, in the order of their begins; they are the trace's. */
TD_API td_status td_trace_ranges(const td_trace *trace, const td_trace_range **out, int64_t *count);
TD_API td_status td_trace_activities(const td_trace *trace, const td_trace_activity **out, int64_t *count);
TD_API td_status td_trace_calls(const td_trace *trace, const td_trace_call **out, int64_t *count);

/* ---- tables; times are means of the steps ---- */

/** Some phases of a step. */
typedef struct td_trace_total {
    double window_ms;                  /* from the first activity's begin to the last one's end */
    double busy_ms;                    /* of the window, while at least one activity ran */
    double sum_ms;                     /* sum of the activities' durations */
    double host_ms;                    /* of the ranges with the phases' labels */
    double by_class_ms[TD_OP_CLASSES]; /* of sum_ms */
    double activities,
        by_class[TD_OP_CLASSES];      /* numbers; the second kernel of a split-K GEMM is not counted */
    double operations[TD_OP_CLASSES]; /* number of operations */
    double flops[TD_OP_CLASSES];      /* of the operations */
} td_trace_total;

/** TD_BAD_ARGUMENT: a NULL; no phase, or a bit that is none. TD_NO_MEMORY. */
TD_API td_status td_trace_total_of(const td_trace *trace, unsigned phases, td_trace_total *out);

/** Activities of one name. */
typedef struct td_trace_kernel {
    const char *name;
    td_op_class op_class; /* the one with most of its time */
    int64_t instances;
    double per_pass; /* instances a step */
    double share;    /* of the summed time of all, 0 to 1 */
    double total_ns; /* of all steps */
    td_stats ns;
} td_trace_kernel;

/** The names with the most time first, at most `capacity`. *count: how many names there are.
 *
 *   rows  [capacity]  out
 *
 * TD_BAD_ARGUMENT: a NULL, a capacity below 1, phases as above. TD_NO_MEMORY. */
TD_API td_status td_trace_kernels(const td_trace *trace, unsigned phases, int64_t capacity,
                                  td_trace_kernel *rows, int64_t *count);

/** Ranges of one label, as in nvtx_gpu_proj_sum of Nsight Systems. The projection of a range is the time from
 * the begin of its first activity to the end of its last. */
typedef struct td_trace_label {
    const char *name;
    int64_t instances, activities;
    double total_ns;      /* projected */
    double host_total_ns; /* from label to label */
    td_stats ns;          /* projected */
} td_trace_label;

/** The labels in steps, the longest first, without "step" and "layers.N". Otherwise as td_trace_kernels. */
TD_API td_status td_trace_labels(const td_trace *trace, int64_t capacity, td_trace_label *rows,
                                 int64_t *count);

/** Attention in the forward pass, by its parts. */
typedef struct td_trace_attention {
    double ms[TD_TRACE_PARTS], flops[TD_TRACE_PARTS], bytes[TD_TRACE_PARTS]; /* a step */
} td_trace_attention;

TD_API td_status td_trace_attention_of(const td_trace *trace, td_trace_attention *out);

/** *out = the class of a kernel of this library, PyTorch, cuBLAS or NCCL by its name, mangled or not;
 * TD_OP_OTHER for an unknown name. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_trace_classify(const char *name, td_op_class *out);

/* ---- files; each replaces an older file when it is complete ---- */

/** All ranges, calls and activities in Chrome's format, which Perfetto (ui.perfetto.dev) opens: pid 0 is the
 * host, pid 1 + n GPU n, whose tids are 100 stream + lane. Microseconds since "baseTimeNanoseconds".
 *
 * TD_BAD_ARGUMENT: a NULL, an empty path. TD_IO_ERROR, naming the path and the reason: `path` is no regular
 * file, the folder is missing or not writable, the disk is full. The old file at `path` is then unchanged.
 * TD_NO_MEMORY. A process that may reach RLIMIT_FSIZE must ignore SIGXFSZ, or it dies. */
TD_API td_status td_trace_write_json(const td_trace *trace, const char *path);

/** The last step as an SVG picture: a lane for each class, with the phases as bands. Errors as above. */
TD_API td_status td_trace_write_timeline(const td_trace *trace, const char *path);

TD_END_DECLS

#endif
