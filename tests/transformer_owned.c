/* A model has some of its weights, and a link brings the others and takes their gradients. It must compute
 * the bits of a model with all weights. */
#include "base/check.h"
#include "base/safetensors.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/file_kit.h"
#include "support/test.h"
#include "support/weights.h"
#include "train/train.h"

enum { MICROS = 3, MOST = 3 };

#define EVEN                                                                                                 \
    {                                                                                                        \
        .d_model = 32, .d_ff = 48, .layers = 3, .heads = 2, .vocab = 50                                      \
    }
#define ODD                                                                                                  \
    {                                                                                                        \
        .d_model = 18, .d_ff = 7, .layers = 2, .heads = 3, .vocab = 11                                       \
    }

static const struct {
    td_transformer_config model;
    int64_t micros;
} kinds[] = {
    {{.size = ODD, .precision = TD_PRECISION_F32}, 1},
    {{.size = ODD, .precision = TD_PRECISION_BF16}, MICROS},
    {{.size = EVEN, .precision = TD_PRECISION_BF16_MIXED, .keep = TD_KEEP_ALL}, 1},
    {{.size = ODD, .precision = TD_PRECISION_BF16_MIXED}, MICROS},
    {{.size = EVEN, .precision = TD_PRECISION_BF16_MIXED, .keep = TD_KEEP_INPUTS, .checkpoint_layers = 2}, 1},
};

/* The owned ranges of `all` elements, at most MOST. */
static int64_t split_of(int64_t all, int which, td_range out[MOST])
{
    const td_range splits[][MOST] = {
        {{0, all}},       {{0, all / 3}, {all / 3, all}},
        {{all / 2, all}}, {{3, 77}, {101, all / 3 + 1}, {all / 2 - 7, all - 5}},
        {{all - 1, all}},
    };
    int64_t count = 0;

    for (; count < MOST && splits[which][count].end > 0; count++)
        out[count] = splits[which][count];
    return count;
}
#define SPLITS                                                                                               \
    {                                                                                                        \
        "all", "all in two ranges", "a half", "ragged", "an element"                                         \
    }

/* A link that does the work of all other ranks for one trainer. */
typedef struct others {
    td_hook hook;
    td_weights all, mine; /* of a trainer with all weights, and of the trainer with the link */
    int64_t count;
    td_range owned[MOST];
    char *grads; /* [elements] gradients of ranges that this rank does not own as a whole */
    int64_t served;
} others;

/* Whether the range lies in one owned range; owned ranges that touch count as one. */
static bool owns(const others *o, td_range range)
{
    for (int64_t i = 0; i < o->count; i++)
        if (o->owned[i].begin <= range.begin && range.end <= o->owned[i].end)
            return true;
    return o->count == 2; /* two ranges have everything */
}

static td_status on_needed(td_hook *hook, td_pass pass, td_range range, const td_range *next,
                           const void **where)
{
    others *o = (others *)hook;

    (void)pass, (void)next;
    assert_int_equal(*where != NULL, owns(o, range));
    if (*where)
        return TD_OK;
    *where = td_weights_master(&o->all, range.begin).at;
    o->served++;
    return TD_OK;
}

static char *place(const others *o, int64_t index)
{
    return o->grads + (size_t)index * td_dtype_size(o->mine.grad_dtype);
}

static td_status on_room(td_hook *hook, td_range range, void **where)
{
    others *o = (others *)hook;

    assert_int_equal(*where != NULL, owns(o, range));
    if (!*where)
        *where = place(o, range.begin);
    return TD_OK;
}

static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    others *o = (others *)hook;
    const bool placed = !owns(o, range);
    td_status status = TD_OK;

    for (int64_t i = 0; i < o->count; i++) {
        td_range part = o->owned[i];

        part.begin = part.begin > range.begin ? part.begin : range.begin;
        part.end = part.end < range.end ? part.end : range.end;
        for (int64_t at = part.begin; placed && at < part.end; at++)
            memcpy(td_weights_master(&o->mine, at).grad, place(o, at), td_dtype_size(o->mine.grad_dtype));
        if (part.begin < part.end)
            TD_TRY(td_hooks_final(hook->next, part, event));
    }
cleanup:
    return status;
}

/* A trainer with all weights, and one that owns some and updates them. */
typedef struct pair {
    td_device *dev;
    td_train *all, *mine;
    others others;
    int64_t *ids, *targets;
    int64_t batch, context;
} pair;

