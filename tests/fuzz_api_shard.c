/* The functions of shard.h, on a communicator of one rank. tests/shard.c and tests/shard_link.c test several
 * ranks. */
#include "support/fuzz_api_train.h"

#include "base/check.h"
#include "shard/shard.h"

enum { TENSORS = 4, ROOM = 24 };

typedef struct bed {
    td_comm *comm;
    float data[TENSORS][ROOM], grads[TENSORS][ROOM];
    td_shard_tensor tensors[TENSORS];
    int64_t count;
    td_hyperparameters hyper;
    td_shard_list *list;
    td_train_config config;
    td_shard_link *link;
    td_train *train;
} bed;

static bed *open_bed(void)
{
    static bed b;

    b = (bed){.comm = api_one_rank(),
              .count = 1 + td_fuzz_below(TENSORS),
              .hyper = {.kind = (td_optimizer_kind)td_fuzz_below(2),
                        .adamw = td_adamw_defaults((td_adamw_variant)td_fuzz_below(3)),
                        .sgd.lr = 0.1}};
    for (int64_t i = 0; i < b.count; i++)
        b.tensors[i] = (td_shard_tensor){.elements = 1 + td_fuzz_below(ROOM),
                                         .dtype = TD_F32,
                                         .grad_dtype = TD_F32,
                                         .data = b.data[i],
                                         .grad = td_fuzz_chance(80) ? b.grads[i] : NULL};
    return &b;
}

static bed *open_list(void)
{
    bed *b = open_bed();

    td_assert_ok(td_shard_list_create(api_dev, b->comm, &b->list));
    td_assert_ok(td_shard_list_add(b->list, b->count, b->tensors, &b->hyper));
    td_forget_error();
    return b;
}

static td_status close_bed(bed *b, td_status status)
{
    td_train_destroy(b->train);
    td_shard_link_destroy(b->link);
    td_shard_list_destroy(b->list);
    return api_close_rank(b->comm, status);
}

API(td_shard_assign)
{
    static const int64_t bad[] = {-1, INT64_MIN};
    int64_t elements[TENSORS] = {3, 0, 7, 3}, loads[3] = {0, 5, 2};
    int64_t count = td_fuzz_below(TENSORS + 1);
    int32_t ranks = 1 + (int32_t)td_fuzz_below(3);

    if (count > 0 && wrong()) {
        elements[td_fuzz_below(count)] = bad_below(2) == 0 ? BAD_NUMBER(bad) : INT64_MAX;
        loads[0] = 1;
        impossible(TD_BAD_ARGUMENT, "elements");
    } else if (wrong()) {
        loads[0] = BAD_NUMBER(bad);
        impossible(TD_BAD_ARGUMENT, "loads");
    }
    SPOIL(count, "count", -1, INT64_MIN);
    SPOIL(ranks, "ranks", 0, TD_COMM_MOST_RANKS + 1);
    const void *sizes = count > 0 ? in_copy("elements", elements, (size_t)count * sizeof *elements) : NULL;
    void *load = in_out_copy("loads", loads, sizeof loads);
    void *owners = count > 0 ? out("owners", (size_t)count * sizeof(int32_t)) : NULL;
    return td_shard_assign(count, sizes, ranks, load, owners);
}

API(td_shard_list_create)
{
    bed *b = open_bed();
    td_device *device = dev();
    td_comm *comm = pointer("comm", b->comm);
    td_shard_list **to = pointer("out", &b->list);
    const td_status status = td_shard_list_create(device, comm, to);

    if (to && status != TD_OK)
        assert_null(b->list);
    return close_bed(b, status);
}

API_OF_NULL(td_shard_list_destroy)

API(td_shard_list_add)
{
    bed *b = open_list();
    td_shard_tensor *const any = &b->tensors[td_fuzz_below(b->count)];
    const td_hyperparameters hyper = api_draw_hyper();
    int64_t count = b->count;

    if (wrong()) {
        any->elements = bad_below(2) == 0 ? 0 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "elements");
    } else if (wrong()) {
        any->elements = INT64_MAX / 4;
        impossible(TD_BAD_ARGUMENT, "tensors");
    }
    SPOIL(any->data, "data", NULL);
    SPOIL(any->dtype, "needs f32, f16 or bf16", TD_F64, (td_dtype)77);
    if (any->grad && wrong()) {
        any->grad_dtype = TD_F64;
        impossible(TD_BAD_ARGUMENT, "grad_dtype");
    }
    SPOIL_NUMBER(count, "count", 0, -1, INT64_MIN, INT64_MAX);
    td_shard_list *list = pointer("list", b->list);
    const void *tensors = pointer("tensors", b->tensors);
    const void *with = in_copy("hyper", &hyper, sizeof hyper);
    return close_bed(b, td_shard_list_add(list, count, tensors, with));
}

API(td_shard_list_set)
{
    bed *b = open_list();
    td_hyperparameters hyper = api_draw_hyper_of(b->hyper.kind);
    int64_t group = 0;

    SPOIL(group, "group", -1, 1);
    td_shard_list *list = pointer("list", b->list);
    return close_bed(b, td_shard_list_set(list, group, in_copy("hyper", &hyper, sizeof hyper)));
}

API(td_shard_list_step)
{
    bed *b = open_list();
    float gain = 0.5f;

    SPOIL_NUMBER(gain, "gain", NAN, INFINITY, -INFINITY);
    return close_bed(b, td_shard_list_step(pointer("list", b->list), gain));
}

API(td_shard_list_bytes)
{
    bed *b = open_list();
    const td_shard_list *list = pointer("list", b->list);

    return close_bed(b, td_shard_list_bytes(list, out("out", sizeof(size_t))));
}

