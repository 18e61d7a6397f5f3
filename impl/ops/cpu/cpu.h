/** Internal to ops/cpu/: the entries of td_ops_cpu. ops.h has their formulas. ops.c has checked the arguments
 * and filled in defaults. */
#ifndef TD_OPS_CPU_CPU_H
#define TD_OPS_CPU_CPU_H

#include "ops/ops.h"

/** TD_BAD_ARGUMENT naming the first of ids[0 .. count) that is outside [0, bound). */
td_status td_cpu_check_ids(const char *name, const int64_t *ids, int64_t count, int64_t bound);

size_t td_cpu_gemm_work_bytes(const td_gemm_shape *shape);
td_status td_cpu_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                      void *work);

td_status td_cpu_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                   const void *weight, void *y);
size_t td_cpu_embedding_backward_work_bytes(const td_embedding_shape *shape);
td_status td_cpu_embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                    const void *dy, bool accumulate, void *dweight, void *work);

td_status td_cpu_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                 const void *weight, void *y, float *rstd);
td_status td_cpu_residual_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *a,
                                          const void *b, const void *weight, void *sum, void *y, float *rstd);
size_t td_cpu_rmsnorm_backward_work_bytes(const td_rmsnorm_shape *shape);
td_status td_cpu_rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                  const void *weight, const float *rstd, const void *dy, bool accumulate_dx,
                                  void *dx, void *dx_rounded, bool accumulate_dweight, void *dweight,
                                  void *work);

td_status td_cpu_rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos,
                            float *sin);
td_status td_cpu_qkv_split_forward(td_device *dev, const td_heads_shape *shape, const void *qkv,
                                   const float *cos, const float *sin, void *q, void *k, void *v);
td_status td_cpu_qkv_split_backward(td_device *dev, const td_heads_shape *shape, const void *dq,
                                    const void *dk, const void *dv, const float *cos, const float *sin,
                                    void *dqkv);

td_status td_cpu_silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                  const void *up, void *y);
td_status td_cpu_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                   const void *up, const void *dy, void *dgate, void *dup, void *y);

td_status td_cpu_round(td_device *dev, int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype,
                       void *dst);
td_status td_cpu_split(td_device *dev, int64_t count, const float *numbers, void *high, void *low);
td_status td_cpu_join(td_device *dev, int64_t count, const void *high, const void *low, float *numbers);
td_status td_cpu_residual_add(td_device *dev, int64_t count, td_dtype dtype, const void *a, const void *b,
                              void *y);

td_status td_cpu_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y);
td_status td_cpu_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale, const void *y,
                                  const void *dy, void *dx);

size_t td_cpu_cross_entropy_work_bytes(const td_cross_entropy_shape *shape);
td_status td_cpu_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                       const void *logits, const int64_t *targets, float *loss, float *lse,
                                       void *work);
td_status td_cpu_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                        const void *logits, const int64_t *targets, const float *lse,
                                        float scale, void *dlogits);

size_t td_cpu_global_norm_work_bytes(int64_t count, td_dtype dtype);
td_status td_cpu_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                             void *work);
td_status td_cpu_update_begin(td_device *dev, td_update_state *state, float gain);
td_status td_cpu_update_clip(td_device *dev, float max_norm, const float *norm, td_update_state *state);
td_status td_cpu_assign(td_device *dev, void *to, const void *from, size_t bytes);
td_status td_cpu_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                              const td_update_tensors *tensors);
td_status td_cpu_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                            const td_update_tensors *tensors);

#endif