static void open_pair(pair *p, int kind, int split)
{
    const td_optimizer_group base = {.hyper = {.adamw = td_adamw_defaults(TD_ADAMW_TORCH)}};
    td_train_config config = {
        .model = kinds[kind].model, .hyper = base.hyper, .micro_batches = kinds[kind].micros};
    td_optimizer_group groups[MOST];
    others *const o = &p->others;
    int64_t elements;

    *p = (pair){.batch = 2, .context = 9};
    config.model.batch = p->batch;
    config.model.context = p->context;
    config.model.attention = "flash";
    td_assert_ok(td_device_open("cpu", &p->dev));
    td_assert_ok(td_train_create(p->dev, &config, &p->all));
    td_assert_ok(td_transformer_elements(&config.model.size, config.model.precision, &elements));
    o->count = split_of(elements, split, o->owned);
    td_range copy[MOST]; /* the model keeps no pointer to it */
    for (int64_t i = 0; i < o->count; i++) {
        copy[i] = o->owned[i];
        groups[i] = (td_optimizer_group){o->owned[i], base.hyper};
    }
    config.model.owned = copy;
    config.model.owned_count = o->count;
    config.groups = groups;
    config.group_count = o->count;
    config.hooks = &o->hook;
    o->hook = (td_hook){.needed = on_needed, .room = on_room, .final = on_final};
    td_assert_ok(td_train_create(p->dev, &config, &p->mine));
    memset(copy, 0xFF, sizeof copy);
    td_assert_ok(td_transformer_weights(td_train_model(p->all), &o->all));
    td_assert_ok(td_transformer_weights(td_train_model(p->mine), &o->mine));
    o->grads = calloc((size_t)elements, sizeof(float));
    assert_non_null(o->grads);
    p->ids = td_draw_tokens("owned", 1, MICROS * p->batch * p->context, config.model.size.vocab);
    p->targets = td_draw_tokens("owned", 2, MICROS * p->batch * p->context, config.model.size.vocab);
}

static void close_pair(pair *p)
{
    td_memory_stats memory;

    td_train_destroy(p->mine);
    td_train_destroy(p->all);
    td_assert_ok(td_device_memory(p->dev, &memory));
    assert_int_equal(memory.live_blocks, 0);
    td_device_close(p->dev);
    free(p->others.grads);
    td_fence_free(p->ids);
    td_fence_free(p->targets);
}

/* Owned masters and gradients have the bits of the whole model. */
static void assert_same(const pair *p, bool gradients)
{
    const others *const o = &p->others;
    const size_t size = td_dtype_size(o->mine.grad_dtype);

    for (int64_t i = 0; i < o->count; i++) {
        const td_range r = o->owned[i];
        void *got = td_numbers_in(&o->mine, r.begin, r.end), *want = td_numbers_in(&o->all, r.begin, r.end);

        td_assert_identical("weights", o->mine.dtype, got, want, r.end - r.begin);
        for (int64_t at = r.begin; gradients && at < r.end; at++)
            assert_memory_equal(td_weights_master(&o->mine, at).grad, td_weights_master(&o->all, at).grad,
                                size);
        free(got);
        free(want);
    }
}

/* ---- tests ---- */

static void steps_have_the_bits_of_the_whole_model(void **state)
{
    const td_combination *c = *state;
    pair p;

    open_pair(&p, c->choice[0], c->choice[1]);
    td_assert_ok(td_train_init(p.all, 3));
    td_assert_ok(td_train_init(p.mine, 3));
    assert_same(&p, false);
    for (int step = 0; step < 3; step++) {
        float got, want;

        /* First with some of the weights: the others stay unchanged until the step. */
        td_assert_ok(td_train_step(p.mine, p.ids, p.targets, p.batch, p.context));
        td_assert_ok(td_train_step(p.all, p.ids, p.targets, p.batch, p.context));
        td_assert_ok(td_train_loss(p.mine, &got));
        td_assert_ok(td_train_loss(p.all, &want));
        assert_memory_equal(&got, &want, sizeof got);
        assert_same(&p, true);
    }
    assert_int_equal(p.others.served > 0, c->choice[1] >= 2);
    close_pair(&p);
}

