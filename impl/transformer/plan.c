#include "transformer/operations.h"
#include "transformer/owned.h"

#include "base/check.h"
#include "base/names.h"
#include "flash/flash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** Implementations of attention, by their name in td_transformer_config. */
static const struct {
    const char *name;
    const td_attention_impl *impl;
} attends[] = {{"flash", &td_attention_flash}, {"naive", &td_attention_naive}};

/** The bytes that attention writes in a layer, if they are spared; else 0. */
static size_t spared_bytes(const td_plan *plan)
{
    return plan->spared[TD_T_O] ? plan->bytes[TD_T_O] + plan->bytes[TD_T_SAVED] : 0;
}

size_t td_tensor_offset(const td_plan *plan, td_tensor tensor, int64_t layer)
{
    const size_t slot =
        (size_t)(layer < plan->last_checkpoint ? layer % plan->checkpoint : layer - plan->last_checkpoint);

    if (layer < plan->last_checkpoint && tensor == TD_T_INPUT && slot == 0)
        return (size_t)(layer / plan->checkpoint) * plan->bytes[tensor];
    if (layer < plan->last_checkpoint && plan->spared[tensor])
        return plan->ahead - (size_t)(plan->last_checkpoint - layer) * spared_bytes(plan) +
               (tensor == TD_T_O ? plan->bytes[TD_T_SAVED] : 0);
    return plan->offset[tensor] + (plan->kept[tensor] ? slot * plan->layer_stride : 0);
}

/** *out = rows * cols elements of `size` bytes, rounded up to the alignment. */
static td_status aligned_bytes(const char *what, int64_t rows, int64_t cols, size_t size, size_t *out)
{
    td_status status = TD_OK;
    int64_t bytes;

    TD_TRY(td_product(what, 3, (int64_t[]){rows, cols, (int64_t)size}, &bytes));
    TD_CHECK(bytes <= INT64_MAX - TD_ALIGNMENT, "%s: %" PRId64 " bytes are beyond 2^63 - 1", what, bytes);
    *out = ((size_t)bytes + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
cleanup:
    return status;
}

static td_status add_bytes(const char *what, size_t bytes, size_t *total)
{
    td_status status = TD_OK;

    TD_CHECK(bytes <= INT64_MAX && *total <= INT64_MAX - bytes,
             "%s: %zu bytes after %zu others are beyond 2^63 - 1", what, bytes, *total);
    *total += bytes;
cleanup:
    return status;
}

/** Checks the two fields that count layers of checkpoints. */
static td_status check_checkpoints(const td_transformer_config *config)
{
    const struct {
        const char *name;
        int64_t layers;
    } fields[] = {{"checkpoint_layers", config->checkpoint_layers}, {"kept_layers", config->kept_layers}};
    const int64_t all = config->size.layers;
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        TD_CHECK(fields[i].layers >= 0 && fields[i].layers <= all,
                 "%s is %" PRId64 ", needs 1 to all %" PRId64 ", or 0 for 1", fields[i].name,
                 fields[i].layers, all);
        TD_CHECK(fields[i].layers == 0 || config->keep >= TD_KEEP_INPUTS,
                 "%s is %" PRId64 ", which needs TD_KEEP_INPUTS or TD_KEEP_ATTENTION", fields[i].name,
                 fields[i].layers);
    }
cleanup:
    return status;
}

static td_status check_config(const td_transformer_config *config)
{
    const td_model_size *size = &config->size;
    td_status status = TD_OK;

    TD_CHECK(size->d_model >= 1, "size.d_model is %" PRId64 ", needs at least 1", size->d_model);
    TD_CHECK(size->d_ff >= 1, "size.d_ff is %" PRId64 ", needs at least 1", size->d_ff);
    TD_CHECK(size->layers >= 1 && size->layers <= UINT16_MAX, "size.layers is %" PRId64 ", needs 1 to %d",
             size->layers, UINT16_MAX); /* td_use.layer */
    TD_CHECK(size->heads >= 1, "size.heads is %" PRId64 ", needs at least 1", size->heads);
    TD_CHECK(size->vocab >= 1, "size.vocab is %" PRId64 ", needs at least 1", size->vocab);
    TD_CHECK(config->context >= 1, "context is %" PRId64 ", needs at least 1", config->context);
    TD_CHECK(size->d_model % size->heads == 0, "size.heads is %" PRId64 ", needs to divide d_model %" PRId64,
             size->heads, size->d_model);
    TD_CHECK(size->d_model / size->heads % 2 == 0,
             "size.heads is %" PRId64 ", which makes head_dim %" PRId64 ": it needs to be even", size->heads,
             size->d_model / size->heads);
    TD_CHECK(td_precision_name(config->precision), "precision is %d, which is no td_precision",
             (int)config->precision);
    TD_CHECK(td_keep_name(config->keep), "keep is %d, which is no td_keep", (int)config->keep);
    TD_TRY(check_checkpoints(config));
    TD_CHECK(config->use == TD_MODEL_INFERENCE || config->use == TD_MODEL_GRADIENTS,
             "use is %d, needs TD_MODEL_INFERENCE or TD_MODEL_GRADIENTS", (int)config->use);
    /* Written so that NaN is refused. */
    TD_CHECK(config->rope_theta >= 0 && config->rope_theta <= 1e300,
             "rope_theta is %g, needs to be above 0 and at most 1e300, or 0 for 10,000", config->rope_theta);
cleanup:
    return status;
}

