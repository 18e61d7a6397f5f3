/** Hooks: how the optimizer, clipping, data parallelism and sharding take part in the steps of a model.
 *
 * A model has one block of weights. A range is some elements of this block. A link is a struct whose first
 * member is a td_hook; links form a chain. While the model queues a pass, it calls the functions of the
 * links, in the order in which the device will run the pass. A hook may queue work on the device's current
 * stream, or on other streams that it orders with events. It never waits for the device: a pass may be
 * captured as a graph, and replays call no hook. Kernels read values that change from step to step
 * from the device's memory, or a guest of the graph sets them before each replay (td_graph_join).
 *
 *     begin     a pass begins
 *     needed    a range of weights is about to be read
 *     done      the range was read for the last time in this pass
 *     tick      after needed and done, so that a link can check which of its work has ended
 *     room      gradients of a range are about to be written
 *     written   this pass has written them
 *     final     gradients of a range are complete, with all micro-batches added
 *     output    an operation has written a tensor or a gradient
 *     updated   weights of a range are new
 *     end       the pass ends, also after a failure
 *     settle    between passes: all weights must be in the block
 *     leave     the memory of the weights is freed after this call
 *
 * For every element `needed` comes before a pass reads it, and `done` after the last read. `done` comes
 * before `final`, because the optimizer writes the weights of a range that is final. In the backward pass of
 * the last micro-batch every element becomes final once. At the end of a pass the stream has waited for the
 * work that hooks queued on other streams. Work on weights may take longer: until the weights are needed
 * again.
 *
 * All links of a chain hear all of these, one after the other, except `final`. Only the first link with a
 * function `final` hears it. It passes a range on when it has reduced it, clipped it or removed the loss
 * scale: it calls td_hooks_final(hook->next, ...). The optimizer is the last link that hears `final`. It
 * calls td_hooks_updated(hook->chain, ...), so that links can send new weights to other ranks. A function
 * may be NULL.
 *
 * Every function may fail. The pass then ends and returns that status. */
#ifndef TD_TRANSFORMER_HOOKS_H
#define TD_TRANSFORMER_HOOKS_H

#include "base/dtype.h"
#include "base/status.h"
#include "device/device.h"

TD_BEGIN_DECLS

typedef struct td_range {
    int64_t begin, end; /* elements of the block of weights: [begin, end) */
} td_range;

/** A range of the block whose masters and gradients this rank has. Either all its masters are numbers, or all
 * are planes. */
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
    int64_t elements; /* of the whole block, on all ranks, padding included */
    td_dtype dtype;   /* of masters */
    td_dtype grad_dtype;
    int64_t count;
    const td_piece *pieces; /* [count] ascending; owned by the model */

    /* The memory that contains all pieces. If this rank has all weights, the gradients lie there one after
     * the other, and so do masters that are numbers. */
    void *params;
    size_t param_bytes;
    void *grads; /* NULL: the model is for inference */
    size_t grad_bytes;
} td_weights;

/** The addresses of masters and gradients of some elements: from the requested element up to `end`. */
typedef struct td_master {
    void *at;   /* numbers, or their upper planes; NULL: this rank has none of these elements */
    void *low;  /* lower planes; NULL: `at` has numbers */
    void *grad; /* gradients; NULL: this rank has none */
    int64_t end;
} td_master;

/** Returns the addresses of element `index` of the block. All fields are 0 for NULL and for an index out of
 * range. */
TD_API td_master td_weights_master(const td_weights *weights, int64_t index);

typedef enum td_pass {
    TD_PASS_FORWARD = 0,
    /* Runs a checkpoint's layers forward again. Begins and ends within a backward pass, and reads that pass's
     * norms. */
    TD_PASS_RECOMPUTE,
    TD_PASS_BACKWARD
} td_pass;

/** A tensor of the arena, or the gradient of a parameter, that an operation writes. */
typedef struct td_output {
    const char *name; /* valid during the call */
    const void *at;   /* on the device */
    int64_t count;
    td_dtype dtype;
} td_output;

/** A link of a chain. An implementation has it as its first member, and casts `hook` to its own type. A
 * function may be NULL. */
typedef struct td_hook td_hook;
struct td_hook {
    td_hook *next;  /* the link after this one; NULL: none */
    td_hook *chain; /* the first link of the chain that has this one; NULL: the link is in no trainer */
    bool silent;    /* none of its functions is called, except output and leave */
    bool stays;     /* a silent link still gets all calls, but must communicate nothing */
    bool late;      /* the link passes gradients on in `end` only */
    bool captured;  /* the trainer captures its passes as graphs; the trainer sets it */