/* A file of 16-bit numbers, and numbers one parameter after the other. */
static void weights_come_by_range(void **state)
{
    const td_combination *c = *state;
    const td_transformer_config narrow = {.size = kinds[c->choice[0]].model.size,
                                          .precision = TD_PRECISION_BF16,
                                          .batch = 1,
                                          .context = 1,
                                          .attention = "flash"};
    td_transformer *saved;
    pair p;

    open_pair(&p, c->choice[0], c->choice[1]);
    td_transformer *const all = td_train_model(p.all), *const mine = td_train_model(p.mine);
    td_assert_ok(td_transformer_create(p.dev, &narrow, &saved));
    td_assert_ok(td_transformer_init(saved, 4));
    td_assert_ok(td_transformer_save(saved, file_path));
    td_transformer_destroy(saved);
    td_assert_ok(td_transformer_load(all, file_path));
    td_assert_ok(td_transformer_load(mine, file_path));
    assert_same(&p, false);
    td_assert_ok(td_train_init(p.all, 5));
    for (int64_t i = 0; i < td_transformer_parameter_count(all); i++) {
        void *numbers = td_numbers_of(all, i);

        td_assert_ok(td_transformer_write(mine, i, numbers));
        free(numbers);
    }
    assert_same(&p, false);
    td_assert_ok(td_train_step(p.mine, p.ids, p.targets, p.batch, p.context));
    if (c->choice[1] >= 2)
        td_assert_refused(td_train_save(p.mine, file_path), TD_UNSUPPORTED, "td_shard_save");
    close_pair(&p);
}

/* Masters, gradients and moments of owned weights only, with alignment. Parameters that are not owned as a
 * whole have no address. */
static void only_what_is_owned_takes_memory(void **state)
{
    const td_combination *c = *state;
    pair p;
    int64_t owned = 0;

    open_pair(&p, c->choice[0], c->choice[1]);
    const td_weights *const w = &p.others.mine;
    const int64_t slack = (2 * p.others.count + 6) * TD_ALIGNMENT;
    for (int64_t i = 0; i < p.others.count; i++)
        owned += p.others.owned[i].end - p.others.owned[i].begin;
    const int64_t params = owned * (int64_t)td_dtype_size(w->dtype),
                  grads = owned * (int64_t)td_dtype_size(w->grad_dtype);
    assert_in_range(w->param_bytes, params, params + slack);
    assert_in_range(w->grad_bytes, grads, grads + slack);
    for (int64_t i = 0; i < w->count; i++) {
        const td_piece *piece = &w->pieces[i];

        td_in_case("piece %d", (int)i);
        assert_int_equal((uintptr_t)piece->at % TD_ALIGNMENT, 0);
        assert_int_equal((uintptr_t)piece->low % TD_ALIGNMENT, 0);
        assert_int_equal((uintptr_t)piece->grad % TD_ALIGNMENT, 0);
    }
    for (int64_t i = 0; i < td_transformer_parameter_count(td_train_model(p.mine)); i++) {
        td_parameter parameter;
        const bool mixed = w->dtype == TD_F32 && kinds[c->choice[0]].model.precision != TD_PRECISION_F32;

        td_assert_ok(td_transformer_parameter(td_train_model(p.mine), i, &parameter));
        const int64_t at = parameter.offset;
        const bool here = owns(&p.others, (td_range){at, at + parameter.numel}),
                   planes = mixed && i > 0 && parameter.cols > 0;
        assert_ptr_equal(parameter.grad, here ? td_weights_master(w, at).grad : NULL);
        assert_ptr_equal(parameter.data, here && !planes ? td_weights_master(w, at).at : NULL);
    }
    if (c->choice[1] < 2) { /* all weights have the place of a model with all weights */
        assert_int_equal(w->param_bytes, p.others.all.param_bytes);
        assert_int_equal(w->grad_bytes, p.others.all.grad_bytes);
        assert_int_equal(w->count, p.others.all.count);
    }
    close_pair(&p);
}

