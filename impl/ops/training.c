/* The loss, clipping, and updates of weights. */
#include "base/check.h"
#include "ops/checks.h"
#include "ops/ops.h"

#include <float.h>

/* ---- cross entropy ---- */

static td_status check_cross_entropy(const td_device *dev, const td_cross_entropy_shape *shape)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, shape);
    TD_TRY(check_extent("rows", shape->rows));
    TD_TRY(check_extent("vocab", shape->vocab));
    TD_TRY(check_dtype(dev, shape->dtype));
    TD_TRY(check_size("rows * vocab", shape->rows, shape->vocab, 1));
cleanup:
    return status;
}

td_status td_cross_entropy_work_bytes(td_device *dev, const td_cross_entropy_shape *shape, size_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_cross_entropy(dev, shape));
    TD_CHECK(out, "out is NULL");
    TD_TRY(WORK_BYTES(dev, cross_entropy, out, shape));
cleanup:
    return status;
}

td_status td_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape, const void *logits,
                                   const int64_t *targets, float *loss, float *lse, void *work)
{
    td_status status = TD_OK;
    size_t bytes = 0;

    TD_TRY(check_cross_entropy(dev, shape));
    TD_TRY(WORK_BYTES(dev, cross_entropy, &bytes, shape));
    TD_NOT_NULL(logits, targets, loss, lse);
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, cross_entropy_forward, shape, logits, targets, loss, lse, work));
cleanup:
    return status;
}

td_status td_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape, const void *logits,
                                    const int64_t *targets, const float *lse, float scale, void *dlogits)
{
    td_status status = TD_OK;

    TD_TRY(check_cross_entropy(dev, shape));
    TD_TRY(check_finite("scale", (double)scale));
    TD_NOT_NULL(logits, targets, lse, dlogits);
    TD_TRY(CALL(dev, cross_entropy_backward, shape, logits, targets, lse, scale, dlogits));
cleanup:
    return status;
}

/* ---- gradients and optimizers ---- */

static td_status check_array(const td_device *dev, int64_t count, td_dtype dtype)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_extent("count", count));
    TD_TRY(check_dtype(dev, dtype));
    TD_TRY(check_size("count", count, 1, 1));
cleanup:
    return status;
}

td_status td_global_norm_work_bytes(td_device *dev, int64_t count, td_dtype dtype, size_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_array(dev, count, dtype));
    TD_CHECK(out, "out is NULL");
    TD_TRY(WORK_BYTES(dev, global_norm, out, count, dtype));
cleanup:
    return status;
}

td_status td_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                         void *work)
{
    td_status status = TD_OK;
    size_t bytes = 0;

    TD_TRY(check_array(dev, count, dtype));
    TD_TRY(WORK_BYTES(dev, global_norm, &bytes, count, dtype));
    TD_NOT_NULL(g, norm);
    TD_TRY(check_work(work, bytes));
    TD_TRY(CALL(dev, global_norm, count, dtype, g, norm, work));
cleanup:
    return status;
}

/* A step computes in f32, so a scalar of float64 must be finite in f32 too. */
static bool fits_f32(double value)
{
    return fabs(value) <= (double)FLT_MAX; /* false for NaN */
}

/* Whether the host can read dev's memory. */
static bool sees(const td_device *dev)
{
    return td_device_kind_of(dev) == TD_DEVICE_CPU;
}

static td_status check_state(const td_device *dev, const td_update_state *state)
{
    td_status status = TD_OK;

    TD_CHECK(state, "state is NULL");
    TD_CHECK(!sees(dev) || state->step >= 1, "step is %" PRId64 ", needs at least 1", state->step);
cleanup:
    return status;
}

td_status td_update_begin(td_device *dev, td_update_state *state, float gain)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, state);
    TD_TRY(check_finite("gain", (double)gain));
    TD_TRY(CALL(dev, update_begin, state, gain));
cleanup:
    return status;
}

td_status td_update_clip(td_device *dev, float max_norm, const float *norm, td_update_state *state)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(isfinite(max_norm) && max_norm > 0, "max_norm is %g, needs to be above 0 and finite",
             (double)max_norm);
    TD_NOT_NULL(norm, state);
    TD_TRY(CALL(dev, update_clip, max_norm, norm, state));
cleanup:
    return status;
}

td_status td_assign(td_device *dev, void *to, const void *from, size_t bytes)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, to, from);
    TD_CHECK(bytes >= 1 && bytes <= TD_ASSIGN_MOST, "bytes is %zu, needs 1 to %d", bytes, TD_ASSIGN_MOST);
    TD_TRY(CALL(dev, assign, to, from, bytes));