    /** `last`: the backward pass of a step's last micro-batch, in which gradients become final. */
    td_status (*begin)(td_hook *hook, td_pass pass, bool last);

    /** Work that is queued after this call reads the range at *where, until `done`. If the masters of the
     * range are planes, the work reads the upper planes; else it reads the masters. *where is the address of
     * the range's first element in the model's block, and a link may change it. *where is NULL if this rank
     * does not have the range in one piece: a link must then set it, or the pass fails with TD_BAD_STATE.
     * `next`: the range that the pass, or a recomputation in it, needs after this one, so that a link can
     * fetch it during the work; NULL: none. */
    td_status (*needed)(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                        const void **where);

    td_status (*done)(td_hook *hook, td_pass pass, td_range range);

    /** The work of the pass so far is queued. */
    td_status (*tick)(td_hook *hook);

    /** Work that is queued after this call writes gradients of the range to *where, or adds to them, until
     * `written`. *where is the address of the range's first gradient in the model's block, and a link may
     * change it. If this rank does not have the range in one piece, *where is NULL, and a link must set it,
     * as in `needed`. The next micro-batch adds to the gradients at this address. Elements between weights
     * are not written. The links after this one read gradients in the block: a link with another address
     * copies them there before it passes them on. */
    td_status (*room)(td_hook *hook, td_range range, void **where);

    /** The work that is queued on the device's current stream writes the last gradients of the range; `room`
     * was called for it. `written` is called in the backward pass of each micro-batch. In a step's last
     * micro-batch `final` follows. */
    td_status (*written)(td_hook *hook, td_range range);

    /** The gradients of the range are complete after `event`; NULL: after the work on the device's current
     * stream. They are in the block, or at the address from `room`. The same event may be recorded again for
     * later ranges until the pass ends. If another stream reduces gradients, the link passes them on at once
     * with that stream's event. A link that must see all gradients first passes them on in `end`. A link may
     * pass on a part of a range: its shard. */
    td_status (*final)(td_hook *hook, td_range range, td_event *event);

    /** New weights of the range are in the block after `event`; NULL: after the work on the device's current
     * stream. The optimizer tells all links, during a backward pass or in the update after it. */
    td_status (*updated)(td_hook *hook, td_range range, td_event *event);

    /** For debugging: queued work writes these numbers, and later work may overwrite them. A tensor has
     * its name in the memory history ("layers.3.attn.q"), and a parameter's gradient the parameter's name
     * and ".grad". A tensor that is overwritten has a second name: the gradient of t is "t.grad"
     * ("t.grad.rounded": its 16-bit copy), and t computed once more "t.again". Scratch, rstd and what
     * attention saves are left out. A captured pass fails with TD_BAD_STATE, because it computes nothing
     * yet. */
    td_status (*output)(td_hook *hook, const td_output *output);

    /** `status`: the error that ended the pass; TD_OK: the pass is complete. `end` comes once for every
     * `begin`, also if `begin` failed. If the link has kept gradients back, it passes them on now, or drops
     * them after a failure. */
    td_status (*end)(td_hook *hook, td_pass pass, td_status status);

    /** Between passes: the caller will read or write all weights, after the work on the device's current
     * stream. If weights are on other ranks or still being copied, the link brings them to the block. */
    td_status (*settle)(td_hook *hook);

    /** The trainer is destroyed: the link waits for its work on the trainer's memory. */
    void (*leave)(td_hook *hook);
};

/* ---- how a model calls hooks, and how a link calls the next links ---- */

/* Each function calls the links' function of the same name, from `chain` on, until one fails. td_hooks_begin
 * calls all links, also after one has failed. td_hooks_final calls only the first link that has `final`. A
 * chain of NULL has no links. TD_BAD_ARGUMENT: `where` is NULL. */

TD_API td_status td_hooks_begin(td_hook *chain, td_pass pass, bool last);
TD_API td_status td_hooks_needed(td_hook *chain, td_pass pass, td_range range, const td_range *next,
                                 const void **where);
TD_API td_status td_hooks_done(td_hook *chain, td_pass pass, td_range range);
TD_API td_status td_hooks_room(td_hook *chain, td_range range, void **where);
TD_API td_status td_hooks_written(td_hook *chain, td_range range);
TD_API td_status td_hooks_final(td_hook *chain, td_range range, td_event *event);
TD_API td_status td_hooks_updated(td_hook *chain, td_range range, td_event *event);
TD_API td_status td_hooks_settle(td_hook *chain);

/** Ends the pass in every link, also after one has failed. Returns `status`. If `status` is TD_OK, it returns
 * the first failure, and the links after that one get the failure as their status. */
TD_API td_status td_hooks_end(td_hook *chain, td_pass pass, td_status status);

TD_END_DECLS

#endif
