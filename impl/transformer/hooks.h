/** How others take part in a step of a model: the optimizer, clipping, data parallelism, sharding.
 *
 * A model has one block of weights, and all that is said here is about ranges of its elements. While the
 * model queues a pass it calls a chain of hooks, in the order in which the device will run the pass. Hooks
 * queue work of their own on the device's current stream, or on others that they order with events. They
 * never wait for the device: a pass may be captured as a graph, whose replays call no hook. What differs from
 * step to step is read from the device's memory, or is the business of a guest of the graph (td_graph_join).
 *
 *     begin     a pass begins
 *     needed    a range of weights is about to be read
 *     done      the range was read for the last time in this pass
 *     room      gradients of a range are about to be written
 *     written   this pass has written them
 *     final     gradients of a range are complete, the last micro-batch's added
 *     output    an operation has written a tensor or a gradient
 *     updated   weights of a range are new
 *     end       the pass ends, also after a failure
 *     settle    outside of passes: all weights are to be there
 *
 * Every element of the block is needed before it is read and done after that. `done` comes before `final`,
 * because the optimizer writes the weights of a range that is final. In the backward pass of the last
 * micro-batch every element becomes final once. The stream has waited for what hooks queued elsewhere when a
 * pass has ended; where that concerns weights alone, when they are next needed.
 *
 * The links of a chain hear begin, needed, done, room, written and end one after the other. final goes to the
 * first link alone, and each link passes it on as it sees fit: a range is final for the next link when this
 * one has reduced it, clipped it or taken off its loss scale. The last of these is the optimizer, which tells
 * the links behind it what it has updated: a link that shares out new weights stands there. The calls below
 * do this. A link leaves out the functions that it does not use: a link without final is passed by.
 *
 * Every function may fail: that ends the pass, and its status is what the pass returns. */
#ifndef TD_TRANSFORMER_HOOKS_H
#define TD_TRANSFORMER_HOOKS_H

#include "base/dtype.h"
#include "base/status.h"
#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_range {
    int64_t begin, end; /* elements of the block of weights: [begin, end) */
} td_range;

/** A range of the block whose masters and gradients this rank has, all masters stored alike. */
typedef struct td_piece {
    td_range range;
    void *at;   /* masters: numbers, or their upper planes */
    void *low;  /* lower planes; NULL: `at` has numbers */
    void *grad; /* gradients; NULL: the model is for inference */
} td_piece;

/** The block of weights: masters, which the optimizer updates, and gradients. A rank has all of it, or pieces
 * (td_transformer_config.owned); other ranks have the rest.
 *
 * In mixed precision the masters of GEMM weights are planes (td_split): the upper 16 bits of all numbers of a
 * piece, which GEMMs read as bf16, then the lower ones. All other masters are numbers of `dtype`. */
typedef struct td_weights {
    int64_t elements; /* of the block, padding included, on whatever rank they are */
    td_dtype dtype;   /* of masters */
    td_dtype grad_dtype;
    int64_t count;
    const td_piece *pieces; /* [count] ascending; owned by the model */

    /* The memory that the pieces are parts of. If this rank has all weights, the elements stand there one
     * after the other. */
    void *params;
    size_t param_bytes;
    void *grads; /* NULL: the model is for inference */
    size_t grad_bytes;
} td_weights;

/** Where masters and gradients are: of the elements from the one that was asked for up to `end`. */
typedef struct td_master {
    void *at;   /* numbers, or their upper planes; NULL: this rank has none of these elements */
    void *low;  /* lower planes; NULL: `at` has numbers */
    void *grad; /* gradients; NULL: this rank has none */
    int64_t end;
} td_master;

/** All are 0 for NULL and for an index out of range. */
TD_API td_master td_weights_master(const td_weights *weights, int64_t index);

typedef enum td_pass {
    TD_PASS_FORWARD = 0,
    TD_PASS_RECOMPUTE, /* The forward of a checkpoint's layers once more: begins and ends within a backward
                        * pass, whose norms it reads. */
    TD_PASS_BACKWARD
} td_pass;

/** What of a range is read. Embedding and norms read masters, which are numbers; GEMMs read the upper planes,
 * or masters if these are no planes. */
typedef enum td_reads { TD_READS_NUMBERS = 0, TD_READS_UPPER } td_reads;

typedef struct td_need {
    td_range range;
    td_reads reads;
} td_need;

/** What an operation of the model writes: a tensor of the arena, or the gradient of a parameter. */
typedef struct td_output {
    const char *name; /* valid during the call */
    const void *at;   /* on the device */
    int64_t count;
    td_dtype dtype;
} td_output;