td_status td_attention_index(const char *name, int *out)
{
    return td_names_find("attention", &attends[0].name, sizeof *attends, sizeof attends / sizeof *attends,
                         name, out);
}

td_status td_transformer_attention(const char *name, const td_attention_impl **out)
{
    td_status status = TD_OK;
    int found;

    TD_CHECK(out, "out is NULL");
    TD_CHECK(name, "attention is NULL");
    TD_TRY(td_attention_index(name, &found));
    *out = attends[found].impl;
cleanup:
    return status;
}

/** The most scratch that attention needs for any batch and seq of the plan. These are not always the
 * largest: on a GPU a shorter sequence has too few tiles for all SMs, so its keys are divided into parts
 * with results in scratch. Scratch changes only at multiples of 16 rows, the rows of a tile, so the loop
 * tries these. Batches and sequences beyond BATCHES and LONGEST fill any GPU. */
static td_status most_of_attention(td_device *dev, const td_plan *plan, td_attention_sizes *most)
{
    enum { ROWS = 16, BATCHES = 256, LONGEST = 1 << 16 };
    const int64_t context = plan->config.context, batch = plan->config.batch;
    const int64_t batches = batch < BATCHES ? batch : BATCHES,
                  longest = context < LONGEST ? context : LONGEST;
    td_attention_sizes sizes;
    td_attention_shape shape = td_plan_attention_shape(plan, batch, context);
    td_status status = TD_OK;

    /* The largest step first: if its sizes are beyond 2^63 - 1, this call fails with a message. */
    TD_TRY(plan->attend->sizes(dev, &shape, most));
    for (int64_t of = 1; of <= batches; of++)
        for (int64_t rows = ROWS; rows < longest + ROWS; rows += ROWS) {
            shape = td_plan_attention_shape(plan, of, rows < longest ? rows : longest);
            TD_TRY(plan->attend->sizes(dev, &shape, &sizes));
            if (sizes.forward_work > most->forward_work)
                most->forward_work = sizes.forward_work;
            if (sizes.backward_work > most->backward_work)
                most->backward_work = sizes.backward_work;
        }
cleanup:
    return status;
}

/** Bytes of every extent, for the largest step. */
static td_status measure(td_device *dev, td_plan *plan, size_t bytes[TD_EXTENTS])
{
    const td_transformer_config *config = &plan->config;
    const td_model_size *size = &config->size;
    td_attention_sizes attention;
    td_status status = TD_OK;
    int64_t tokens;
    size_t work;

    TD_TRY(td_product("tokens (batch * context)", 2, (int64_t[]){config->batch, config->context}, &tokens));
    for (td_extent i = TD_EXTENT_STREAM; i <= TD_EXTENT_VOCAB; i++)
        TD_TRY(aligned_bytes("activations (tokens * width)", tokens, td_extent_width(size, i),
                             td_dtype_size(i == TD_EXTENT_STREAM ? plan->wide : plan->dtype), &bytes[i]));
    if (!plan->mixed)
        bytes[TD_EXTENT_ROUNDED] = 0;
    TD_TRY(aligned_bytes("tokens", tokens, 1, sizeof(int64_t), &bytes[TD_EXTENT_TOKENS]));
    TD_TRY(aligned_bytes("tokens", tokens, 1, sizeof(float), &bytes[TD_EXTENT_ROWS]));
    TD_TRY(aligned_bytes("loss", 1, 1, sizeof(float), &bytes[TD_EXTENT_ONE]));
    TD_TRY(aligned_bytes("rotary table (context * head size / 2)", config->context,
                         size->d_model / size->heads / 2, sizeof(float), &bytes[TD_EXTENT_TABLE]));

    TD_TRY(most_of_attention(dev, plan, &attention));
    TD_TRY(td_work_bytes(dev, plan, tokens, &work));
    const struct {
        const char *what;
        size_t bytes;
        td_extent extent;
    } sizes[] = {{"what attention saves", attention.saved, TD_EXTENT_SAVED},
                 {"scratch of attention forward", attention.forward_work, TD_EXTENT_ATTEND_WORK},
                 {"scratch of attention backward", attention.backward_work, TD_EXTENT_ATTEND_GRAD_WORK},
                 {"scratch of other operations", work, TD_EXTENT_WORK}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        TD_CHECK(sizes[i].bytes <= INT64_MAX, "%s: %zu bytes are beyond 2^63 - 1", sizes[i].what,
                 sizes[i].bytes);
        TD_TRY(aligned_bytes(sizes[i].what, (int64_t)sizes[i].bytes, 1, 1, &bytes[sizes[i].extent]));
    }
cleanup:
    return status;
}

