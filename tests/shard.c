/* Optimizer state that is split by tensors, with the course's toy models. test_shard BACKEND RANKS starts the
 * ranks itself; under mpirun it is one rank. Every rank compares with the training of one process. */
#include "shard/shard.h"

#include "support/compare.h"
#include "support/ranks.h"
#include "support/test.h"
#include "support/toys.h"

static td_device *dev;
static td_comm *comm;
static td_comm_info info;

/* ---- assignment of tensors to ranks ---- */

TD_TEST(the_largest_go_first_to_the_rank_with_least)
{
    const int64_t elements[] = {5, 9, 5, 0, 7}, more[] = {4, 4};
    int64_t loads[3] = {0};
    int32_t owners[5];

    td_assert_ok(td_shard_assign(5, elements, 3, loads, owners));
    assert_memory_equal(owners, ((const int32_t[]){2, 0, 2, 1, 1}), sizeof owners);
    assert_memory_equal(loads, ((const int64_t[]){9, 7, 10}), sizeof loads);
    td_assert_ok(td_shard_assign(2, more, 3, loads, owners)); /* a later group continues with these loads */
    assert_memory_equal(owners, ((const int32_t[]){1, 0}), 2 * sizeof *owners);
    td_assert_ok(td_shard_assign(0, NULL, 3, loads, NULL));
    loads[1] = INT64_MAX - 5;
    td_assert_refused(td_shard_assign(5, elements, 3, loads, owners), TD_BAD_ARGUMENT, "loads[1] is");
}

/* xl of 2025: 435 tensors. The two largest are as large as the differences of all others. */
TD_TEST(large_models_are_split_evenly)
{
    const td_model_size xl = {.d_model = 1600, .d_ff = 6400, .layers = 48, .heads = 25, .vocab = 10000};
    int64_t elements[435], loads[2] = {0};
    int32_t owners[435];
    td_parameter p;

    for (int64_t i = 0; i < 435; i++) {
        td_assert_ok(td_transformer_parameter_of(&xl, TD_PRECISION_F32, i, &p));
        elements[i] = p.numel;
    }
    td_assert_ok(td_shard_assign(435, elements, 2, loads, owners));
    assert_int_equal(loads[0] + loads[1], 1998235200);
    assert_true(llabs(loads[0] - loads[1]) <= 1600);
}

/* ---- toys ---- */

typedef struct bed {
    toy model, one; /* the sharded model, and the model of one process */
    float grads[TOY_TENSORS][500];
    td_shard_list *list;
    /* The optimizer of one process. */
    float m[TOY_TENSORS][500], v[TOY_TENSORS][500];
    td_update_state state;
} bed;

static td_hyperparameters adamw_of(double lr)
{
    td_hyperparameters hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)};

    hyper.adamw.lr = lr;
    hyper.adamw.weight_decay = 0.1;
    return hyper;
}

static td_shard_tensor tensor_of(bed *b, int index)
{
    toy_tensor *t = &b->model.tensors[index];

    return (td_shard_tensor){.elements = toy_numel(t),
                             .dtype = TD_F32,
                             .grad_dtype = TD_F32,
                             .data = t->data,
                             .grad = t->frozen ? NULL : b->grads[index]};
}

static bed *open_bed(bool tied)
{
    bed *b = calloc(1, sizeof *b);

    assert_non_null(b);
    toy_make(&b->model, tied, 42);
    for (int i = 0; i < b->model.tensor_count; i++)
        b->model.tensors[i].grad = b->model.tensors[i].frozen ? NULL : b->grads[i];
    b->one = b->model;
    td_assert_ok(td_shard_list_create(dev, comm, &b->list));
    return b;
}

static void close_bed(bed *b)
{
    td_shard_list_destroy(b->list);
    free(b);
}

static void add(bed *b, int first, int count, const td_hyperparameters *hyper)
{
    td_shard_tensor tensors[TOY_TENSORS];

    for (int i = 0; i < count; i++)
        tensors[i] = tensor_of(b, first + i);
    td_assert_ok(td_shard_list_add(b->list, count, tensors, hyper));
}

/* The gradients of one step, the same on all ranks. */
static void backward(bed *b, int step)
{
    int samples[TOY_SAMPLES];

    toy_shuffle(step, 20, samples);
    memset(b->grads, 0, sizeof b->grads);
    toy_backward(&b->model, samples, 20, NULL, NULL);
}

/* Updates some tensors in one process, with the same gradients of the same weights. */
static void update_one(bed *b, int first, int count, const td_hyperparameters *hyper)
{
    for (int i = first; i < first + count; i++) {
        toy_tensor *t = &b->one.tensors[i];
        const td_update_tensors tensors = {.count = toy_numel(t),
                                           .dtype = TD_F32,
                                           .p = t->data,
                                           .g = b->grads[i],
                                           .m = b->m[i],
                                           .v = b->v[i]};

        if (t->frozen)
            continue;
        if (hyper->kind == TD_OPTIMIZER_SGD)
            td_assert_ok(td_sgd_update(dev, &hyper->sgd, &b->state, &tensors));
        else
            td_assert_ok(td_adamw_update(dev, &hyper->adamw, &b->state, &tensors));
    }
}

