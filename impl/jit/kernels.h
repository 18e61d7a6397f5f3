/** Internal to jit/: what the kernels of templates/cuda.cu and softmax.cu are for a shape, their source, and
 * what they are launched with. It needs no CUDA. */
#ifndef TD_JIT_KERNELS_H
#define TD_JIT_KERNELS_H

#include "attention/attention.h"

/** How a kernel is launched: a block for each tile of `rows` rows of every head. */
typedef struct td_jit_tiling {
    int rows, others; /* that a block keeps, and that it walks over at a time */
    int threads;
    int bytes; /* of shared memory */
} td_jit_tiling;

typedef struct td_jit_kernels {
    /* Scores are in memory, products a library's, and the softmax alone is compiled; the tilings are then
     * unused. */
    bool products;
    td_jit_tiling forward, backward;
    int softmax_threads;
} td_jit_kernels;

/** The largest head_dim that there are tiles for, and seq. */
enum { TD_JIT_CUDA_HEAD_DIM = 128 };
#define TD_JIT_CUDA_SEQ ((int64_t)1 << 30)

/** Of a resolved shape that is not beyond these. */
td_jit_kernels td_jit_kernels_of(const td_attention_shape *shape);

/** The source of a pass, in memory of malloc; NULL: there was none. */
char *td_jit_kernels_source(const td_attention_shape *shape, bool backward);

/** As templates/cuda.cu has them. */
typedef struct td_jit_arguments {
    const void *q, *k, *v, *o_in, *dout;
    void *o, *dq, *dk, *dv;
    const float *max, *inverse; /* forward writes them */
    float *delta;
    int heads, aligned, add_dq;
} td_jit_arguments;

/** As templates/softmax.cu has them; and its shared memory, forward. */
typedef struct td_jit_softmax_arguments {
    const void *scores; /* forward writes it */
    void *dscores;
    const void *o_in, *dout;
} td_jit_softmax_arguments;

enum { TD_JIT_SOFTMAX_BYTES = 128 };

#endif