TD_BODY(what_needs_all_weights_refuses_a_part)
{
    const td_range owned[] = {{0, 200}, {300, 400}};
    td_transformer_config config = {.size = ODD,
                                    .batch = 1,
                                    .context = 3,
                                    .attention = "flash",
                                    .use = TD_MODEL_GRADIENTS,
                                    .owned = owned,
                                    .owned_count = 2};
    const int64_t ids[3] = {0};
    float numbers[400];
    td_transformer *model;
    td_weights weights;
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_transformer_create(dev, &config, &model));
    td_assert_ok(td_transformer_init(model, 1));
    td_assert_refused(td_transformer_save(model, file_path), TD_UNSUPPORTED, "at element 200");
    td_assert_refused(td_transformer_read(model, 2, numbers), TD_UNSUPPORTED, "td_shard_gather");
    td_assert_ok(td_transformer_read(model, 0, numbers));
    td_assert_refused(td_transformer_forward(model, ids, 1, 3, NULL), TD_BAD_STATE,
                      "no hook has placed them");
    td_assert_ok(td_transformer_weights(model, &weights));
    assert_null(td_weights_master(&weights, 250).at);
    assert_int_equal(td_weights_master(&weights, 250).end, 300);
    assert_int_equal(td_weights_master(&weights, 399).end, 400);
    assert_int_equal(td_weights_master(&weights, 400).end, weights.elements);
    td_transformer_destroy(model);
    td_train *train;
    const td_train_config all = {.model = config, .hyper.adamw = td_adamw_defaults(TD_ADAMW_TORCH)};
    td_assert_refused(td_train_create(dev, &all, &train), TD_UNSUPPORTED, "groups are of this rank's");
    td_train_bytes bytes;
    td_assert_refused(td_train_plan(dev, &all, &bytes), TD_UNSUPPORTED, "at element 200: groups are");

    td_range bad[] = {{0, 200}, {300, 300}};
    config.owned = bad;
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_BAD_ARGUMENT,
                      "owned[1] is of elements 300 to 300, needs some of 200 to");
    bad[1] = (td_range){199, 300};
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_BAD_ARGUMENT,
                      "owned[1] is of elements 199");
    bad[1] = (td_range){200, weights.elements + 1};
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_BAD_ARGUMENT,
                      "owned[1] is of elements 200 to");
    config.owned_count = 0;
    td_assert_refused(td_transformer_create(dev, &config, &model), TD_BAD_ARGUMENT, "owned_count is 0");
    td_device_close(dev);
}

/* A file must have the extents of each of the model's tensors, and all digits of its theta. */
TD_BODY(files_of_other_models_are_refused)
{
    td_transformer_config config = {.size = ODD, .batch = 1, .context = 4, .attention = "naive"};
    static const char zeros[4096];
    td_safetensors_writer *writer;
    td_transformer *model, *other;
    td_safetensors *file;
    td_stored tensors[32];
    td_device *dev;
    char words[128];

    td_assert_ok(td_device_open("cpu", &dev));
    config.rope_theta = 10000.125;
    td_assert_ok(td_transformer_create(dev, &config, &model));
    config.rope_theta = 10000.1250001;
    td_assert_ok(td_transformer_create(dev, &config, &other));
    td_assert_ok(td_transformer_init(model, 1));
    td_assert_ok(td_transformer_save(model, file_path));
    td_assert_refused(td_transformer_load(other, file_path), TD_BAD_ARGUMENT, "rope_theta 10000.125, this");
    td_assert_ok(td_transformer_forward(model, (const int64_t[]){0, 1, 2, 3}, 1, 4, NULL));
    td_assert_ok(td_transformer_load(model, file_path));
    td_assert_refused(td_transformer_loss(model, (const int64_t[]){0, 1, 2, 3}, NULL), TD_BAD_STATE,
                      "no forward came before");
    td_assert_ok(td_safetensors_open(file_path, &file));
    const int64_t count = td_safetensors_count(file);
    for (int64_t i = 0; i < count; i++)
        td_assert_ok(td_safetensors_tensor(file, i, &tensors[i]));
    for (int64_t i = 0; i < count; i++) {
        tensors[i].shape[tensors[i].rank++] = 1;
        td_assert_ok(td_safetensors_writer_create(file_path, count, tensors, 0, NULL, &writer));
        for (int64_t k = 0; k < count; k++)
            td_assert_ok(td_safetensors_write(writer, zeros, tensors[k].bytes));
        td_assert_ok(td_safetensors_commit(writer));
        td_safetensors_writer_destroy(writer);
        snprintf(words, sizeof words, "tensor '%s' has %d extents", tensors[i].name, (int)tensors[i].rank--);
        td_assert_refused(td_transformer_load(model, file_path), TD_BAD_ARGUMENT, words);
    }
    td_safetensors_close(file);
    td_transformer_destroy(model);
    td_transformer_destroy(other);
    td_device_close(dev);
}