static void assert_alike(const bed *b)
{
    for (int i = 0; i < b->model.tensor_count; i++)
        td_assert_identical(b->model.tensors[i].name, TD_F32, b->model.tensors[i].data,
                            b->one.tensors[i].data, toy_numel(&b->one.tensors[i]));
}

TD_TEST(sharded_weights_are_those_of_one_optimizer)
{
    for (int tied = 0; tied < 2; tied++)
        for (int kind = 0; kind < 2; kind++) {
            bed *b = open_bed(tied);
            const td_hyperparameters hyper =
                kind ? adamw_of(0.1) : (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};
            const int count = b->model.tensor_count;

            add(b, 0, count, &hyper);
            for (int step = 0; step < 10; step++) {
                backward(b, step);
                td_assert_ok(td_shard_list_step(b->list, 0.5f));
                td_assert_ok(td_update_begin(dev, &b->state, 0.5f));
                update_one(b, 0, count, &hyper);
                assert_alike(b);
            }
            close_bed(b);
        }
}

/* Two groups with different rates; the second is added later, and then the rate changes. */
TD_TEST(groups_come_later_and_have_their_own_hyperparameters)
{
    bed *b = open_bed(true);
    const td_hyperparameters first = adamw_of(0.1), second = adamw_of(0.01), third = adamw_of(0.03);

    add(b, 0, 2, &first);
    for (int step = 0; step < 9; step++) {
        backward(b, step);
        if (step == 3)
            add(b, 2, 2, &second);
        if (step == 6)
            td_assert_ok(td_shard_list_set(b->list, 1, &third));
        td_assert_ok(td_shard_list_step(b->list, 1));
        td_assert_ok(td_update_begin(dev, &b->state, 1));
        update_one(b, 0, 2, &first);
        if (step >= 3)
            update_one(b, 2, 2, step >= 6 ? &third : &second);
        assert_alike(b);
    }
    close_bed(b);
}

/* Each rank has the moments of its tensors; together the ranks have all moments. With four ranks and three
 * tensors with gradients, one rank has none. */
TD_TEST(state_is_split_and_may_be_none)
{
    bed *b = open_bed(false);
    const td_hyperparameters hyper = adamw_of(0.1);
    size_t mine = 1, *all = calloc((size_t)info.ranks, sizeof *all), sum = 0;
    td_memory_stats before, after;
    bool none = false;

    td_assert_ok(td_device_memory(dev, &before));
    add(b, 0, 1, &hyper);
    add(b, 1, 4, &hyper); /* to the ranks that have least of both groups */
    td_assert_ok(td_device_memory(dev, &after));
    td_assert_ok(td_shard_list_bytes(b->list, &mine));
    assert_true(after.current_bytes - before.current_bytes - mine < 5 * TD_ALIGNMENT);
    td_assert_ok(td_comm_exchange(comm, &mine, sizeof mine, all));
    for (int rank = 0; rank < info.ranks; rank++) {
        sum += all[rank];
        none |= all[rank] == 0;
    }
    assert_int_equal(sum, (100 + 500 + 250) * 2 * sizeof(float));
    assert_int_equal(all[info.ranks > 1], (info.ranks > 1 ? 500 : sum / 8) * 2 * sizeof(float));
    assert_int_equal(none, info.ranks > 3);
    free(all);
    close_bed(b);
}

/* Each case has its own communicator, because an error of ranks ends it. */
TD_TEST(lists_that_differ_are_refused)
{
    static const struct {
        const char *name, *words;
        bool late; /* fails in the second step */
    } cases[] = {{"order", "tensors[0]: gradients (hash; 0: none): rank 1 has ", false},
                 {"count", "another call", false},
                 {"rate", "in another state than rank 0: other lr", false},
                 {"kind", "in another state than rank 0: other lr, hyperparameters or", false},
                 {"gain", "in another state than rank 0: other gain", false},
                 {"names", "tensors[0]: name (hash): rank 1 has ", false},
                 {"schedule", "in another state than rank 0: other lr", true},
                 {"end", "tensors[1]: weights (hash): rank 1 has ", false},
                 {"begin", "tensors[1]: weights (hash): rank 1 has ", false}};
    enum { MANY = 1000 }; /* more than the bytes that are hashed at a tensor's begin */

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_comm *other = td_ranks_other(dev, comm, cases[i].name);
        float data[2][MANY], grads[2][MANY];
        const bool odd = info.rank == 1, named = strcmp(cases[i].name, "names") == 0; /* equal numbers */
        td_hyperparameters hyper = {
            .kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.5, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)};
        td_shard_tensor tensors[2];
        td_shard_list *list;

        if (!other)
            return;
        for (int t = 0; t < 2; t++) {
            for (int j = 0; j < MANY; j++) {
                data[t][j] = 1;
                grads[t][j] = named ? 0 : t == 0 ? 1 : 0.1f;
            }
            if (strstr(cases[i].words, "weights") && odd)
                data[t][cases[i].name[0] == 'e' ? MANY - 1 : 0] = (float)(1 + t);
            tensors[(i == 0 || named) && odd ? 1 - t : t] =
                (td_shard_tensor){.name = named ? t == 0 ? "layers.0.w1" : "layers.0.w2" : NULL,
                                  .elements = MANY,
                                  .dtype = TD_F32,
                                  .grad_dtype = TD_F32,
                                  .data = data[t],
                                  .grad = grads[t]};
        }
        hyper.sgd.lr = i == 2 && odd ? 5 : 0.5;
        hyper.kind = i == 3 && odd ? TD_OPTIMIZER_ADAMW : TD_OPTIMIZER_SGD;
        td_assert_ok(td_shard_list_create(dev, other, &list));
        td_assert_ok(td_shard_list_add(list, 1, tensors, &hyper));
        if (i != 1 || !odd)
            td_assert_ok(td_shard_list_add(list, 1, tensors + 1, &hyper));
        const float gain = i == 4 && odd ? 0.5f : 1;
        if (cases[i].late) {
            td_assert_ok(td_shard_list_step(list, gain));
            hyper.sgd.lr = odd ? 0.4 : 0.5;
            td_assert_ok(td_shard_list_set(list, 1, &hyper));
        }
        td_assert_refused(td_shard_list_step(list, gain),
                          strncmp(cases[i].words, "tensors", 7) == 0 ? TD_BAD_ARGUMENT : TD_RANK_FAILED,
                          cases[i].words);
        td_shard_list_destroy(list);
        (void)td_comm_close(other);
    }
}

