/** The memory of a step: every block and every tensor, from the device's history.
 *
 * A recording creates a model and runs one pass while the device records its memory events. Blocks are
 * allocations of the device. Tensors lie in blocks. A tensor is alive from its first write to its last use. A
 * planned step allocates its blocks once, so the bytes of blocks stay the same and only tensors come and go.
 * Each block and each tensor has a category, the phase in which it began, and the path of labels at that
 * time.
 *
 *   blocks    the sum of their bytes is exactly the sum that td_device_memory reports
 *   tensors   no two live tensors share memory, and each lies in a block
 *
 * The weights and the two moments of each parameter are separate tensors, and are always alive. The gradient
 * of a parameter is alive from the GEMM that computes it until its update. The embedding's gradient is alive
 * from its last write until its update. */
#ifndef TD_MEMORY_MEMORY_H
#define TD_MEMORY_MEMORY_H

#include "train/train.h"

TD_BEGIN_DECLS

/** The part of a step that is recorded. */
typedef enum td_memory_pass {
    TD_MEMORY_INFERENCE = 0, /* "inference": forward, nothing kept for backward */
    TD_MEMORY_FORWARD,       /* "forward": forward and loss, with all that backward would read */
    TD_MEMORY_STEP           /* "step": forward, loss, backward and AdamW */
} td_memory_pass;

/** *out = the pass with this name. TD_BAD_ARGUMENT: a NULL or an unknown name; the message lists the known
 * names. */
TD_API td_status td_memory_pass_parse(const char *name, td_memory_pass *out);

/** "inference", "forward" or "step"; NULL for any other value. */
TD_API const char *td_memory_pass_name(td_memory_pass pass);

/** What bytes are used for. */
typedef enum td_memory_category {
    TD_MEMORY_WEIGHTS = 0,     /* "weights" */
    TD_MEMORY_GRADIENTS,       /* "gradients" of the weights */
    TD_MEMORY_OPTIMIZER_STATE, /* "optimizer state": moments and hyperparameters */
    TD_MEMORY_ACTIVATIONS,     /* "activations": results of forward, and of its recomputation */
    TD_MEMORY_SCRATCH /* "scratch": work of the operations, gradients of activations, tables, tokens */
} td_memory_category;

#define TD_MEMORY_CATEGORIES 5

/** The name of the category, as in the enum's comments; NULL for any other value. */
TD_API const char *td_memory_category_name(td_memory_category category);

typedef enum td_memory_phase {
    TD_MEMORY_IN_CREATE = 0, /* "create": blocks are allocated, and tokens drawn */
    TD_MEMORY_IN_FORWARD,    /* "forward": with the loss, if there is one */
    TD_MEMORY_IN_BACKWARD,   /* "backward": with updates during the backward pass */
    TD_MEMORY_IN_OPTIMIZER   /* "optimizer": updates after the backward pass */
} td_memory_phase;

#define TD_MEMORY_PHASES 4

/** The name of the phase, as in the enum's comments; NULL for any other value. */
TD_API const char *td_memory_phase_name(td_memory_phase phase);

typedef struct td_memory_config {
    td_transformer_config model; /* `use` and `f32_gradients` are ignored; `owned` is NULL */
    td_memory_pass pass;
    td_update_time time; /* when weights are updated; only TD_MEMORY_STEP reads it */
} td_memory_config;

/** *out = the config of the trainer that td_memory_record creates. TD_BAD_ARGUMENT: a NULL, an unknown pass.
 * TD_UNSUPPORTED: model.owned is not NULL. */
TD_API td_status td_memory_train_config(const td_memory_config *config, td_train_config *out);

/** What happened to a block (ALLOC, FREE, OOM) or to a tensor (LIVE, DEAD). */
typedef struct td_memory_entry {
    td_memory_event event;       /* the device's event; its label belongs to the recording */
    td_memory_category category; /* a block with several categories (the model's arena): activations */
    td_memory_phase phase;
    int64_t pair;      /* index of the other entry of this block or tensor (FREE of ALLOC, ...); -1: none */
    size_t live_bytes; /* of all live tensors, after this entry */
} td_memory_entry;

typedef struct td_memory_recording td_memory_recording;

/** Creates a model on dev with weights of 0, runs one pass with a history, and frees the model. Discards an
 * earlier history of dev. Resets dev's peak. Waits for dev. *out belongs to the caller; free it with
 * td_memory_recording_destroy.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown pass. TD_UNSUPPORTED: model.owned is not NULL. TD_NO_MEMORY: also if
 * the host has no memory for the history. Other errors: as td_train_create and the calls of a step. After an
 * error *out is NULL, and nothing is left on the device. */
TD_API td_status td_memory_record(td_device *dev, const td_memory_config *config, td_memory_recording **out);
TD_API void td_memory_recording_destroy(td_memory_recording *recording); /* accepts NULL */

/** *entries = all entries, in order, which belong to the recording; *count = their number. TD_BAD_ARGUMENT: a
 * NULL. */
TD_API td_status td_memory_entries(const td_memory_recording *recording, const td_memory_entry **entries,
                                   int64_t *count);

