#include "attention/shape.h"

#include "accounting/accounting.h"
#include "base/check.h"
#include "device/listen.h"

#include <math.h>

td_status td_attention_shape_resolve(const td_attention_shape *shape, td_attention_shape *out)
{
    td_status status = TD_OK;
    td_attention_shape resolved;
    int64_t bytes;

    TD_NOT_NULL(shape, out);
    resolved = *shape;
    TD_CHECK(shape->batch >= 1, "batch is %" PRId64 ", needs at least 1", shape->batch);
    TD_CHECK(shape->heads >= 1, "heads is %" PRId64 ", needs at least 1", shape->heads);
    TD_CHECK(shape->seq >= 1, "seq is %" PRId64 ", needs at least 1", shape->seq);
    TD_CHECK(shape->seq_k >= 0, "seq_k is %" PRId64 ", needs at least 1, or 0 for as many as seq",
             shape->seq_k);
    TD_CHECK(shape->head_dim >= 1, "head_dim is %" PRId64 ", needs at least 1", shape->head_dim);
    TD_CHECK(td_dtype_size(shape->dtype) > 0, "dtype is %d, needs a td_dtype", (int)shape->dtype);
    TD_CHECK(shape->mask == TD_MASK_INF || shape->mask == TD_MASK_ADD_1E6, "mask is %d, needs a td_mask",
             (int)shape->mask);
    TD_CHECK(isfinite(shape->scale) && shape->scale >= 0.0f,
             "scale is %g, needs a finite number above 0, or 0 for 1 / sqrt(head_dim)", (double)shape->scale);
    TD_CHECK(!shape->tf32 || shape->dtype == TD_F32, "tf32 is set, but dtype is %s, needs f32",
             td_dtype_name(shape->dtype));

    if (resolved.seq_k == 0)
        resolved.seq_k = resolved.seq;
    if (resolved.scale == 0.0f)
        resolved.scale = (float)(1.0 / sqrt((double)resolved.head_dim));
    resolved.o_bshd = shape->o_bshd && shape->heads > 1;
    /* Each row may be padded to 16 bytes, as td_gemm counts. */
    const int64_t q[] = {resolved.batch, resolved.heads, resolved.seq, resolved.head_dim, 16};
    const int64_t k[] = {resolved.batch, resolved.heads, resolved.seq_k, resolved.head_dim, 16};
    TD_TRY(td_product("bytes of q", 5, q, &bytes));
    TD_TRY(td_product("bytes of k", 5, k, &bytes));
    TD_CHECK(shape->grad_pitch == 0 || shape->grad_pitch >= shape->heads * shape->head_dim,
             "grad_pitch is %" PRId64 ", needs 0 or at least heads * head_dim, %" PRId64, shape->grad_pitch,
             shape->heads * shape->head_dim);
    TD_CHECK(!shape->cos == !shape->sin, "%s is NULL, needs cos and sin or neither",
             shape->cos ? "sin" : "cos");
    TD_CHECK(!shape->cos || (shape->grad_pitch > 0 && shape->head_dim % 2 == 0),
             "cos is set, needs grad_pitch above 0 and an even head_dim, not %" PRId64 " and %" PRId64,
             shape->grad_pitch, shape->head_dim);
    const int64_t longest = resolved.seq > resolved.seq_k ? resolved.seq : resolved.seq_k;
    const int64_t rows[] = {resolved.batch, longest, resolved.grad_pitch, 16};
    TD_TRY(td_product("bytes of rows of gradients", 4, rows, &bytes));
    *out = resolved;
cleanup:
    return status;
}

td_status td_attention_check_kind(td_device_kind kind, const td_attention_traits *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(kind == TD_DEVICE_CPU || kind == TD_DEVICE_CUDA, "kind is %d, needs to be a td_device_kind",
             (int)kind);
cleanup:
    return status;
}

td_status td_attention_check_pitch(const td_attention_shape *shape, bool packs)
{
    td_status status = TD_OK;

    TD_FAIL_IF(shape->grad_pitch > 0 && !packs, TD_UNSUPPORTED,
               "grad_pitch is %" PRId64 ": gradients of this shape cannot be slices of rows on this device",
               shape->grad_pitch);
cleanup:
    return status;
}

td_status td_attention_check_work(const void *work, size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(work || bytes == 0, "work is NULL, needs %zu bytes", bytes);
    /* The vectors of the kernels need 64. attention.h asks for 256, for all implementations. */
    TD_CHECK((uintptr_t)work % TD_ALIGNMENT == 0, "work is %p, needs a multiple of %d", work, TD_ALIGNMENT);
cleanup:
    return status;
}

td_status td_attention_begin(td_device *dev, const char *name, const td_attention_shape *s, bool backward)
{
    td_status status = TD_OK;
    td_cost cost;

    if (!td_device_listened(dev))
        goto cleanup;
    TD_TRY(td_flash_cost(s->batch, s->heads, s->seq, s->seq_k, s->head_dim, s->dtype, s->causal, backward,
                         &cost));
    td_device_begin_operation(dev, &(td_operation){name, TD_OP_ATTENTION, cost.flops, cost.bytes});
cleanup:
    return status;
}