TD_BODY(gradients_of_a_place_share_memory)
{
    td_range owned[] = {{0, 200}, {300, 400}};
    int32_t places[] = {1, 1};
    td_transformer_config config = {.size = ODD,
                                    .batch = 1,
                                    .context = 3,
                                    .precision = TD_PRECISION_BF16_MIXED,
                                    .attention = "flash",
                                    .use = TD_MODEL_GRADIENTS,
                                    .transient_gradients = true,
                                    .owned = owned,
                                    .owned_count = 2,
                                    .grad_places = places};
    const int64_t ids[3] = {0};
    td_transformer_bytes bytes, apart;
    td_transformer *model;
    td_parameter parameter;
    int64_t elements;
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_transformer_plan(dev, &config, &bytes));
    config.owned_count = 1;
    td_assert_ok(td_transformer_plan(dev, &config, &apart));
    assert_int_equal(bytes.gradients, apart.gradients); /* of the larger range */
    config.owned_count = 2;
    places[1] = TD_GRAD_PLACES + 1;
    td_assert_refused(td_transformer_plan(dev, &config, &bytes), TD_BAD_ARGUMENT, "grad_places[1] is 9");
    places[1] = -1;
    td_assert_refused(td_transformer_plan(dev, &config, &bytes), TD_BAD_ARGUMENT, "grad_places[1] is -1");
    config.owned = NULL;
    td_assert_refused(td_transformer_plan(dev, &config, &bytes), TD_BAD_ARGUMENT, "owned is NULL");
    config.owned = owned;
    config.transient_gradients = false;
    td_assert_refused(td_transformer_plan(dev, &config, &bytes), TD_BAD_ARGUMENT,
                      "grad_places is set, but transient_gradients is false");
    config.owned = NULL;

    /* A range of masters, some of them in planes. */
    td_assert_ok(td_transformer_elements(&config.size, config.precision, &elements));
    config.grad_places = NULL;
    td_assert_ok(td_transformer_plan(dev, &config, &apart));
    owned[0] = (td_range){0, elements};
    config.transient_gradients = true;
    config.owned = owned;
    config.owned_count = 1;
    config.grad_places = places;
    td_assert_ok(td_transformer_plan(dev, &config, &bytes));
    assert_int_equal(bytes.gradients, apart.gradients);
    td_assert_ok(td_transformer_create(dev, &config, &model));
    td_assert_ok(td_transformer_init(model, 1));
    td_assert_ok(td_transformer_parameter(model, 0, &parameter));
    assert_null(parameter.grad);
    td_assert_ok(td_transformer_forward(model, ids, 1, 3, NULL));
    td_assert_ok(td_transformer_loss(model, ids, NULL));
    td_assert_refused(td_transformer_backward(model, TD_MICRO_LAST), TD_BAD_ARGUMENT, "are transient");
    td_assert_ok(td_transformer_backward(model, TD_MICRO_ONLY));
    td_transformer_destroy(model);
    td_device_close(dev);
}

#define AXES                                                                                                 \
    {                                                                                                        \
        {"f32", "bf16 and micro-batches", "mixed, all kept", "mixed, micro-batches", "mixed, checkpoints"},  \
            SPLITS                                                                                           \
    }
static const td_cases steps = {.group = "steps have the bits of the whole model",
                               .test = steps_have_the_bits_of_the_whole_model,
                               .axes = AXES};
static const td_cases by_range = {
    .group = "weights come by range", .test = weights_come_by_range, .axes = AXES};
static const td_cases memory = {
    .group = "only what is owned takes memory", .test = only_what_is_owned_takes_memory, .axes = AXES};

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_needs_all_weights_refuses_a_part),
                                       cmocka_unit_test(files_of_other_models_are_refused),
                                       cmocka_unit_test(gradients_of_a_place_share_memory)};

    td_assert_ok(td_cpu_set_threads(1));
    return td_run_cases(&steps, NULL, NULL) + td_run_cases(&memory, NULL, NULL) +
           td_run_cases(&by_range, file_folder_make, file_folder_remove) +
           td_run_group("refusals", 3, tests, file_folder_make, file_folder_remove);
}