/** Sets kept and beyond. */
static void choose_kept(td_plan *plan)
{
    const bool all = plan->all_kept;

    for (int i = TD_T_INPUT; i <= TD_T_GATE_UP; i++)
        plan->kept[i] = td_has_backward(plan) && plan->bytes[i] > 0;
    plan->kept[TD_T_NORM] = plan->kept[TD_T_NORM2] = plan->kept[TD_T_HIDDEN] = all;
    plan->beyond[TD_T_INPUT] = true;
    plan->beyond[TD_T_RSTD1] = plan->beyond[TD_T_NORM] = all;
}

/** Lays out a layer's kept tensors one after the other. Tensors with an instance for ln_final come first.
 * The arena begins with the inputs of all checkpoints except the last, and with the spared tensors. If the
 * last checkpoint has fewer layers than the others, backward has read its instance for ln_final before
 * layers that run again overwrite it. */
static td_status place_kept(td_plan *plan)
{
    td_status status = TD_OK;
    size_t stride = 0, beyond = 0;
    int64_t layers, inputs, spared;

    for (int turn = 0; turn < 2; turn++)
        for (int i = TD_T_INPUT; i < TD_TENSORS; i++)
            if (plan->kept[i] && plan->beyond[i] == (turn == 0)) {
                plan->offset[i] = stride;
                TD_TRY(add_bytes("kept activations", plan->bytes[i], &stride));
                beyond = turn == 0 ? stride : beyond;
            }
    TD_TRY(td_product("kept activations", 2, (int64_t[]){plan->slots, (int64_t)stride}, &layers));
    TD_TRY(td_product("inputs of checkpoints", 2,
                      (int64_t[]){plan->last_checkpoint / plan->checkpoint, (int64_t)plan->bytes[TD_T_INPUT]},
                      &inputs));
    TD_TRY(td_product("results of attention", 2,
                      (int64_t[]){plan->last_checkpoint, (int64_t)spared_bytes(plan)}, &spared));
    plan->ahead = (size_t)inputs;
    TD_TRY(add_bytes("results of attention", (size_t)spared, &plan->ahead));
    plan->layer_stride = stride;
    plan->total.activations = (size_t)layers;
    TD_TRY(add_bytes("kept activations", beyond, &plan->total.activations));
    TD_TRY(add_bytes("kept activations", plan->ahead, &plan->total.activations));
    for (int i = TD_T_INPUT; i < TD_TENSORS; i++)
        if (plan->kept[i])
            plan->offset[i] += plan->ahead;
cleanup:
    return status;
}

/** Transient gradients, over the kept activations. When a layer writes its gradients, the pass still needs
 * the activations of this layer and of earlier layers, but no activations of later layers. So the block of
 * gradients begins at the lowest offset that keeps needed activations whole. Its layers are in the order of
 * the activations.
 * Gradients of the norms and the head come after all layers' activations, because they are written while all
 * activations are needed. All checkpoints use the same memory for activations, so gradients of layers after
 * the first checkpoint come after this memory. */
