/** Internal to impl/: the table of operations that a device fills.
 *
 * The public functions of ops.h check the arguments once and call the entry of their device with every
 * default (leading dimensions, pitches) filled in. ops/cpu/ has every entry, in plain C that reads like the
 * formula. Another device's table may have NULL entries: they give TD_UNSUPPORTED, naming op and device. */
#ifndef TD_OPS_TABLE_H
#define TD_OPS_TABLE_H

#include "ops/ops.h"

/** Sets of types, as bits 1 << dtype. */
enum { TD_CPU_DTYPES = 1 << TD_F32 | 1 << TD_BF16, TD_CUDA_DTYPES = TD_CPU_DTYPES | 1 << TD_F16 };

typedef struct td_ops {
    const char *device;
    unsigned dtypes; /* the types that it has kernels for */
    size_t (*gemm_work_bytes)(const td_gemm_shape *);
    td_status (*gemm)(td_device *, const td_gemm_shape *, const void *, const void *, void *, void *);
    td_status (*embedding_forward)(td_device *, const td_embedding_shape *, const int64_t *, const void *,
                                   void *);
    size_t (*embedding_backward_work_bytes)(const td_embedding_shape *);
    td_status (*embedding_backward)(td_device *, const td_embedding_shape *, const int64_t *, const void *,
                                    bool, void *, void *);
    td_status (*rmsnorm_forward)(td_device *, const td_rmsnorm_shape *, const void *, const void *, void *,
                                 float *);
    td_status (*residual_rmsnorm_forward)(td_device *, const td_rmsnorm_shape *, const void *, const void *,
                                          const void *, void *, void *, float *);
    size_t (*rmsnorm_backward_work_bytes)(const td_rmsnorm_shape *);
    td_status (*rmsnorm_backward)(td_device *, const td_rmsnorm_shape *, const void *, const void *,
                                  const float *, const void *, bool, void *, void *, bool, void *, void *);
    td_status (*rope_table)(td_device *, int64_t, int64_t, double, float *, float *);
    td_status (*qkv_split_forward)(td_device *, const td_heads_shape *, const void *, const float *,
                                   const float *, void *, void *, void *);
    td_status (*qkv_split_backward)(td_device *, const td_heads_shape *, const void *, const void *,
                                    const void *, const float *, const float *, void *);
    td_status (*silu_mul_forward)(td_device *, const td_rows_shape *, const void *, const void *, void *);
    td_status (*silu_mul_backward)(td_device *, const td_rows_shape *, const void *, const void *,
                                   const void *, void *, void *, void *);
    td_status (*round)(td_device *, int64_t, td_dtype, const void *, td_dtype, void *);
    td_status (*split)(td_device *, int64_t, const float *, void *, void *);
    td_status (*join)(td_device *, int64_t, const void *, const void *, float *);
    td_status (*residual_add)(td_device *, int64_t, td_dtype, const void *, const void *, void *);
    td_status (*softmax_forward)(td_device *, const td_softmax_shape *, const void *, void *);
    td_status (*softmax_backward)(td_device *, const td_softmax_shape *, float, const void *, const void *,
                                  void *);
    size_t (*cross_entropy_work_bytes)(const td_cross_entropy_shape *);
    td_status (*cross_entropy_forward)(td_device *, const td_cross_entropy_shape *, const void *,
                                       const int64_t *, float *, float *, void *);
    td_status (*cross_entropy_backward)(td_device *, const td_cross_entropy_shape *, const void *,
                                        const int64_t *, const float *, float, void *);
    size_t (*global_norm_work_bytes)(int64_t, td_dtype);
    td_status (*global_norm)(td_device *, int64_t, td_dtype, const void *, float *, void *);
    td_status (*update_begin)(td_device *, td_update_state *, float);
    td_status (*update_clip)(td_device *, float, const float *, td_update_state *);
    td_status (*assign)(td_device *, void *, const void *, size_t);
    td_status (*adamw_update)(td_device *, const td_adamw *, const td_update_state *,
                              const td_update_tensors *);
    bool (*update_has_sms)(td_device *); /* NULL: never */
    td_status (*sgd_update)(td_device *, const td_sgd *, const td_update_state *, const td_update_tensors *);
} td_ops;

extern const td_ops td_ops_cpu;
extern const td_ops td_ops_cuda; /* if TANDEM_HAVE_CUDA is defined */

#endif
