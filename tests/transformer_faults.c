/* Every operation that a model calls fails in turn, as a GPU's may at any time: the error comes out, nothing
 * else is disturbed, and the step that follows is the one of a model that nothing ever happened to. */
#include "base/rng.h"
#include "support/compare.h"
#include "support/fault.h"
#include "transformer/transformer_internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the doubles ---- */

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
TD_FAULT(td_round,
         (td_device * dev, int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype, void *dst),
         (dev, count, src_dtype, src, dst_dtype, dst))
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
TD_FAULT(td_adamw_advance, (td_device * dev, td_adamw *adamw), (dev, adamw))
TD_FAULT(td_sgd_step, (td_device * dev, float lr, int64_t count, td_dtype dtype, void *p, const void *g),
         (dev, lr, count, dtype, p, g))
TD_FAULT(td_linear_adamw_pays, (td_device * dev, int64_t count, const td_linear_adamw *layers, bool *out),
         (dev, count, layers, out))
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

/* ---- a second stream, of which the CPU has none ---- */

static struct {
    td_stream *side; /* NULL: there is none */
    bool current;    /* it is the device's stream */
    bool working;    /* it has updates that no recorded event is behind */
    bool
        marked; /* an event behind its updates was recorded that the device's own stream has not waited for */
    int64_t updates, waits;
} streams;

td_status __real_td_adamw_update(td_device *dev, const td_adamw *adamw, bool on_device,
                                 const td_adamw_tensors *tensors);
td_status __wrap_td_adamw_update(td_device *dev, const td_adamw *adamw, bool on_device,
                                 const td_adamw_tensors *tensors);
td_status __real_td_device_set_stream(td_device *dev, td_stream *stream);
td_status __wrap_td_device_set_stream(td_device *dev, td_stream *stream);
td_status __real_td_event_record(td_event *event);
td_status __wrap_td_event_record(td_event *event);
td_status __real_td_event_wait(td_event *event);
td_status __wrap_td_event_wait(td_event *event);

td_status __wrap_td_adamw_update(td_device *dev, const td_adamw *adamw, bool on_device,
                                 const td_adamw_tensors *tensors)
{
    td_status status = TD_IO_ERROR;

    if (td_fault("td_adamw_update"))
        return td_fail(status, "td_adamw_update was told to fail");
    status = __real_td_adamw_update(dev, adamw, on_device, tensors);
    streams.updates += streams.current;
    streams.working |= streams.current;
    return status;
}

td_status __wrap_td_device_set_stream(td_device *dev, td_stream *stream)
{
    if (!streams.side)
        return __real_td_device_set_stream(dev, stream);
    assert_true(!stream || stream == streams.side);
    if (stream && td_fault("td_device_set_stream"))
        return td_fail(TD_IO_ERROR, "td_device_set_stream was told to fail");
    streams.current = stream != NULL;
    return TD_OK;
}

td_status __wrap_td_event_record(td_event *event)
{
    if (!streams.current && td_fault("td_event_record"))
        return td_fail(TD_IO_ERROR, "td_event_record was told to fail");
    if (streams.current) {
        streams.marked |= streams.working;
        streams.working = false;
    }
    return __real_td_event_record(event);
}

td_status __wrap_td_event_wait(td_event *event)
{
    if (streams.current && td_fault("td_event_wait"))
        return td_fail(TD_IO_ERROR, "td_event_wait was told to fail");
    if (!streams.current) {
        streams.marked = false;
        streams.waits++;
    }
    return __real_td_event_wait(event);
}

/* ---- a step, and what it leaves ---- */

enum { BATCH = 1, SEQ = 3, LAYERS = 2 };

static const int64_t ids[BATCH * SEQ] = {1, 4, 2}, targets[BATCH * SEQ] = {4, 2, 0};

typedef enum way { APART, ALONG, ALONG_ON_DEVICE, APART_ON_DEVICE, BY_SGD, INFER } way;

typedef struct kind {
    const char *name;
    way way;
    td_precision precision;
    const char *attention;
    bool transient;
    td_keep keep;
    bool side;
} kind;

