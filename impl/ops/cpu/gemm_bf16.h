/** Internal to ops/cpu/: GEMM with the processor's bf16 instructions (AMX or AVX-512). */
#ifndef TD_OPS_CPU_GEMM_BF16_H
#define TD_OPS_CPU_GEMM_BF16_H

#include "ops/ops.h"

/** With fewer multiplications a second thread costs more time than it saves. */
enum { TD_GEMM_GRAIN = 1 << 21 };

/** td_gemm for a dtype of TD_BF16, with defaults filled in. It uses at most OpenMP's maximum of threads; a
 * parallel region must get all of these threads. *done is false and c is unchanged in four cases: the
 * processor has no bf16 instructions, oneDNN has no kernel for the shape, the kernel needs more than `bytes`
 * of scratch, or sgemm is faster. */
td_status td_cpu_gemm_bf16(const td_gemm_shape *shape, const void *a, const void *b, void *c, void *work,
                           size_t bytes, bool *done);

#endif
