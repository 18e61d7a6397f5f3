/** Attention compiled at run time for a shape. seq, seq_k, head_dim, dtype, mask, scale and layout are
 * constants of the code, so that loops, tiles and registers fit the shape. Batch and heads are not constants.
 * torch.compile does the same for attention in PyTorch. attention.h describes shapes, tensors and errors.
 *
 * On the CPU the system's C compiler makes one function for each pass: an online softmax over tiles. On CUDA,
 * NVRTC makes kernels of the same kind: one launch in forward, two in backward. In f32 without a mask such
 * tiles are not faster for wide heads and long sequences. cuBLASLt then runs the GEMMs, and only the softmax
 * is compiled.
 *
 * A pass is compiled at the first call for a shape, also during a graph capture. This takes a tenth of a
 * second or more. If it fails, the call returns the error, and a later call tries again. td_jit_prepare
 * compiles both passes in advance. Compiled code stays in memory until the device is closed. td_jit_configure
 * can name a folder that also stores the code. Stored code is used only if everything it depends on is the
 * same: source, options, processor or GPU, and the compiler's path and version. */
#ifndef TD_JIT_JIT_H
#define TD_JIT_JIT_H

#include "attention/attention.h"

TD_BEGIN_DECLS

typedef struct td_jit_options {
    /* CPU: a compiler with the options of gcc or clang, as a path or a name in the system's folders; NULL:
     * "cc". CUDA: the path of the NVRTC library; NULL: the loader finds it. */
    const char *compiler;
    /* The folder of compiled code, created if it is missing; NULL: code is kept in memory only. Whoever can
     * write to the folder can run code in this process; entries of other users are not read. */
    const char *cache;
    /* The folder for the compiler's temporary files; NULL: /tmp. CUDA needs none. */
    const char *scratch;
} td_jit_options;

/** Sets the options of a device. Call it before the first use; without it all options are NULL. The texts are
 * copied. TD_BAD_ARGUMENT: a NULL, an empty text. TD_BAD_STATE: the device has already looked for its
 * compiler. TD_NO_MEMORY. */
TD_API td_status td_jit_configure(td_device *dev, const td_jit_options *options);

/** Counts of the passes that were compiled for a device so far. */
typedef struct td_jit_info {
    int64_t compiled;   /* number of passes that were compiled */
    int64_t loaded;     /* number of passes that were loaded from the folder */
    int64_t rejected;   /* entries of the folder that were not used: corrupt, of another key, of another
                         * user, or writable by other users */
    double compile_ms;  /* total time of compiling and of loading the result */
    double load_ms;     /* total time of reading, checking and loading entries of the folder */
    double find_ms;     /* time to find and examine the compiler, once */
    char compiler[160]; /* its path and version; "" before the first use */
    char note[256];     /* the last error of the folder, a text for people; "": none */
} td_jit_info;

/** *out = the counters of a device. TD_BAD_ARGUMENT: a NULL. */
TD_API td_status td_jit_info_of(td_device *dev, td_jit_info *out);

/** Compiles or loads both passes for the shape, unless they are in memory. TD_BAD_ARGUMENT, TD_UNSUPPORTED:
 * as td_jit_forward. TD_LIBRARY_ERROR: there is no such compiler, or it failed; the message has the first
 * line of its error. TD_IO_ERROR: its temporary files cannot be written. TD_NO_MEMORY. A folder that cannot
 * be read or written is not an error: the code is compiled, and td_jit_info has a note. */
TD_API td_status td_jit_prepare(td_device *dev, const td_attention_shape *shape);

/** *out = the traits for shapes with a causal mask; without a mask P may be saved instead. If this build has
 * no CUDA, the traits of CUDA have no dtypes. TD_BAD_ARGUMENT: out is NULL, kind is not a td_device_kind. */
TD_API td_status td_jit_describe(td_device_kind kind, td_attention_traits *out);

/** *out = the bytes of saved and work; compiles nothing. They are enough for any number of threads, also if
 * it changes later. TD_BAD_ARGUMENT, TD_UNSUPPORTED: as td_jit_forward. */
TD_API td_status td_jit_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);

/** Forward. Tensors: as td_attention_impl, with the sizes of td_jit_sizes.
 *
 *   saved  out  f32  [2, batch, heads, seq]: the largest score of each query (on the CPU times log2(e), on
 *                    CUDA before the scale), then 1 / sum(exp(score - largest score)). If cuBLASLt runs the
 *                    GEMMs: P [batch, heads, seq, seq_k]
 *
 * The first call for a shape compiles forward, with the errors of td_jit_prepare. TD_UNSUPPORTED: head_dim
 * above 256 on the CPU or 128 on CUDA; a dtype other than f32 and bf16; tf32; seq or seq_k above 2^30; on
 * CUDA more rows than a grid has blocks. o and saved have the same bits at every call, and on the CPU for any
 * number of threads. */
TD_API td_status td_jit_forward(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                                const void *v, void *o, void *saved, void *work);

/** Backward, with the formulas and tensors of attention.h. The first call for a shape compiles it. P is
 * computed again from the scores, unless forward saved it. On CUDA in f32, blocks add to dQ in any order,
 * unless shape->deterministic is set. */
TD_API td_status td_jit_backward(td_device *dev, const td_attention_shape *shape, const void *q,
                                 const void *k, const void *v, const void *o, const void *dout,
                                 const void *saved, void *dq, void *dk, void *dv, void *work);

TD_API extern const td_attention_impl td_attention_jit; /* its name is "jit" */

TD_END_DECLS

#endif
