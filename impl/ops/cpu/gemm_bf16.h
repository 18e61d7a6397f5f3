/** Internal to ops/cpu/: the matrix product by the processor's own bf16 products, AMX's or AVX-512's. */
#ifndef TD_OPS_CPU_GEMM_BF16_H
#define TD_OPS_CPU_GEMM_BF16_H

#include "ops/ops.h"

/** Multiplications below which a second thread costs more than it saves. */
enum { TD_GEMM_GRAIN = 1 << 21 };

/** td_gemm for a dtype of TD_BF16, with defaults filled in. It uses at most OpenMP's maximum of threads,
 * which a parallel region must get for certain, and any amount of scratch. *done is false, and c as it was,
 * where the processor has no bf16 products, oneDNN none for this shape in `bytes`, or they would not pay. */
td_status td_cpu_gemm_bf16(const td_gemm_shape *shape, const void *a, const void *b, void *c, void *work,
                           size_t bytes, bool *done);

#endif
