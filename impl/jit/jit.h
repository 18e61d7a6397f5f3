/** Attention that is compiled at run time for a shape: extents of a head, dtype, mask, scale and layout are
 * constants of the code, so that loops, tiles and registers suit this shape. torch.compile does the same for
 * attention in PyTorch. The interface is attention.h's.
 *
 * On the CPU the system's C compiler makes one function a pass, an online softmax over tiles. On CUDA NVRTC
 * makes kernels of this kind: one launch forward, two backward. In f32 without a mask, with wide heads and
 * long sequences, such tiles are no faster on a GPU. Then cuBLASLt multiplies, and only the softmax is
 * compiled.
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
    /* On the CPU a compiler with the options of gcc and clang: a path, or a name in the system's folders;
     * NULL: "cc". On CUDA the path of the library NVRTC; NULL: the loader looks for it. */
    const char *compiler;
    /* The folder of compiled code, which is created if it is missing; NULL: code ends with the device.
     * Anybody who can write to the folder can run code: entries of other users are not read. */
    const char *cache;
    /* The folder for the compiler's files; NULL: /tmp. CUDA needs none. */
    const char *scratch;
} td_jit_options;

/** Call it before the first use; without it all options are NULL. The texts are copied. TD_BAD_ARGUMENT: a
 * NULL, an empty text. TD_BAD_STATE: the device has compiled code, or looked for the compiler. TD_NO_MEMORY.
 * */
TD_API td_status td_jit_configure(td_device *dev, const td_jit_options *options);

/** What has been compiled for a device so far. */
typedef struct td_jit_info {
    int64_t compiled;   /* passes of shapes with code from the compiler */
    int64_t loaded;     /* passes of shapes with code from the folder */
    int64_t rejected;   /* entries of the folder that are corrupt, of another key, of another user, or
                         * writable by others than their owner */
    double compile_ms;  /* in all: the compiler, and loading what it made */
    double load_ms;     /* in all: reading, checking and loading entries of the folder */
    double find_ms;     /* asking the compiler for its version and the processor, once */
    char compiler[160]; /* path and version; "" before it was asked */
    char note[256];     /* the last fault of the folder, for people; "": none */
} td_jit_info;

/** TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_jit_info_of(td_device *dev, td_jit_info *out);

/** Compiles or loads both passes of the shape that are not in memory. TD_BAD_ARGUMENT and
 * TD_UNSUPPORTED as forward. TD_LIBRARY_ERROR: no compiler of that name, or it failed; the message has its
 * first words. TD_IO_ERROR: no room for its files. A folder that cannot be read or written is no error: the
 * code is compiled, and td_jit_info says so. */
TD_API td_status td_jit_prepare(td_device *dev, const td_attention_shape *shape);

/** The traits with a causal mask; no such shape saves P. TD_BAD_ARGUMENT: NULL, no td_device_kind. */
TD_API td_status td_jit_describe(td_device_kind kind, td_attention_traits *out);

/** Compiles nothing. A size holds for any number of threads, also one set later. TD_UNSUPPORTED as
 * forward. */
TD_API td_status td_jit_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);

/** Forward.
 *
 *   saved  [2, batch, heads, seq] f32: the largest score of a query (on the CPU times log2(e), on CUDA before
 *          it is scaled), and 1 / the sum of its exponentials relative to that; if cuBLASLt multiplies,
 *          P [batch, heads, seq, seq_k]
 *
 * The first call for a shape compiles forward, with the errors of td_jit_prepare. TD_UNSUPPORTED: head_dim
 * above 256 on the CPU or 128 on CUDA, a dtype other than f32 and bf16, tf32. Forward's bits are the same
 * every time, and on the CPU for any number of threads. work may be NULL where td_jit_sizes says 0. */
TD_API td_status td_jit_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                                const void *v, void *o, void *saved, void *work);

/** Backward, with the formulas of attention.h. The first call for a shape compiles backward. P is computed
 * again from the scores, unless it was saved. On CUDA in f32 dQ is added up in any order of blocks, unless
 * the shape is deterministic. */
TD_API td_status td_jit_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                 const void *k, const void *v, const void *o, const void *dout,
                                 const void *saved, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_jit; /* named "jit" */

TD_END_DECLS

#endif
