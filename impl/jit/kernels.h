/** Internal to jit/: tilings, source and arguments of the kernels of templates/cuda.cu and softmax.cu. Needs
 * no CUDA. */
#ifndef TD_JIT_KERNELS_H
#define TD_JIT_KERNELS_H

#include "attention/attention.h"

/** The launch of a kernel: one block for each tile of `rows` rows of every head. */
typedef struct td_jit_tiling {
    int rows, others; /* rows of a block's own tile, and of each tile that it loops over */
    int threads;
    int bytes; /* bytes of shared memory */
} td_jit_tiling;

typedef struct td_jit_kernels {
    /* true: cuBLASLt runs the GEMMs, scores are in memory, only the softmax is compiled, and the tilings are
     * unused. */
    bool with_gemm;
    td_jit_tiling forward, backward;
    int softmax_threads;
} td_jit_kernels;

/** Largest head_dim and seq of the tiled kernels. */
enum { TD_JIT_CUDA_HEAD_DIM = 128 };
#define TD_JIT_CUDA_SEQ ((int64_t)1 << 30)

/** The kernels for a resolved shape within these limits. */
td_jit_kernels td_jit_kernels_of(const td_attention_shape *shape);

/** The source of a pass; the caller frees it with free(). NULL: no memory. */
char *td_jit_kernels_source(const td_attention_shape *shape, bool backward);

/** The arguments of the kernels in templates/cuda.cu. */
typedef struct td_jit_arguments {
    const void *q, *k, *v, *o_in, *dout;
    void *o, *dq, *dk, *dv;
    const float *max, *inverse; /* forward writes them */
    float *delta;
    int heads, aligned, add_dq;
} td_jit_arguments;

/** The arguments of the kernels in templates/softmax.cu, and their shared memory in forward. */
typedef struct td_jit_softmax_arguments {
    const void *scores; /* forward writes it */
    void *dscores;
    const void *o_in, *dout;
} td_jit_softmax_arguments;

enum { TD_JIT_SOFTMAX_BYTES = 128 };

#endif