/* Each number of a tensor that ranks compare: another value on rank 1, of a tensor added after a step. */
#define FIELDS(ROW)                                                                                          \
    ROW(tensors[1].elements, 7, "tensors[1]: elements: rank 1 has 7, where rank 0 has 8")                    \
    ROW(tensors[1].dtype, TD_BF16, "tensors[1]: dtype: rank 1 has 3, where rank 0 has 1")                    \
    ROW(tensors[1].grad_dtype, TD_F16, "tensors[1]: grad_dtype: rank 1 has 2, where rank 0 has 3")           \
    ROW(tensors[1].grad, NULL, "tensors[1]: grad_dtype: rank 1 has 0, where rank 0 has 3")                   \
    ROW(together, 2, "tensors[2]: group: rank 1 has 1, where rank 0 has 2")

TD_TEST(numbers_that_differ_are_named)
{
    static const td_field rows[] = {FIELDS(TD_FIELD)};
    static uint16_t grads[8] = {0x3F80, 0xBF80}; /* 1 and -1 in bf16 */
    static float data[8];

    for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
        const td_hyperparameters hyper = {.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.5};
        const td_shard_tensor one = {
            .elements = 8, .dtype = TD_F32, .grad_dtype = TD_BF16, .data = data, .grad = grads};
        td_shard_tensor tensors[] = {one, one, one};
        td_comm *other = td_ranks_other(dev, comm, rows[i].field);
        const bool differs = info.rank == 1;
        int64_t together = 1;
        td_shard_list *list;
        int row = 0;

        if (!other)
            return;
        FIELDS(TD_FIELD_SET)
        if (tensors[1].dtype == TD_BF16)
            tensors[1].grad_dtype = TD_BF16;
        td_assert_ok(td_shard_list_create(dev, other, &list));
        td_assert_ok(td_shard_list_add(list, 1, tensors, &hyper));
        td_assert_ok(td_shard_list_step(list, 1));
        assert_true(data[0] == -0.5f * (float)(i + 1) && data[1] == -data[0]);
        td_assert_ok(td_shard_list_add(list, together, tensors + 1, &hyper));
        if (together == 1)
            td_assert_ok(td_shard_list_add(list, 1, tensors + 2, &hyper));
        td_assert_refused(td_shard_list_step(list, 1), TD_BAD_ARGUMENT, rows[i].words);
        td_shard_list_destroy(list);
        (void)td_comm_close(other);
    }
}

TD_TEST(what_is_wrong_is_named)
{
    bed *b = open_bed(false);
    td_hyperparameters hyper = adamw_of(0.1);
    td_shard_tensor tensor = tensor_of(b, 0);

    td_assert_ok(td_device_fail_allocation(dev, 1));
    td_assert_refused(td_shard_list_add(b->list, 1, &tensor, &hyper), TD_NO_MEMORY,
                      "as td_device_fail_allocation asked");
    td_assert_ok(td_shard_list_add(b->list, 1, &tensor, &hyper));
    hyper.kind = TD_OPTIMIZER_SGD;
    hyper.sgd.lr = 1;
    td_assert_refused(td_shard_list_set(b->list, 0, &hyper), TD_BAD_ARGUMENT, "but the group's is 0");
    tensor.dtype = TD_F16;
    tensor.grad_dtype = TD_BF16;
    td_assert_refused(td_shard_list_add(b->list, 1, &tensor, &hyper), TD_BAD_ARGUMENT,
                      "tensors[0].grad_dtype is bf16, needs dtype, which is f16");
    close_bed(b);
}

TD_RANKS_MAIN(dev, comm, info)