cleanup:
    return status;
}

td_adamw td_adamw_defaults(td_adamw_variant variant)
{
    return (td_adamw){
        .variant = variant, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
}

td_status td_adamw_check(const td_adamw *adamw)
{
    td_status status = TD_OK;

    TD_CHECK(adamw, "adamw is NULL");
    TD_CHECK(adamw->variant == TD_ADAMW_COURSE2025 || adamw->variant == TD_ADAMW_COURSE2026 ||
                 adamw->variant == TD_ADAMW_TORCH,
             "variant is %d, needs to be a td_adamw_variant", (int)adamw->variant);
    TD_CHECK(fits_f32(adamw->lr) && adamw->lr >= 0.0, "lr is %g, needs at least 0 and to be finite in f32",
             adamw->lr);
    TD_CHECK(adamw->beta1 >= 0.0 && adamw->beta1 < 1.0, "beta1 is %g, needs at least 0 and less than 1",
             adamw->beta1);
    TD_CHECK(adamw->beta2 >= 0.0 && adamw->beta2 < 1.0, "beta2 is %g, needs at least 0 and less than 1",
             adamw->beta2);
    TD_CHECK(fits_f32(adamw->eps) && adamw->eps >= 0.0, "eps is %g, needs at least 0 and to be finite in f32",
             adamw->eps);
    TD_CHECK(fits_f32(adamw->weight_decay), "weight_decay is %g, needs to be finite in f32",
             adamw->weight_decay);
    TD_CHECK((float)adamw->eps > 0.0f || adamw->beta2 > 0.0,
             "eps is %g and beta2 is 0, needs one above 0: else the step of a gradient of 0 is 0 / 0",
             adamw->eps);

    /* The kernels round to f32 the decay, and the rate with both bias corrections. The rate is the largest
     * in the first step. */
    const double decay = adamw->lr * adamw->weight_decay;
    const double rate = adamw->lr / (1.0 - adamw->beta1);
    TD_CHECK(fits_f32(rate * fmax(1.0, fabs(1.0 - decay))),
             "lr %g, beta1 %g and weight_decay %g make a rate that f32 does not hold", adamw->lr,
             adamw->beta1, adamw->weight_decay);
cleanup:
    return status;
}

td_status td_sgd_check(const td_sgd *sgd)
{
    td_status status = TD_OK;

    TD_CHECK(sgd, "sgd is NULL");
    TD_CHECK(fits_f32(sgd->lr), "lr is %g, needs to be finite in f32", sgd->lr);
cleanup:
    return status;
}

/** Checks the arrays, and fills in grad_dtype. */
static td_status check_tensors(const td_device *dev, td_update_tensors *t)
{
    td_status status = TD_OK;

    TD_TRY(check_array(dev, t->count, t->dtype));
    TD_TRY(check_second(dev, "grad_dtype", false, t->dtype, &t->grad_dtype));
    TD_CHECK(t->p, "p is NULL");
    TD_CHECK(t->g, "g is NULL");
    TD_CHECK(t->sms >= 0, "sms is %d, needs at least 1, or 0 for all", (int)t->sms);
    TD_CHECK(t->sms == 0 || t->work, "work is NULL, and sms is %d", (int)t->sms);
    TD_CHECK(!t->low || t->dtype == TD_F32, "low is given, but dtype is %s: numbers of f32 have two planes",
             td_dtype_name(t->dtype));
cleanup:
    return status;
}

td_status td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                          const td_update_tensors *tensors)
{
    td_status status = TD_OK;
    td_update_tensors t;

    TD_NOT_NULL(dev, adamw, tensors);
    t = *tensors;
    if (sees(dev))
        TD_TRY(td_adamw_check(adamw));
    TD_TRY(check_state(dev, state));
    TD_TRY(check_tensors(dev, &t));
    TD_CHECK(t.m, "m is NULL");
    TD_CHECK(t.v, "v is NULL");
    TD_TRY(CALL(dev, adamw_update, adamw, state, &t));
cleanup:
    return status;
}

td_status td_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                        const td_update_tensors *tensors)
{
    td_status status = TD_OK;
    td_update_tensors t;

    TD_NOT_NULL(dev, sgd, tensors);
    t = *tensors;
    if (sees(dev))
        TD_TRY(td_sgd_check(sgd));
    TD_TRY(check_state(dev, state));
    TD_TRY(check_tensors(dev, &t));
    TD_TRY(CALL(dev, sgd_update, sgd, state, &t));
cleanup:
    return status;
}

bool td_update_has_sms(td_device *dev)
{
    return dev && ops_of(dev)->update_has_sms && ops_of(dev)->update_has_sms(dev);
}