/** A link of a chain, the first member of what implements it. A function may be NULL. */
typedef struct td_hook td_hook;
struct td_hook {
    td_hook *next;     /* the link behind this one; NULL: none */
    const void *owner; /* the trainer that has the link; NULL: none */

    /** `last`: the last micro-batch of a step, in whose backward pass gradients become final. */
    td_status (*begin)(td_hook *hook, td_pass pass, bool last);

    /** Work that is queued after this call reads the range at *where, which holds the address of its first
     * element in the model's own block and may be changed. *where is NULL if this rank does not have the
     * range in one piece: a link must then set it, or the pass fails with TD_BAD_STATE. It is valid until
     * `done`. `next`: what will be needed after this, so that it can be fetched during the work, also if that
     * is in a recomputation or after it; NULL: nothing more in this pass. */
    td_status (*needed)(td_hook *hook, td_pass pass, const td_need *need, const td_need *next,
                        const void **where);

    td_status (*done)(td_hook *hook, td_pass pass, const td_need *need);

    /** Work that is queued after this call writes gradients of the range at *where, or adds to those that are
     * there. *where holds the address of the first one in the model's own block and may be changed. If this
     * rank does not have the range in one piece it is NULL, as in `needed`. It is valid until `written`; but
     * the next micro-batch adds to what is there then. Elements between weights are not written. The links
     * after this one read gradients in the block: a link that places them elsewhere brings there what it
     * passes on. */
    td_status (*room)(td_hook *hook, td_range range, void **where);

    /** The pass has written all gradients of a range that `room` made room for, after what is queued on the
     * device's current stream. It comes in the backward pass of each micro-batch; in a step's last one
     * `final` follows. */
    td_status (*written)(td_hook *hook, td_range range);

    /** The gradients of the range are in the block, or where `room` has placed them, after `event`; NULL:
     * after what is queued on the device's current stream. The event is recorded again for later ranges at
     * most until the pass has ended. A link that lets another stream reduce them passes them on at once with
     * that stream's event; one that must see all of them first passes them on in `end`. A link may pass on
     * parts of a range: its shard. */
    td_status (*final)(td_hook *hook, td_range range, td_event *event);

    /** New weights of the range are in the block behind `event`; NULL: behind what is
     * queued on the device's current stream. The optimizer tells the links behind it, one after the other:
     * along a backward pass, or in the update that comes after it. */
    td_status (*updated)(td_hook *hook, td_range range, td_event *event);

    /** For debugging: queued work writes these numbers, and later work may overwrite them. A tensor has its
     * name in the memory history ("layers.3.attn.q"), and a parameter's gradient the parameter's name and
     * ".grad". A tensor that is overwritten has a second name: the gradient of t is "t.grad", and t computed
     * once more "t.again". Scratch, rstd and what attention saves are left out. A captured pass fails with
     * TD_BAD_STATE, because it computes nothing yet. */
    td_status (*output)(td_hook *hook, const td_output *output);

    /** `status`: what ended the pass, TD_OK if it is complete. Comes once for every `begin`, also where that
     * failed. What the link holds back goes on to the next one now, or is dropped after a failure. */
    td_status (*end)(td_hook *hook, td_pass pass, td_status status);

    /** Between passes: whoever reads or writes all weights is next, behind what is queued on the device's
     * current stream. A link that has some of them elsewhere, or on their way, brings them to the block. */
    td_status (*settle)(td_hook *hook);
};

/* ---- calls: what a model does, and a link to pass something on ---- */

/* A chain of NULL has no links. TD_BAD_ARGUMENT: another NULL but for `next` and `event`. */

TD_API td_status td_hooks_begin(td_hook *chain, td_pass pass, bool last);
TD_API td_status td_hooks_needed(td_hook *chain, td_pass pass, const td_need *need, const td_need *next,
                                 const void **where);
TD_API td_status td_hooks_done(td_hook *chain, td_pass pass, const td_need *need);
TD_API td_status td_hooks_room(td_hook *chain, td_range range, void **where);
TD_API td_status td_hooks_written(td_hook *chain, td_range range);
TD_API td_status td_hooks_final(td_hook *chain, td_range range, td_event *event);
TD_API td_status td_hooks_updated(td_hook *chain, td_range range, td_event *event);
TD_API td_status td_hooks_settle(td_hook *chain);

/** Ends the pass in every link, whatever the ones before returned; returns `status`, or the first failure if
 * that was TD_OK, which the links behind are told. */
TD_API td_status td_hooks_end(td_hook *chain, td_pass pass, td_status status);

TD_END_DECLS

#endif