static void place_gradients(td_plan *plan)
{
    const size_t element = td_dtype_size(plan->grad_dtype);
    const int64_t layers = plan->config.size.layers;
    size_t begin = 0;

    for (int64_t layer = 0; layer <= layers; layer++) {
        const int64_t first =
            layer < layers ? plan->layout.layers + layer * plan->layout.layer_stride : plan->layout.norms;
        const size_t ahead = (size_t)first * element;
        const int64_t until = layer < plan->slots ? layer + 1 : plan->slots;
        const size_t needed =
            layer < layers ? plan->ahead + (size_t)until * plan->layer_stride : plan->total.activations;
        if (needed > ahead && needed - ahead > begin)
            begin = needed - ahead;
    }
    plan->gradient_offset = (begin + TD_ALIGNMENT - 1) / TD_ALIGNMENT * TD_ALIGNMENT;
    const size_t end = plan->gradient_offset + plan->gradient_bytes;
    plan->total.gradients = end > plan->total.activations ? end - plan->total.activations : 0;
}

static bool is_scratch(const td_plan *plan, int tensor)
{
    return plan->bytes[tensor] > 0 && !plan->kept[tensor];
}

/** Places scratch tensors from `begin` on: `first`, then the others, the largest first. Each gets the lowest
 * offset at which it overlaps no tensor that is alive at the same time. *end: the end of the scratch. */
static td_status place_from(td_plan *plan, const uint64_t together[TD_TENSORS], size_t begin, int first,
                            size_t *end)
{
    bool placed[TD_TENSORS] = {false};
    td_status status = TD_OK;

    *end = begin;
    for (int next = first; next >= 0;) {
        size_t offset = begin;

        for (bool moved = true; moved;) { /* each pass moves beyond a tensor, so this ends */
            moved = false;
            for (int i = 0; i < TD_TENSORS; i++) {
                if (placed[i] && (together[next] >> i & 1) && offset < plan->offset[i] + plan->bytes[i] &&
                    plan->offset[i] < offset + plan->bytes[next]) {
                    offset = plan->offset[i] + plan->bytes[i];
                    moved = true;
                }
            }
        }
        plan->offset[next] = offset;
        placed[next] = true;
        TD_TRY(add_bytes("scratch", plan->bytes[next], &offset));
        *end = offset > *end ? offset : *end;
        next = -1;
        for (int i = 0; i < TD_TENSORS; i++)
            if (is_scratch(plan, i) && !placed[i] && (next < 0 || plan->bytes[i] > plan->bytes[next]))
                next = i;
    }
cleanup:
    return status;
}

/** Places scratch after the activations. Tries each tensor as the first one. With the largest tensor first,
 * 48 of 7,776 plans needed up to 13 % more scratch (2026-11). */
static td_status place_scratch(td_plan *plan, const uint64_t together[TD_TENSORS])
{
    const size_t begin = plan->total.activations + (plan->over_activations ? plan->total.gradients : 0);
    td_plan best = *plan;
    td_status status = TD_OK;

    best.arena_bytes = SIZE_MAX;
    for (int i = 0; i < TD_TENSORS; i++)
        if (is_scratch(plan, i)) {
            TD_TRY(place_from(plan, together, begin, i, &plan->arena_bytes));
            best = plan->arena_bytes < best.arena_bytes ? *plan : best;
        }
    *plan = best;
    plan->total.scratch = plan->arena_bytes - begin;
cleanup:
    return status;
}

/** Records the step: runs its passes twice without operations. The first run counts, the second records. */
static td_status record(td_plan *plan)
{
    const td_use logits = {TD_USE_READ, TD_T_LOGITS, 0};
    const td_call read_logits = {TD_CALL_READ_LOGITS, 0, 1, &logits};
    td_status status = TD_OK;

    plan->recording = calloc(1, sizeof *plan->recording);
    if (!plan->recording)
        return td_fail(TD_NO_MEMORY, "no host memory for the recording of a step");
    for (int turn = 0; turn < 2; turn++) {
        td_transformer model = {.plan = *plan, .recorder = plan->recording};

        TD_TRY(td_forward_pass(&model, NULL, 1, 1));
        TD_TRY(td_loss_pass(&model, NULL));
        if (td_has_backward(plan))
            TD_TRY(td_backward_pass(&model));
        else
            (void)td_call_begins(&model, &read_logits);
        if (turn == 0)
            TD_TRY(td_recording_alloc(plan->recording));
    }
    TD_TRY(td_recording_find_lives(plan->recording, plan->config.size.layers));
cleanup:
    return status;
}

void td_plan_free(td_plan *plan)
{
    td_recording_free(plan->recording);
    plan->recording = NULL;
}

