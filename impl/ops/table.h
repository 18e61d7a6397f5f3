/** Internal to impl/: the table of operations that a device fills.
 *
 * The public functions of ops.h check the arguments once and call the entry of their device with every default
 * (leading dimensions, pitches) filled in. ops/cpu/ has every entry and is plain C that one can read as the
 * formula; another device's table may have gaps, and a gap is TD_UNSUPPORTED naming op and device. */
#ifndef TD_OPS_TABLE_H
#define TD_OPS_TABLE_H

#include "ops/ops.h"

typedef struct td_ops {
    const char *device;
    size_t (*gemm_work_bytes)(const td_gemm_shape *);
    td_status (*gemm)(td_device *, const td_gemm_shape *, const void *, const void *, void *, void *);
    td_status (*embedding_forward)(td_device *, const td_embedding_shape *, const int64_t *, const void *,
                                   void *);
    size_t (*embedding_backward_work_bytes)(const td_embedding_shape *);
    td_status (*embedding_backward)(td_device *, const td_embedding_shape *, const int64_t *, const void *,
                                    bool, void *, void *);
    td_status (*rmsnorm_forward)(td_device *, const td_rmsnorm_shape *, const void *, const void *, void *,
                                 float *);
    size_t (*rmsnorm_backward_work_bytes)(const td_rmsnorm_shape *);
    td_status (*rmsnorm_backward)(td_device *, const td_rmsnorm_shape *, const void *, const void *,
                                  const float *, const void *, bool, void *, bool, void *, void *);
    td_status (*heads_split)(td_device *, const td_heads_shape *, const void *, void *);
    td_status (*heads_merge)(td_device *, const td_heads_shape *, const void *, void *);
    td_status (*rope_table)(td_device *, int64_t, int64_t, double, float *, float *);
    td_status (*rope_forward)(td_device *, const td_heads_shape *, const void *, const float *, const float *,
                              void *);
    td_status (*rope_backward)(td_device *, const td_heads_shape *, const void *, const float *,
                               const float *, void *);
    td_status (*silu_mul_forward)(td_device *, const td_rows_shape *, const void *, const void *, void *);
    td_status (*silu_mul_backward)(td_device *, const td_rows_shape *, const void *, const void *,
                                   const void *, void *, void *);
    td_status (*residual_add)(td_device *, int64_t, td_dtype, const void *, const void *, void *);
    td_status (*softmax_forward)(td_device *, const td_softmax_shape *, const void *, void *);
    td_status (*softmax_backward)(td_device *, const td_softmax_shape *, float, const void *, const void *,
                                  void *);
    td_status (*cross_entropy_forward)(td_device *, const td_cross_entropy_shape *, const void *,
                                       const int64_t *, float *, float *);
    td_status (*cross_entropy_backward)(td_device *, const td_cross_entropy_shape *, const void *,
                                        const int64_t *, const float *, float, void *);
    td_status (*adamw_step)(td_device *, const td_adamw *, int64_t, td_dtype, void *, const void *, float *,
                            float *);
    td_status (*sgd_step)(td_device *, float, int64_t, td_dtype, void *, const void *);
} td_ops;

extern const td_ops td_ops_cpu;

#endif