static const kind kinds[] = {
    {"apart, f32 naive", APART, TD_PRECISION_F32, "naive", false, TD_KEEP_MOST, false},
    {"apart, bf16 flash, mixed, all kept", APART_ON_DEVICE, TD_PRECISION_BF16_MIXED, "flash", false,
     TD_KEEP_ALL, false},
    {"along, f32 flash, transient", ALONG, TD_PRECISION_F32, "flash", true, TD_KEEP_MOST, false},
    {"along, bf16 naive, mixed", ALONG_ON_DEVICE, TD_PRECISION_BF16_MIXED, "naive", false, TD_KEEP_MOST,
     false},
    {"beside, f32 flash", ALONG, TD_PRECISION_F32, "flash", false, TD_KEEP_MOST, true},
    {"beside, bf16 flash, mixed, transient, all kept", ALONG_ON_DEVICE, TD_PRECISION_BF16_MIXED, "flash",
     true, TD_KEEP_ALL, true},
    {"sgd, f32 flash, all kept", BY_SGD, TD_PRECISION_F32, "flash", false, TD_KEEP_ALL, false},
    {"inference, bf16 naive", INFER, TD_PRECISION_BF16, "naive", false, TD_KEEP_MOST, false},
};

static td_transformer_config config_of(const kind *k)
{
    return (td_transformer_config){
        .size = {.d_model = 4, .d_ff = 3, .layers = LAYERS, .heads = 2, .vocab = 5},
        .batch = BATCH,
        .context = SEQ,
        .precision = k->precision,
        .attention = k->attention,
        .use = k->way == INFER ? TD_MODEL_INFERENCE : TD_MODEL_TRAINING,
        .transient_gradients = k->transient,
        .keep = k->keep};
}

typedef struct state_of_model {
    char *params, *moments;
    td_adamw adamw;
} state_of_model;

static char *copy_of(const void *block, size_t bytes)
{
    char *copy = malloc(bytes > 0 ? bytes : 1);

    assert_non_null(copy);
    if (bytes > 0)
        memcpy(copy, block, bytes);
    return copy;
}

static size_t moments_of(const td_transformer *model)
{
    return model->exp_avg ? model->plan.total.optimizer_state : 0;
}

static state_of_model save(const td_transformer *model, const td_adamw *adamw)
{
    return (state_of_model){.params = copy_of(model->params, model->plan.total.parameters),
                            .moments = copy_of(model->exp_avg, moments_of(model)),
                            .adamw = *adamw};
}

static void restore(td_transformer *model, td_adamw *adamw, const state_of_model *saved)
{
    memcpy(model->params, saved->params, model->plan.total.parameters);
    if (model->exp_avg)
        memcpy(model->exp_avg, saved->moments, moments_of(model));
    td_assert_ok(td_transformer_refresh(model));
    *adamw = saved->adamw;
}

static void forget(state_of_model *saved)
{
    free(saved->params);
    free(saved->moments);
}

static td_status step(td_transformer *model, way way, td_adamw *adamw)
{
    td_status status = TD_OK;
    float loss;

    TD_TRY(td_transformer_forward(model, ids, BATCH, SEQ - 1, NULL)); /* whose room is asked for again */
    TD_TRY(td_transformer_forward(model, ids, BATCH, SEQ, NULL));     /* the one before is abandoned */
    TD_TRY(td_transformer_loss(model, targets, &loss));
    if (way == APART || way == APART_ON_DEVICE || way == BY_SGD)
        TD_TRY(td_transformer_backward(model, TD_MICRO_ONLY));
    if (way == APART)
        TD_TRY(td_transformer_adamw(model, adamw));
    if (way == APART_ON_DEVICE)
        TD_TRY(td_transformer_adamw_on_device(model, adamw));
    if (way == ALONG || way == ALONG_ON_DEVICE)
        TD_TRY(td_transformer_backward_adamw(model, adamw, way == ALONG_ON_DEVICE));
    if (way == BY_SGD)
        TD_TRY(td_transformer_sgd(model, 0.1f));
cleanup:
    return status;
}

static void assert_no_label_is_left(td_device *dev)
{
    td_assert_refused(td_device_pop_label(dev), TD_BAD_STATE, "without");
}

/* Updates on the second stream are waited for whatever else fails, unless it is the waiting itself. */
static void assert_side_is_joined(const kind *k)
{
    if (streams.working || streams.marked || streams.current)
        fail_msg("%s: after a failing %s the second stream is left to itself", k->name, td_fault_name());
}

