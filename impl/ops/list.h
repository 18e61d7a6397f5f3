/** Internal to impl/: all operations of ops.h. The tables of the devices follow from this list. */
#ifndef TD_OPS_LIST_H
#define TD_OPS_LIST_H

/** OP(name, class, entry of the CPU's table, entry of CUDA's table), for each operation. If CUDA only
 * launches a kernel for it: PLAIN(name, class, entry of the CPU's table, launcher, arguments after dev, their
 * names). */
#define TD_EACH_OP(OP, PLAIN)                                                                                \
    OP(gemm, MATMUL, td_cpu_gemm, td_ops_cuda_gemm)                                                          \
    OP(embedding_forward, ELEMENTWISE, td_cpu_embedding_forward, embedding_forward)                          \
    OP(embedding_backward, REDUCTION, td_cpu_embedding_backward, embedding_backward)                         \
    OP(rmsnorm_forward, REDUCTION, td_cpu_rmsnorm_forward, rmsnorm_forward)                                  \
    OP(residual_rmsnorm_forward, REDUCTION, td_cpu_residual_rmsnorm_forward, residual_rmsnorm_forward)       \
    OP(rmsnorm_backward, REDUCTION, td_cpu_rmsnorm_backward, rmsnorm_backward)                               \
    OP(rope_table, ELEMENTWISE, td_cpu_rope_table, rope_table)                                               \
    PLAIN(qkv_split_forward, ELEMENTWISE, td_cpu_qkv_split_forward, td_cuda_qkv_split_forward,               \
          (const td_heads_shape *shape, const void *qkv, const float *cos, const float *sin, void *q,        \
           void *k, void *v),                                                                                \
          (shape, qkv, cos, sin, q, k, v))                                                                   \
    PLAIN(qkv_split_backward, ELEMENTWISE, td_cpu_qkv_split_backward, td_cuda_qkv_split_backward,            \
          (const td_heads_shape *shape, const void *dq, const void *dk, const void *dv, const float *cos,    \
           const float *sin, void *dqkv),                                                                    \
          (shape, dq, dk, dv, cos, sin, dqkv))                                                               \
    OP(silu_mul_forward, ELEMENTWISE, td_cpu_silu_mul_forward, silu_mul_forward)                             \
    OP(silu_mul_backward, ELEMENTWISE, td_cpu_silu_mul_backward, silu_mul_backward)                          \
    PLAIN(round, ELEMENTWISE, td_cpu_round, td_cuda_round,                                                   \
          (int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype, void *dst),               \
          (count, src_dtype, src, dst_dtype, dst))                                                           \
    PLAIN(split, ELEMENTWISE, td_cpu_split, td_cuda_split,                                                   \
          (int64_t count, const float *numbers, void *high, void *low), (count, numbers, high, low))         \
    PLAIN(join, ELEMENTWISE, td_cpu_join, td_cuda_join,                                                      \
          (int64_t count, const void *high, const void *low, float *numbers), (count, high, low, numbers))   \
    PLAIN(residual_add, ELEMENTWISE, td_cpu_residual_add, td_cuda_residual_add,                              \
          (int64_t count, td_dtype dtype, const void *a, const void *b, void *y), (count, dtype, a, b, y))   \
    OP(softmax_forward, SOFTMAX, td_cpu_softmax_forward, softmax_forward)                                    \
    OP(softmax_backward, SOFTMAX, td_cpu_softmax_backward, softmax_backward)                                 \
    OP(cross_entropy_forward, REDUCTION, td_cpu_cross_entropy_forward, cross_entropy_forward)                \
    OP(cross_entropy_backward, ELEMENTWISE, td_cpu_cross_entropy_backward, cross_entropy_backward)           \
    PLAIN(global_norm, REDUCTION, td_cpu_global_norm, td_cuda_global_norm,                                   \
          (int64_t count, td_dtype dtype, const void *g, float *norm, void *work),                           \
          (count, dtype, g, norm, work))                                                                     \
    PLAIN(update_begin, OPTIMIZER, td_cpu_update_begin, td_cuda_update_begin,                                \
          (td_update_state * state, float gain), (state, gain))                                              \
    PLAIN(update_clip, OPTIMIZER, td_cpu_update_clip, td_cuda_update_clip,                                   \
          (float max_norm, const float *norm, td_update_state *state), (max_norm, norm, state))              \
    PLAIN(assign, OPTIMIZER, td_cpu_assign, td_cuda_assign, (void *to, const void *from, size_t bytes),      \
          (to, from, bytes))                                                                                 \
    OP(adamw_update, OPTIMIZER, td_cpu_adamw_update, adamw_update)                                           \
    OP(sgd_update, OPTIMIZER, td_cpu_sgd_update, sgd_update)

/** WORK(name, entry of the CPU's table, entry of CUDA's table, their arguments), for each size of scratch. */
#define TD_EACH_WORK(WORK)                                                                                   \
    WORK(gemm_work_bytes, td_cpu_gemm_work_bytes, td_ops_cuda_gemm_work_bytes, (const td_gemm_shape *))      \
    WORK(embedding_backward_work_bytes, td_cpu_embedding_backward_work_bytes,                                \
         td_cuda_embedding_backward_work_bytes, (const td_embedding_shape *))                                \
    WORK(rmsnorm_backward_work_bytes, td_cpu_rmsnorm_backward_work_bytes,                                    \
         td_cuda_rmsnorm_backward_work_bytes, (const td_rmsnorm_shape *))                                    \
    WORK(cross_entropy_work_bytes, td_cpu_cross_entropy_work_bytes, td_cuda_cross_entropy_work_bytes,        \
         (const td_cross_entropy_shape *))                                                                   \
    WORK(global_norm_work_bytes, td_cpu_global_norm_work_bytes, global_norm_work_bytes, (int64_t, td_dtype))

#endif
