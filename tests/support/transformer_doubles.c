/* Every operation that a model calls, told to fail (support/fault.h). Who links this wraps them, as
 * CMakeLists.txt lists them. */
#include "attention/attention.h"
#include "base/rng.h"
#include "ops/ops.h"
#include "support/fault.h"

TD_FAULT(td_gemm,
         (td_device * dev, const td_gemm_shape *shape, const void *a, const void *b, void *c, void *work),
         (dev, shape, a, b, c, work))
TD_FAULT(td_gemm_work_bytes, (td_device * dev, const td_gemm_shape *shape, size_t *out), (dev, shape, out))
TD_FAULT(td_embedding_forward,
         (td_device * dev, const td_embedding_shape *shape, const int64_t *ids, const void *weight, void *y),
         (dev, shape, ids, weight, y))
TD_FAULT(td_embedding_backward_work_bytes, (td_device * dev, const td_embedding_shape *shape, size_t *out),
         (dev, shape, out))
TD_FAULT(td_embedding_backward,
         (td_device * dev, const td_embedding_shape *shape, const int64_t *ids, const void *dy,
          bool accumulate, void *dweight, void *work),
         (dev, shape, ids, dy, accumulate, dweight, work))
TD_FAULT(td_rmsnorm_forward,
         (td_device * dev, const td_rmsnorm_shape *shape, const void *x, const void *weight, void *y,
          float *rstd),
         (dev, shape, x, weight, y, rstd))
TD_FAULT(td_residual_rmsnorm_forward,
         (td_device * dev, const td_rmsnorm_shape *shape, const void *a, const void *b, const void *weight,
          void *sum, void *y, float *rstd),
         (dev, shape, a, b, weight, sum, y, rstd))
TD_FAULT(td_rmsnorm_backward_work_bytes, (td_device * dev, const td_rmsnorm_shape *shape, size_t *out),
         (dev, shape, out))
TD_FAULT(td_rmsnorm_backward,
         (td_device * dev, const td_rmsnorm_shape *shape, const void *x, const void *weight,
          const float *rstd, const void *dy, bool accumulate_dx, void *dx, void *dx_rounded,
          bool accumulate_dweight, void *dweight, void *work),
         (dev, shape, x, weight, rstd, dy, accumulate_dx, dx, dx_rounded, accumulate_dweight, dweight, work))
TD_FAULT(td_rope_table,
         (td_device * dev, int64_t positions, int64_t head_dim, double theta, float *cos, float *sin),
         (dev, positions, head_dim, theta, cos, sin))
TD_FAULT(td_qkv_split_forward,
         (td_device * dev, const td_heads_shape *shape, const void *qkv, const float *cos, const float *sin,
          void *q, void *k, void *v),
         (dev, shape, qkv, cos, sin, q, k, v))
TD_FAULT(td_qkv_split_backward,
         (td_device * dev, const td_heads_shape *shape, const void *dq, const void *dk, const void *dv,
          const float *cos, const float *sin, void *dqkv),
         (dev, shape, dq, dk, dv, cos, sin, dqkv))
TD_FAULT(td_silu_mul_forward,
         (td_device * dev, const td_rows_shape *shape, const void *gate, const void *up, void *y),
         (dev, shape, gate, up, y))
TD_FAULT(td_silu_mul_backward,
         (td_device * dev, const td_rows_shape *shape, const void *gate, const void *up, const void *dy,
          void *dgate, void *dup, void *y),
         (dev, shape, gate, up, dy, dgate, dup, y))
TD_FAULT(td_split, (td_device * dev, int64_t count, const float *numbers, void *high, void *low),
         (dev, count, numbers, high, low))
TD_FAULT(td_join, (td_device * dev, int64_t count, const void *high, const void *low, float *numbers),
         (dev, count, high, low, numbers))
TD_FAULT(td_softmax_forward, (td_device * dev, const td_softmax_shape *shape, const void *x, void *y),
         (dev, shape, x, y))
TD_FAULT(td_softmax_backward,
         (td_device * dev, const td_softmax_shape *shape, float scale, const void *y, const void *dy,
          void *dx),
         (dev, shape, scale, y, dy, dx))
TD_FAULT(td_cross_entropy_work_bytes, (td_device * dev, const td_cross_entropy_shape *shape, size_t *out),
         (dev, shape, out))
TD_FAULT(td_cross_entropy_forward,
         (td_device * dev, const td_cross_entropy_shape *shape, const void *logits, const int64_t *targets,
          float *loss, float *lse, void *work),
         (dev, shape, logits, targets, loss, lse, work))
TD_FAULT(td_cross_entropy_backward,
         (td_device * dev, const td_cross_entropy_shape *shape, const void *logits, const int64_t *targets,
          const float *lse, float scale, void *dlogits),
         (dev, shape, logits, targets, lse, scale, dlogits))
TD_FAULT(td_attention_shape_resolve, (const td_attention_shape *shape, td_attention_shape *out), (shape, out))
TD_FAULT(td_device_copy, (td_device * dev, void *dst, const void *src, size_t bytes), (dev, dst, src, bytes))
TD_FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_download, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_fill, (td_device * dev, void *dst, int value, size_t bytes), (dev, dst, value, bytes))
TD_FAULT(td_device_push_label, (td_device * dev, const char *label), (dev, label))
TD_FAULT(td_device_note_live, (td_device * dev, const char *name, const void *address, size_t bytes),
         (dev, name, address, bytes))
TD_FAULT(td_device_note_dead, (td_device * dev, const char *name, const void *address, size_t bytes),
         (dev, name, address, bytes))
TD_FAULT(td_convert, (int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype, void *dst),
         (count, src_dtype, src, dst_dtype, dst))
TD_FAULT(td_rng_truncated_normal,
         (const td_rng *rng, int64_t offset, int64_t count, float mean, float std, float low, float high,
          float *out),
         (rng, offset, count, mean, std, low, high, out))
TD_FAULT(td_rng_uniform,
         (const td_rng *rng, int64_t offset, int64_t count, float low, float high, float *out),
         (rng, offset, count, low, high, out))

td_status __real_td_device_pop_label(td_device *dev);
td_status __wrap_td_device_pop_label(td_device *dev);

/* It pops all the same: labels stay balanced. */
td_status __wrap_td_device_pop_label(td_device *dev)
{
    const td_status status = __real_td_device_pop_label(dev);

    return td_fault("td_device_pop_label") ? td_fail(TD_IO_ERROR, "td_device_pop_label was told to fail")
                                           : status;
}