/** One phase, or all of them. Bytes count the recording alone, without earlier blocks of the device. */
typedef struct td_memory_span {
    int64_t first, end;                       /* entries [first, end); first == end: there are none */
    int64_t begin_ns, end_ns;                 /* td_clock_ns(); 0: the recording has no such phase */
    size_t allocated_bytes;                   /* peak of the bytes of blocks */
    size_t live_bytes;                        /* peak of the bytes of live tensors */
    size_t begin_bytes, end_bytes;            /* bytes of live tensors at both ends */
    size_t by_category[TD_MEMORY_CATEGORIES]; /* live_bytes by category, at the tensors' peak */
    int64_t peak; /* index of the entry after which live_bytes are live; -1: they are live at the begin */
} td_memory_span;

typedef struct td_memory_summary {
    size_t base_bytes;                      /* on the device before the recording */
    size_t peak_bytes;                      /* the device's peak (td_memory_stats) minus base_bytes */
    size_t allocated[TD_MEMORY_CATEGORIES]; /* planned bytes of the blocks; the sum is peak_bytes */
    td_memory_span phases[TD_MEMORY_PHASES], whole;
    int64_t entries;
} td_memory_summary;

/** *out = the summary of a recording. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_memory_summary_of(const td_memory_recording *recording, td_memory_summary *out);

#define TD_MEMORY_NAME_BYTES 96 /* a parameter's name of at most 55 bytes, a suffix, and a final 0 */

/** Tensors of the same name and size in different layers. */
typedef struct td_memory_tensor {
    char name[TD_MEMORY_NAME_BYTES]; /* "layers.*.ffn.gate_up"; if count is 1, the layer replaces * */
    const char *label;               /* path of the first tensor; the recording owns it */
    size_t bytes;                    /* of each */
    int64_t count;
    td_memory_category category;
    td_memory_phase phase;
    int64_t entry; /* at which the first tensor became live */
} td_memory_tensor;

/** The largest tensors that became live in a phase, the largest first, at most `capacity`.
 *
 *   largest  [capacity]  out  the first *count entries are written
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown phase, a capacity below 1. TD_NO_MEMORY. */
TD_API td_status td_memory_largest(const td_memory_recording *recording, td_memory_phase phase,
                                   int64_t capacity, td_memory_tensor *largest, int64_t *count);

#define TD_MEMORY_CONTRIBUTORS 5

/** The memory of one layer of the model. Bytes of tensors are multiples of TD_ALIGNMENT. */
typedef struct td_memory_block {
    size_t saved_bytes;                               /* of tensors that forward keeps for backward */
    int64_t saved;                                    /* number of these tensors */
    td_memory_tensor largest[TD_MEMORY_CONTRIBUTORS]; /* the largest of them; unused entries are 0 */
    size_t gradient_bytes;                            /* gradients of its weights */
    size_t residual_bytes;                            /* of its input: one tensor of the residual stream */
    size_t scores_bytes;                              /* of its attention's score matrix; 0: there is none */
} td_memory_block;

/** *out = the memory of a layer, from 0 on. TD_BAD_ARGUMENT: a NULL, a layer out of range. TD_NO_MEMORY. */
TD_API td_status td_memory_block_of(const td_memory_recording *recording, int64_t layer,
                                    td_memory_block *out);

/* ---- files; each replaces an older file when it is complete ---- */

/** Writes a snapshot in the format of torch.cuda.memory._dump_snapshot(), for PyTorch's tools and its public
 * viewer: `python -m torch.cuda._memory_viz trace_plot <path>` makes a page of it. PyTorch's segments are
 * blocks of tandem, its blocks are tensors, and its frames are labels (innermost first). The CPU is device 0.
 *
 * TD_BAD_ARGUMENT: a NULL, an empty path. TD_IO_ERROR, naming the path and the reason: `path` is not a
 * regular file, the folder is missing or not writable, the disk is full. The old file at `path` is then
 * unchanged. TD_NO_MEMORY. If the process may reach RLIMIT_FSIZE, it must ignore SIGXFSZ; otherwise the
 * signal kills it. */
TD_API td_status td_memory_write_snapshot(const td_memory_recording *recording, const char *path);

/** The number of events in the snapshot, as PyTorch's tools count them. 0 for NULL. */
TD_API int64_t td_memory_snapshot_events(const td_memory_recording *recording);

/** Writes all entries and phases as one JSON object:
 *
 *   {"device": "cpu", "pass": "step", "base_bytes": 0, "peak_bytes": ..., "live_peak_bytes": ...,
 *    "phases": [{"name": "forward", "first": 7, "end": 90, "begin_ns": ..., "end_ns": ...}, ...],
 *    "events": [{"action": "live", "address": ..., "bytes": ..., "time_ns": ..., "label": "forward/logits",
 *                "category": "activations", "phase": "forward", "pair": 77, "allocated_bytes": ...,
 *                "live_bytes": ...}, ...]}
 *
 * Actions are alloc, free, oom, live and dead; a pair is the index of an event, or null. Errors: as
 * td_memory_write_snapshot. */
TD_API td_status td_memory_write_events(const td_memory_recording *recording, const char *path);

/** Writes an SVG picture. Its x axis is the number of the event; its y axis is the bytes of live tensors,
 * stacked by category. Bands are phases, a line is the bytes of blocks, and a mark is the peak. Errors: as
 * td_memory_write_snapshot. */
TD_API td_status td_memory_write_timeline(const td_memory_recording *recording, const char *path);

TD_END_DECLS

#endif