/* ---- the link ---- */

API_NAMES(td_shard_kind, td_shard_kind_name, "tensors", "flat", "full")

API_PARSE(td_shard_kind, td_shard_kind_parse, "name|kind", "tensors", "flat", "full")

API(td_shard_nccl_ctas)
{
    assert_int_equal(td_shard_nccl_ctas(TD_BF16), td_shard_nccl_ctas(TD_F16));
    assert_in_range(td_shard_nccl_ctas(TD_BF16), 1, TD_COMM_MOST_CTAS);
    assert_in_range(td_shard_nccl_ctas(TD_F32), 1, TD_COMM_MOST_CTAS);
    assert_int_equal(td_shard_nccl_ctas((td_dtype)-1), 0);
    return TD_OK;
}

/* A config, and a link of it if `links`. */
static bed *open_link(bool links)
{
    bed *b = open_bed();
    const td_shard_options options = {.kind = (td_shard_kind)td_fuzz_below(3),
                                      .prefetch = td_fuzz_below(4),
                                      .keep_weights = td_fuzz_chance(50),
                                      .reduce_last = td_fuzz_chance(50)};

    b->config = api_good_train();
    if (links)
        td_assert_ok(td_shard_link_create(b->comm, &options, &b->config, &b->config, &b->link));
    return b;
}

static bed *open_train(bed *b)
{
    td_assert_ok(td_train_create(api_dev, &b->config, &b->train));
    td_assert_ok(td_train_init(b->train, 7));
    td_forget_error();
    return b;
}

API(td_shard_link_create)
{
    bed *b = open_bed();
    td_train_config config = api_good_train(), own = {.gain = 3};
    td_shard_options options = {.kind = (td_shard_kind)choice("kind", 3),
                                .bucket_mb = td_fuzz_chance(50) ? 0 : 0.001,
                                .prefetch = td_fuzz_below(4)};

    SPOIL_NUMBER(options.bucket_mb, "bucket_mb", -1, NAN, INFINITY);
    SPOIL(options.prefetch, "prefetch", -1, INT64_MAX);
    SPOIL(config.model.size.layers, "size", 0, INT32_MAX);
    SPOIL(config.group_count, "group_count", -1, INT64_MAX);
    td_comm *comm = pointer("comm", b->comm);
    const td_shard_options *from = pointer("options", &options);
    const td_train_config *of = in_copy("config", &config, sizeof config);
    td_train_config *to_own = in_out_copy("own", &own, sizeof own);
    API_MAKES(td_shard_link, td_shard_link_destroy, td_shard_link_create(comm, from, of, to_own, to));
    return close_bed(b, status);
}

API_OF_NULL(td_shard_link_destroy)

API(td_shard_link_describe)
{
    bed *b = open_link(true);
    const td_shard_link *from = pointer("link", b->link);

    return close_bed(b, td_shard_link_describe(from, out("out", sizeof(td_shard_info))));
}

API(td_shard_link_attach)
{
    bed *b = open_train(open_link(true));

    if (b->config.until == TD_TRAIN_FORWARD)
        impossible(TD_BAD_ARGUMENT, "forward only");
    td_shard_link *to = pointer("link", b->link);
    td_device *device = dev();
    return close_bed(b, td_shard_link_attach(to, device, pointer("train", b->train)));
}

API(td_shard_link_hook)
{
    bed *b = open_link(true);

    assert_null(td_shard_link_hook(NULL));
    assert_ptr_equal(td_shard_link_hook(b->link), b->config.hooks);
    return close_bed(b, TD_OK);
}

API(td_shard_link_finish)
{
    bed *b = open_link(true);

    impossible(TD_BAD_STATE, "attached to no trainer");
    return close_bed(b, td_shard_link_finish(pointer("link", b->link)));
}

API(td_shard_gather)
{
    bed *b = open_link(true);
    td_parameter p;

    b->config.until = TD_TRAIN_UPDATE;
    open_train(b);
    if (td_fuzz_chance(80))
        td_assert_ok(td_shard_link_attach(b->link, api_dev, b->train));
    else
        impossible(TD_BAD_STATE, "attached to no trainer");
    td_forget_error();
    td_shard_link *to = pointer("link", b->link);
    int64_t index = td_fuzz_below(td_transformer_parameter_count(td_train_model(b->train)));
    td_assert_ok(td_transformer_parameter(td_train_model(b->train), index, &p));
    SPOIL(index, "index", -1, INT64_MAX);
    return close_bed(b, td_shard_gather(to, index, out("numbers", (size_t)p.numel * td_dtype_size(p.dtype))));
}

/* ---- saving: a trainer of all state, or of a link that is not attached ---- */

API(td_shard_save)
{
    bed *b = open_train(open_link(td_fuzz_chance(70)));

    if (b->config.until != TD_TRAIN_UPDATE)
        impossible(TD_BAD_STATE, "optimizer");
    const char *path = path_or_none(path_own(false));
    td_comm *comm = pointer("comm", b->comm);
    return close_bed(b, path_done(td_shard_save(comm, pointer("train", b->train), path)));
}

/* Restores a file that the case wrote. tests/fuzz_safetensors.c tests other files. */
API(td_shard_restore)
{
    bed *b = open_train(open_link(td_fuzz_chance(70)));
    const char *path = path_own(false);

    if (b->config.until == TD_TRAIN_UPDATE)
        td_assert_ok(td_shard_save(b->comm, b->train, path));
    else
        impossible(TD_BAD_STATE, "optimizer");
    td_forget_error();
    path = path_or_none(path);
    td_comm *comm = pointer("comm", b->comm);
    return close_bed(b, path_done(td_shard_restore(comm, pointer("train", b->train), path)));
}
