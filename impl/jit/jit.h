/** Attention compiled at run time for the shape that it is called with: extents of a head, dtype, mask, scale
 * and layout are constants of the code, so that loops, tiles and registers suit that shape alone. What a
 * compiler like torch.compile does for attention as it is written, behind the interface of attention.h.
 *
 * On the CPU the system's C compiler makes one function a pass, an online softmax over tiles; on CUDA NVRTC
 * makes kernels of the same, one launch forward and two backward. Where nothing is masked, heads are wide and
 * sequences long, f32 products of such tiles gain nothing on a GPU: there cuBLASLt multiplies, and the
 * softmax between the products is what is compiled.
 *
 * A pass is compiled when it is first called for a shape, also while a graph is captured. This takes a tenth
 * of a second or more. If it fails, the call returns the error, and a later call compiles again.
 * td_jit_prepare compiles both passes in advance. Compiled code stays in memory until the device is closed.
 * If td_jit_configure names a folder, the code is also kept there, with all that it follows from: source,
 * options, processor or GPU, the compiler's path and version. Batch and heads are no constants. */
#ifndef TD_JIT_JIT_H
#define TD_JIT_JIT_H

#include "attention/attention.h"

TD_BEGIN_DECLS

typedef struct td_jit_options {
    /* On the CPU a compiler that is called as gcc and clang are: a path, or a name looked for in the system's
     * own folders; NULL: "cc". On CUDA the library NVRTC, by its path; NULL: the one that the loader
     * finds. */
    const char *compiler;
    /* The folder of compiled code, which is made where it is not there; NULL: none, and nothing outlives the
     * device. Who can write to it can have code run: entries of other users are not read. */
    const char *cache;
    /* The folder in which the compiler works; NULL: /tmp. CUDA needs none. */
    const char *scratch;
} td_jit_options;

/** Before the first use; without it all options are NULL. The texts are copied. TD_BAD_ARGUMENT: a NULL, an
 * empty text. TD_BAD_STATE: the device has compiled code, or looked for the compiler. TD_NO_MEMORY. */
TD_API td_status td_jit_configure(td_device *dev, const td_jit_options *options);

/** What has been compiled for a device so far. */
typedef struct td_jit_info {
    int64_t compiled;   /* passes of shapes whose code came from the compiler */
    int64_t loaded;     /* and from the folder */
    int64_t rejected;   /* entries of the folder that were corrupt, of another key or another user's,
                         * or that others than their owner may write */
    double compile_ms;  /* in all: the compiler, and loading what it made */
    double load_ms;     /* in all: reading, checking and loading entries of the folder */
    double find_ms;     /* asking the compiler for its version and the processor, once */
    char compiler[160]; /* path and version; "" before it was asked */
    char note[256];     /* what was wrong with the folder last, for people; "" if nothing */
} td_jit_info;

/** TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_jit_info_of(td_device *dev, td_jit_info *out);

/** Compiles or loads both passes of the shape that are not in memory. TD_BAD_ARGUMENT and
 * TD_UNSUPPORTED as forward. TD_LIBRARY_ERROR: no compiler of that name, or it failed; the message has its
 * first words. TD_IO_ERROR: no room for its files. A folder that cannot be read or written is no error: the
 * code is compiled, and td_jit_info says so. */
TD_API td_status td_jit_prepare(td_device *dev, const td_attention_shape *shape);

/** Of attention with a causal mask, where no shape saves P. TD_BAD_ARGUMENT: NULL, no td_device_kind. */
TD_API td_status td_jit_describe(td_device_kind kind, td_attention_traits *out);

/** Compiles nothing. A size holds for any number of threads, also one set later. TD_UNSUPPORTED as
 * forward. */
TD_API td_status td_jit_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);

/** Forward.
 *
 *   saved  [2, batch, heads, seq] f32: the largest score of a query (on the CPU times log2(e), on CUDA before
 *          it is scaled), and 1 / the sum of its exponentials relative to that; where cuBLASLt multiplies P,
 *          [batch, heads, seq, seq_k]
 *
 * The first call for a shape compiles forward, with the errors of td_jit_prepare. TD_UNSUPPORTED: head_dim
 * above 256 on the CPU or 128 on CUDA, a dtype other than f32 and bf16, tf32. Forward's bits are the same
 * every time, and on the CPU for any number of threads. work may be NULL where td_jit_sizes says 0. */
TD_API td_status td_jit_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                                const void *v, void *o, void *saved, void *work);

/** Backward, with the formulas of attention.h. The first call for a shape compiles backward. P is computed
 * again from the scores, unless it was saved. On CUDA in f32 dQ is added up in whatever order blocks come,
 * unless the shape is deterministic. */
TD_API td_status td_jit_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                 const void *k, const void *v, const void *o, const void *dout,
                                 const void *saved, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_jit; /* named "jit" */

TD_END_DECLS

#endif