td_status td_final_order(int64_t layers, int64_t *order)
{
    const int64_t norms = 1 + TD_MATRICES * layers, head = norms + 2 * layers + 1;
    td_plan plan = {.config = {.size = {.d_model = 2, .d_ff = 1, .layers = layers, .heads = 1, .vocab = 1},
                               .use = TD_MODEL_GRADIENTS},
                    .layout = {.layers = 1,
                               .layer_stride = TD_MATRICES,
                               .norms = norms,
                               .lm_head = head,
                               .elements = head + 1}, /* a parameter is an element */
                    .checkpoint = layers};
    td_status status = TD_OK;

    TD_TRY(record(&plan));
    for (int64_t i = 0; i < plan.recording->use_count; i++) {
        const td_recorded_use used = plan.recording->uses[i];
        const bool ends = used.use.kind == TD_USE_GRADIENT && used.ends;
        const td_range range = td_part_range(&plan.layout, ends ? used.use.what : 0, used.use.layer);

        for (int64_t at = range.end; ends && at-- > range.begin;)
            *order++ = at;
    }
cleanup:
    td_plan_free(&plan);
    return status;
}

td_status td_plan_make(td_device *dev, const td_transformer_config *config, td_plan *out)
{
    td_plan plan = {.config = *config};
    td_attention_sizes attention;
    uint64_t together[TD_TENSORS];
    size_t bytes[TD_EXTENTS];
    td_status status = TD_OK;
    int64_t block;

    TD_TRY(check_config(config));
    TD_TRY(td_transformer_attention(config->attention, &plan.attend));
    TD_TRY(plan.attend->describe(td_device_kind_of(dev), &plan.traits));
    plan.config.attention = plan.attend->name;
    if (config->rope_theta == 0)
        plan.config.rope_theta = 10000;
    plan.config.keep = td_has_backward(&plan) ? config->keep : TD_KEEP_MOST;
    plan.all_kept = plan.config.keep == TD_KEEP_ALL || plan.config.keep == TD_KEEP_INPUTS;
    plan.checkpoint = config->size.layers;
    if (plan.config.keep >= TD_KEEP_INPUTS)
        plan.checkpoint = config->checkpoint_layers > 1 ? config->checkpoint_layers : 1;
    const int64_t own =
        config->kept_layers > 1 ? config->kept_layers : 1; /* the last checkpoint's, at least */
    plan.last_checkpoint = (config->size.layers - own) / plan.checkpoint * plan.checkpoint;
    plan.slots = config->size.layers - plan.last_checkpoint > plan.checkpoint
                     ? config->size.layers - plan.last_checkpoint
                     : plan.checkpoint;

    plan.dtype = td_precision_dtype(config->precision);
    plan.wide = td_precision_weights(config->precision);
    plan.mixed = plan.wide != plan.dtype;
    plan.grad_dtype = config->f32_gradients ? plan.wide : plan.dtype;
    TD_TRY(td_layout_make(&config->size, plan.dtype, &plan.layout));
    TD_TRY(td_product("parameters", 2, (int64_t[]){plan.layout.elements, (int64_t)td_dtype_size(plan.wide)},
                      &block));
    TD_TRY(td_owned_check(config, &plan.layout));
    plan.pieces = td_owned_measure(&plan, &plan.total.parameters, &plan.gradient_bytes);
    if (!td_has_backward(&plan))
        plan.gradient_bytes = 0;
    plan.total.gradients = plan.gradient_bytes;

    plan.spared[TD_T_SAVED] = plan.spared[TD_T_O] = plan.config.keep == TD_KEEP_ATTENTION;
    const td_attention_shape largest = td_plan_attention_shape(&plan, config->batch, config->context);
    TD_TRY(plan.attend->sizes(dev, &largest, &attention)); /* refuses a batch below 1 */
    plan.packs = attention.packs;
    TD_TRY(record(&plan));
    td_recording_together(plan.recording, together);
    TD_TRY(measure(dev, &plan, bytes));
    for (int i = 0; i < TD_TENSORS; i++)
        plan.bytes[i] = together[i] >> i & 1 ? bytes[td_tensor_kinds[i].extent] : 0;
    choose_kept(&plan);
    TD_TRY(place_kept(&plan));
    plan.over_activations = td_has_backward(&plan) && config->transient_gradients && !config->owned;
    if (plan.over_activations)
        place_gradients(&plan);
    TD_TRY(place_scratch(&plan, together));
    *out = plan;
    plan.recording = NULL;
cleanup:
    td_plan_free(&plan);
    return status;
}