static void steps_survive_every_fault(void **state)
{
    const kind *k = *state;
    const td_transformer_config config = config_of(k);
    const td_adamw given = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .step = 3};
    td_adamw adamw = given;
    td_transformer *model;
    td_device *dev;
    int64_t nth;

    memset(&streams, 0, sizeof streams);
    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_transformer_create(dev, &config, &model));
    td_assert_ok(td_transformer_init(model, 5));
    if (k->side) { /* as prepare_side makes them where there are streams */
        td_assert_ok(td_event_create(dev, &model->ready));
        td_assert_ok(td_event_create(dev, &model->finished));
        streams.side = model->side = (td_stream *)&streams;
    }
    td_assert_ok(td_device_history_begin(dev, 1)); /* what the steps tell it may fail, too */
    state_of_model before = save(model, &adamw);
    td_assert_ok(step(model, k->way, &adamw));
    assert_true(!k->side || (streams.updates == LAYERS + 3 && streams.waits == 1));
    state_of_model after = save(model, &adamw);
    for (nth = 1;; nth++) {
        restore(model, &adamw, &before);
        td_fault_at(nth);
        const td_status status = step(model, k->way, &adamw);
        const bool reached = td_fault_name() != NULL;
        if (status != (reached ? TD_IO_ERROR : TD_OK))
            fail_msg("%s: after a failing %s the step returned %d", k->name, td_fault_name(), (int)status);
        assert_side_is_joined(k);
        td_fault_at(0);
        assert_no_label_is_left(dev);
        restore(model, &adamw, &before);
        td_assert_ok(step(model, k->way, &adamw));
        assert_memory_equal(model->params, after.params, model->plan.total.parameters);
        if (model->exp_avg)
            assert_memory_equal(model->exp_avg, after.moments, moments_of(model));
        if (!reached)
            break;
    }
    assert_true(nth > (k->way == INFER ? 50 : 200)); /* a loop that injected nothing proves nothing */
    forget(&before);
    forget(&after);
    model->side = NULL;
    td_transformer_destroy(model);
    td_device_close(dev);
}

/* Planning, creating and drawing the first weights. */
static void creation_survives_every_fault(void **state)
{
    const kind *k = *state;
    const td_transformer_config config = config_of(k);
    td_memory_stats memory;
    td_device *dev;
    int64_t nth;

    memset(&streams, 0, sizeof streams);
    td_assert_ok(td_device_open("cpu", &dev));
    for (nth = 1;; nth++) {
        td_transformer *model = (td_transformer *)&nth; /* create must overwrite it */
        td_transformer_bytes bytes;

        td_fault_at(nth);
        td_status status = td_transformer_plan(dev, &config, &bytes);
        if (status == TD_OK)
            status = td_transformer_create(dev, &config, &model);
        else
            model = NULL;
        assert_true((status == TD_OK) == (model != NULL));
        if (status == TD_OK)
            status = td_transformer_init(model, 5);
        const bool reached = td_fault_name() != NULL;
        td_fault_at(0);
        if (status != (reached ? TD_IO_ERROR : TD_OK))
            fail_msg("%s: a failing call returned %d", k->name, (int)status);
        if (model && reached)
            td_assert_refused(td_transformer_forward(model, ids, BATCH, SEQ, NULL), TD_BAD_STATE,
                              "no weights");
        td_transformer_destroy(model);
        td_assert_ok(td_device_memory(dev, &memory));
        assert_int_equal(memory.live_blocks, 0);
        if (!reached)
            break;
    }
    assert_true(nth > 50);
    td_device_close(dev);
}

int main(void)
{
    enum { KINDS = sizeof kinds / sizeof *kinds };
    struct CMUnitTest tests[2 * KINDS];

    for (int i = 0; i < KINDS; i++) {
        tests[i] = (struct CMUnitTest){.name = kinds[i].name,
                                       .test_func = steps_survive_every_fault,
                                       .initial_state = (void *)&kinds[i]};
        tests[KINDS + i] = tests[i];
        tests[KINDS + i].test_func = creation_survives_every_fault;
    }
    return cmocka_run_group_tests_name("faults of a model's operations", tests, NULL, NULL);
}
