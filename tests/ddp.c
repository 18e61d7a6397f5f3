/* The container of data parallelism among processes, with the course's toy models. test_ddp BACKEND RANKS
 * starts the ranks itself. Under mpirun the process is one of the ranks. Every rank also computes the result
 * of a single process, so it can judge its results alone. */
#include "base/float16.h"
#include "ddp/reduce.h"
#include "device/sms.h"

#include "support/compare.h"
#include "support/ranks.h"
#include "support/test.h"
#include "support/toys.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <unistd.h>

static td_device *dev;
static td_comm *comm;
static td_comm_info info;

/* ---- a toy with its container ---- */

typedef struct pair {
    toy model;
    float memory[TOY_TENSORS][500]; /* gradients outside the container's memory */
    td_ddp *ddp;
} pair;

static td_ddp_tensor tensor_of(pair *p, int index, bool own)
{
    toy_tensor *t = &p->model.tensors[index];

    return (td_ddp_tensor){.name = t->name,
                           .dims = t->cols > 0 ? 2 : 1,
                           .shape = {t->rows, t->cols},
                           .dtype = TD_F32,
                           .grad_dtype = TD_F32,
                           .data = t->data,
                           .grad = own ? NULL : p->memory[index],
                           .frozen = t->frozen,
                           .uses = t->uses};
}

/* own: the container allocates the gradients. */
static td_status try_wrap(pair *p, td_ddp_strategy strategy, double bucket_mb, bool own, const int64_t *order)
{
    char names[TOY_TENSORS][32]; /* the container copies them */
    td_ddp_tensor tensors[TOY_TENSORS];
    const td_ddp_config config = {.count = p->model.tensor_count,
                                  .tensors = tensors,
                                  .strategy = strategy,
                                  .bucket_mb = bucket_mb,
                                  .order = order};

    memset(p->memory, 0, sizeof p->memory);
    for (int i = 0; i < p->model.tensor_count; i++) {
        tensors[i] = tensor_of(p, i, own);
        tensors[i].name = strcpy(names[i], tensors[i].name);
    }
    return td_ddp_create(dev, comm, &config, &p->ddp);
}

static void wrap(pair *p, td_ddp_strategy strategy, double bucket_mb, bool own, const int64_t *order)
{
    td_assert_ok(try_wrap(p, strategy, bucket_mb, own, order));
    for (int i = 0; i < p->model.tensor_count; i++) {
        void *grad = NULL;

        td_assert_ok(td_ddp_gradient(p->ddp, i, &grad));
        p->model.tensors[i].grad = grad;
        assert_int_equal(grad == NULL, p->model.tensors[i].frozen);
        if (!own && grad)
            assert_ptr_equal(grad, p->memory[i]);
    }
}

static void mark(void *user, int tensor)
{
    td_assert_ok(td_ddp_ready(((pair *)user)->ddp, tensor));
}

static void zero(toy *model)
{
    for (int i = 0; i < model->tensor_count; i++)
        if (model->tensors[i].grad)
            memset(model->tensors[i].grad, 0, (size_t)toy_numel(&model->tensors[i]) * sizeof(float));
}

static void sgd(toy *model, float scale)
{
    for (int i = 0; i < model->tensor_count; i++) {
        toy_tensor *t = &model->tensors[i];

        for (int64_t k = 0; t->grad && k < toy_numel(t); k++)
            t->data[k] -= 0.1f * (scale * t->grad[k]);
    }
}

/* 20 samples, as in the course, or a number that all ranks can share equally. */
static int sample_count(void)
{
    return 20 % info.ranks == 0 ? 20 : TOY_SAMPLES;
}

/* ---- a single process ---- */

typedef struct single {
    toy model;
    float sums[TOY_TENSORS][500], parts[TOY_TENSORS][500];
} single;

static void point(toy *model, float memory[TOY_TENSORS][500])
{
    for (int i = 0; i < model->tensor_count; i++)
        model->tensors[i].grad = model->tensors[i].frozen ? NULL : memory[i];
}

/* A step of a single process: computes the gradients of each rank's samples, and adds them in the order of
 * ranks. */
static void step_by_ranks(single *s, const int *samples, int count)
{
    const int share = count / info.ranks;

    point(&s->model, s->sums);
    zero(&s->model);
    for (int rank = 0; rank < info.ranks; rank++) {
        point(&s->model, s->parts);
        zero(&s->model);
        toy_backward(&s->model, samples + rank * share, share, NULL, NULL);
        for (int i = 0; i < TOY_TENSORS; i++)
            for (int k = 0; k < 500; k++)
                s->sums[i][k] = rank == 0 ? s->parts[i][k] : s->sums[i][k] + s->parts[i][k];
    }
    point(&s->model, s->sums);
    sgd(&s->model, 1.0f / (float)info.ranks);
}

static void step_at_once(single *s, const int *samples, int count)
{
    point(&s->model, s->sums);
    zero(&s->model);
    toy_backward(&s->model, samples, count, NULL, NULL);
    sgd(&s->model, 1);
}

static void assert_like(const toy *got, const toy *want, bool exactly)
{
    for (int i = 0; i < got->tensor_count; i++) {
        const toy_tensor *a = &got->tensors[i], *b = &want->tensors[i];

        if (exactly)
            td_assert_identical(a->name, TD_F32, a->data, b->data, toy_numel(a));
        for (int64_t k = 0; k < toy_numel(a); k++)
            if (!(fabsf(a->data[k] - b->data[k]) <= 1e-8f + 1e-5f * fabsf(b->data[k])))
                fail_msg("%s[%d] is %.9g, not %.9g", a->name, (int)k, (double)a->data[k], (double)b->data[k]);
    }
}

/* Fails unless all ranks have the same weights. */
static void assert_same_everywhere(const toy *model)
{
    for (int i = 0; i < model->tensor_count; i++)
        td_ranks_assert_same(comm, model->tensors[i].data,
                             (size_t)toy_numel(&model->tensors[i]) * sizeof(float));
}

/* ---- the cases ---- */

static const double bucket_sizes[] = {0.0001, 0.0016, 0.01, 0};

static void train_case(bool tied, td_ddp_strategy strategy, double bucket_mb, bool own, const int64_t *order)
{
    static pair p;
    static single by_ranks, at_once;
    const int count = sample_count(), share = count / info.ranks;
    toy before;
    int samples[TOY_SAMPLES];

    toy_make(&p.model, tied, (uint64_t)info.rank);
    before = p.model;
    toy_make(&by_ranks.model, tied, 0);
    at_once.model = by_ranks.model;
    wrap(&p, strategy, bucket_mb, own, order);
    assert_like(&p.model, &at_once.model, true); /* rank 0's weights, also of frozen tensors */
    for (int i = 0; info.rank > 0 && i < p.model.tensor_count; i++)
        assert_true(memcmp(before.tensors[i].data, p.model.tensors[i].data, sizeof(float)) != 0);
    for (int step = 0; step < 5; step++) {
        toy_shuffle(step, count, samples);
        zero(&p.model);
        td_assert_ok(td_ddp_begin(p.ddp, true));
        toy_backward(&p.model, samples + info.rank * share, share, mark, &p);
        td_assert_ok(td_ddp_finish(p.ddp));
        sgd(&p.model, 1);
        step_by_ranks(&by_ranks, samples, count);
        step_at_once(&at_once, samples, count);
        assert_like(&p.model, &by_ranks.model, info.ranks <= 2);
        assert_like(&p.model, &at_once.model, false);
        assert_same_everywhere(&p.model);
    }
    for (int i = 0; i < p.model.tensor_count; i++)
        if (p.model.tensors[i].frozen)
            assert_memory_equal(p.model.tensors[i].data, at_once.model.tensors[i].data, sizeof(float));
    td_ddp_destroy(p.ddp);
}

TD_TEST(toys_learn_as_one_process_does)
{
    for (int tied = 0; tied < 2; tied++)
        for (td_ddp_strategy strategy = TD_DDP_NAIVE; strategy <= TD_DDP_BUCKETED; strategy++)
            for (int size = 0; size < (strategy == TD_DDP_BUCKETED ? 4 : 1); size++)
                for (int own = 0; own < 2; own++)
                    train_case(tied, strategy, bucket_sizes[size], own, NULL);
}

TD_TEST(a_given_order_is_used)
{
    const int64_t order[] = {3, 1, 0}, odd[] = {0, 3, 1};

    train_case(false, TD_DDP_BUCKETED, 0.0016, true, order);
    train_case(false, TD_DDP_BUCKETED, 0.0016, true, odd); /* buckets wait for earlier buckets */
    train_case(false, TD_DDP_OVERLAP, 0, false, info.rank % 2 ? order : odd); /* rank 0's order counts */
}

/* One step in which the tensors become ready in this order. */
static void run_marks(pair *p, const int *order, int count)
{
    td_assert_ok(td_ddp_begin(p->ddp, true));
    for (int i = 0; i < count; i++)
        td_assert_ok(td_ddp_ready(p->ddp, order[i]));
    td_assert_ok(td_ddp_finish(p->ddp));
}

/* Tensors of 400, 2000 and 1000 bytes. A bucket has at most 1400 bytes. */
TD_TEST(buckets_hold_at_most_their_size_in_the_order_of_readiness)
{
    static const int order[] = {0, 3, 1};
    static pair p;
    td_ddp_info what;

    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_BUCKETED, 1400.0 / (1 << 20), true, NULL);
    td_assert_ok(td_ddp_describe(p.ddp, &what));
    assert_int_equal(what.tensors, 3);
    assert_int_equal(what.buckets, 3);
    assert_false(what.ordered);
    assert_int_equal(p.ddp->buckets.of[3], 0); /* the list in reverse order */
    assert_int_equal(p.ddp->buckets.of[1], 1);
    assert_int_equal(p.ddp->buckets.of[0], 2);
    assert_int_equal(p.ddp->buckets.of[2], -1);
    run_marks(&p, order, 3);
    td_assert_ok(td_ddp_describe(p.ddp, &what));
    assert_true(what.ordered);
    assert_int_equal(what.buckets, 2); /* 400 + 1000, 2000 */
    assert_int_equal(what.calls, 3);   /* 0 and 3 are not adjacent in memory */
    assert_int_equal(p.ddp->buckets.of[0], 0);
    assert_int_equal(p.ddp->buckets.of[3], 0);
    assert_int_equal(p.ddp->buckets.of[1], 1);
    run_marks(&p, order, 3);
    td_ddp_destroy(p.ddp);

    wrap(&p, TD_DDP_FLAT, 0, true, NULL);
    td_assert_ok(td_ddp_describe(p.ddp, &what));
    assert_int_equal(what.calls, 1);
    assert_int_equal(what.bytes, 512 + 2048 + 1024);
    td_ddp_destroy(p.ddp);
    wrap(&p, TD_DDP_BUCKETED, 0, true, NULL);
    td_assert_ok(td_ddp_describe(p.ddp, &what));
    assert_int_equal(what.buckets, 1);
    td_ddp_destroy(p.ddp);
}

/* SMs are reserved from the first bucket that is sent until all buckets have been waited for. */
TD_TEST(the_device_is_shared_while_buckets_are_on_their_way)
{
    static pair p;

    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_BUCKETED, 0.0016, true, (int64_t[]){0, 3, 1}); /* buckets of two and one */
    p.ddp->sms = 5;
    for (int step = 0; step < 2; step++) {
        td_assert_ok(td_ddp_begin(p.ddp, true));
        td_assert_ok(td_ddp_ready(p.ddp, 0));
        assert_int_equal(td_device_reserved_sms(dev), 0);
        td_assert_ok(td_ddp_ready(p.ddp, 3));
        assert_int_equal(td_device_reserved_sms(dev), 5);
        td_assert_ok(td_ddp_ready(p.ddp, 1));
        assert_int_equal(td_device_reserved_sms(dev), 5);
        td_assert_ok(td_ddp_finish(p.ddp));
        assert_int_equal(td_device_reserved_sms(dev), 0);
    }
    td_ddp_destroy(p.ddp);
}

/* A bucket is sent when each of its tensors was marked as often as the pass uses it. */
TD_TEST(a_tied_tensor_is_sent_after_its_last_use)
{
    static const int marks[] = {3, 1, 2, 1, 0}; /* fc5, fc2, fc3, fc2 again, fc1 */
    static const struct {
        td_ddp_strategy strategy;
        double bucket_mb;
        int sent[5]; /* after each mark */
    } cases[] = {{TD_DDP_OVERLAP, 0, {1, 1, 1, 3, 4}},
                 {TD_DDP_BUCKETED, 0.003, {0, 0, 0, 1, 2}}, /* 1000 + 2000 bytes, 2000 + 400 */
                 {TD_DDP_BUCKETED, 0, {0, 0, 0, 0, 1}}};
    static pair p;

    toy_make(&p.model, true, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        wrap(&p, cases[i].strategy, cases[i].bucket_mb, true, (int64_t[]){3, 1, 2, 0});
        for (int step = 0; step < 2; step++) {
            td_assert_ok(td_ddp_begin(p.ddp, true));
            for (int k = 0; k < 5; k++) {
                td_assert_ok(td_ddp_ready(p.ddp, marks[k]));
                if (p.ddp->buckets.sent != cases[i].sent[k])
                    fail_msg("case %d: %" PRId64 " buckets were sent after mark %d, needs %d", (int)i,
                             p.ddp->buckets.sent, k, cases[i].sent[k]);
            }
            td_assert_ok(td_ddp_finish(p.ddp));
        }
        td_ddp_destroy(p.ddp);
    }
}

/* If gradients become ready in different orders on different ranks, the ranks still send them in the same
 * order. */
TD_TEST(ranks_may_differ_in_their_order)
{
    static const int orders[2][3] = {{3, 1, 0}, {0, 1, 3}};
    static pair p;

    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_OVERLAP, 0, true, NULL);
    for (int step = 0; step < 3; step++) {
        zero(&p.model);
        for (int i = 0; i < 4; i += i + 1)
            p.model.tensors[i].grad[0] = (float)(info.rank + i);
        run_marks(&p, orders[info.rank % 2], 3);
        for (int i = 0; i < 4; i += i + 1)
            assert_true(fabsf(p.model.tensors[i].grad[0] - ((float)(info.ranks - 1) / 2 + (float)i)) < 1e-6f);
    }
    td_ddp_destroy(p.ddp);
}

/* Three micro-batches give the same as one large batch; only the last one sends. Tensors that the last one
 * does not use are sent too. */
TD_TEST(micro_batches_are_added_up_without_communication)
{
    static pair p;
    static single one;
    const int share = 24 / info.ranks, micro = share / 3 > 0 ? share / 3 : 1;
    int samples[TOY_SAMPLES];

    toy_make(&p.model, true, (uint64_t)info.rank);
    toy_make(&one.model, true, 0);
    wrap(&p, TD_DDP_BUCKETED, 0.0016, true, NULL);
    for (int step = 0; step < 3; step++) {
        toy_shuffle(step, 24, samples);
        zero(&p.model);
        for (int m = 0; m < 3; m++) {
            td_assert_ok(td_ddp_begin(p.ddp, m == 2));
            toy_backward(&p.model, samples + info.rank * share + m * micro, micro, mark, &p);
            td_assert_ok(td_ddp_finish(p.ddp));
        }
        sgd(&p.model, 1.0f / 3);
        if (24 % (3 * info.ranks) == 0) {
            step_at_once(&one, samples, 24);
            assert_like(&p.model, &one.model, false);
        }
        assert_same_everywhere(&p.model);
    }
    zero(&p.model);
    for (int i = 0; i < 4; i++)
        p.model.tensors[i].grad[0] = (float)info.rank;
    td_assert_ok(td_ddp_begin(p.ddp, false));
    for (int i = 0; i < 5; i++)
        td_assert_ok(td_ddp_ready(p.ddp, i == 4 ? 1 : i));
    td_assert_ok(td_ddp_finish(p.ddp));
    assert_true(p.model.tensors[2].grad[0] == (float)info.rank); /* not sent yet */
    td_assert_ok(td_ddp_begin(p.ddp, true));
    td_assert_ok(td_ddp_ready(p.ddp, 0));
    td_assert_ok(td_ddp_finish(p.ddp));
    for (int i = 0; i < 4; i++)
        assert_true(p.model.tensors[i].grad[0] == (float)(info.ranks - 1) / 2);
    td_ddp_destroy(p.ddp);
}

/* ---- errors ---- */

TD_TEST(wrong_marks_are_refused)
{
    static pair p;

    toy_make(&p.model, true, 1);
    wrap(&p, TD_DDP_NAIVE, 0, true, NULL); /* sends nothing before the end */
    td_assert_refused(td_ddp_ready(p.ddp, 0), TD_BAD_STATE, "'fc1.weight' became ready, but no backward");
    td_assert_ok(td_ddp_begin(p.ddp, true));
    td_assert_ok(td_ddp_ready(p.ddp, 1));
    td_assert_ok(td_ddp_ready(p.ddp, 1));
    td_assert_refused(td_ddp_ready(p.ddp, 1), TD_BAD_STATE,
                      "'fc2.weight' became ready once more, after 2 of 2 uses");
    td_assert_refused(td_ddp_ready(p.ddp, 4), TD_BAD_ARGUMENT, "index is 4, needs 0 to 3");
    td_assert_refused(td_ddp_finish(p.ddp), TD_BAD_STATE, "'fc1.weight' never became ready: 0 of its 1");
    td_assert_refused(td_ddp_finish(p.ddp), TD_BAD_STATE, "no backward pass began");
    td_assert_ok(td_ddp_begin(p.ddp, false));
    td_assert_ok(td_ddp_ready(p.ddp, 1));
    td_assert_refused(td_ddp_finish(p.ddp), TD_BAD_STATE, "'fc2.weight' never became ready: 1 of its 2");
    td_ddp_destroy(p.ddp);
    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_NAIVE, 0, true, NULL);
    td_assert_ok(td_ddp_begin(p.ddp, true));
    td_assert_refused(td_ddp_ready(p.ddp, 2), TD_BAD_ARGUMENT, "'fc2.bias' is frozen");
    td_ddp_destroy(p.ddp);
    /* A gradient of an earlier pass counts in this step, but not in the next step. */
    wrap(&p, TD_DDP_NAIVE, 0, true, NULL);
    td_assert_ok(td_ddp_begin(p.ddp, false));
    for (int i = 0; i < 3; i++)
        td_assert_ok(td_ddp_ready(p.ddp, i == 2 ? 3 : i));
    td_assert_ok(td_ddp_finish(p.ddp));
    run_marks(&p, (const int[]){0}, 1);
    td_assert_ok(td_ddp_begin(p.ddp, true));
    td_assert_ok(td_ddp_ready(p.ddp, 0));
    td_assert_refused(td_ddp_finish(p.ddp), TD_BAD_STATE, "'fc2.weight' never became ready: 0 of its 1");
    td_ddp_destroy(p.ddp);
}

/* Each property of a list and of a tensor that ranks compare: another value on the last rank, and the words
 * that name it on every rank. */
#define FIELDS(ROW)                                                                                          \
    ROW(tensors[1].name, "c", "here: rank %d has a tensor of another name than rank 0")                      \
    ROW(tensors[1].dims, 1, "tensors[1], 'b' here: rank %d has f32 [2] with")                                \
    ROW(tensors[1].shape[0], 1, "rank %d has f32 [1, 3] with a gradient of f32 in 3 grad_elements")          \
    ROW(tensors[1].shape[1], 4, "rank %d has f32 [2, 4] with a gradient of f32 in 8 grad_elements")          \
    ROW(tensors[1].dtype, TD_BF16, "rank %d has bf16 [2, 3] with a gradient of f32")                         \
    ROW(tensors[1].grad_dtype, TD_BF16, "rank %d has f32 [2, 3] with a gradient of bf16")                    \
    ROW(tensors[1].grad_elements, 7, "of f32 in 7 grad_elements, used 2 times, where rank 0")                \
    ROW(tensors[1].uses, 3, "used 3 times, where rank 0 has f32 [2, 3] with a gradient of f32 in 6")         \
    ROW(tensors[1].frozen, true, "rank %d has f32 [2, 3], frozen, where rank 0 has f32 [2, 3] with")         \
    ROW(config.count, 1, "tensors: rank %d has 1, where rank 0 has 2")                                       \
    ROW(config.strategy, TD_DDP_NAIVE, "3 bucketed): rank %d has 0, where rank 0 has 3")                     \
    ROW(config.sum, true, "sum (0 averages): rank %d has 1, where rank 0 has 0")                             \
    ROW(config.bucket_mb, 2, "bucket_mb: rank %d has 2, where rank 0 has 1")

TD_TEST(what_differs_is_named_on_every_rank)
{
    static const td_field rows[] = {FIELDS(TD_FIELD)};
    static float numbers[16];

    for (int i = 0; i < (int)(sizeof rows / sizeof *rows) && info.ranks > 1; i++) {
        const td_ddp_tensor b = {"b", 2, {2, 3}, TD_F32, .grad_dtype = TD_F32, .uses = 2, .data = numbers};
        td_ddp_tensor tensors[2] = {b, b};
        td_ddp_config config = {.count = 2, .tensors = tensors, .strategy = TD_DDP_BUCKETED, .bucket_mb = 1};
        char words[128];
        const bool differs = info.rank == info.ranks - 1;
        td_ddp *ddp;
        int row = 0;

        FIELDS(TD_FIELD_SET)
        snprintf(words, sizeof words, rows[i].words, (int)info.ranks - 1);
        td_assert_refused(td_ddp_create(dev, comm, &config, &ddp), TD_BAD_ARGUMENT, words);
    }
}

TD_TEST(a_nan_reaches_every_rank)
{
    static pair p;

    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_BUCKETED, 0.0016, true, NULL);
    zero(&p.model);
    if (info.rank == info.ranks - 1)
        p.model.tensors[1].grad[7] = NAN;
    run_marks(&p, (const int[]){3, 1, 0}, 3);
    assert_true(isnan(p.model.tensors[1].grad[7]));
    assert_true(p.model.tensors[1].grad[6] == 0 && p.model.tensors[3].grad[7] == 0);
    td_ddp_destroy(p.ddp);
}

TD_TEST(more_tensors_than_handles_are_sent)
{
    enum { MANY = 1500 };
    static td_ddp_tensor tensors[MANY];
    static float data[MANY], grads[2 * MANY];
    const td_ddp_config config = {.count = MANY, .tensors = tensors, .strategy = TD_DDP_OVERLAP};
    td_ddp *ddp;

    for (int i = 0; i < MANY; i++) {
        grads[2 * i] = (float)info.rank;
        tensors[i] = (td_ddp_tensor){
            .name = "one", .dtype = TD_F32, .grad_dtype = TD_F32, .data = &data[i], .grad = &grads[2 * i]};
    }
    if (info.ranks > 1) { /* ranks exchange the last one in another part than the first */
        tensors[MANY - 1].uses = info.rank + 1 < info.ranks ? 2 : 3;
        td_assert_refused(td_ddp_create(dev, comm, &config, &ddp), TD_BAD_ARGUMENT, "tensors[1499], 'one'");
        tensors[MANY - 1].uses = 1;
    }
    td_assert_ok(td_ddp_create(dev, comm, &config, &ddp));
    td_assert_ok(td_ddp_begin(ddp, true));
    for (int i = MANY - 1; i >= 0; i--)
        td_assert_ok(td_ddp_ready(ddp, i));
    td_assert_ok(td_ddp_finish(ddp));
    for (int i = 0; i < MANY; i++)
        assert_true(grads[2 * i] == (float)(info.ranks - 1) / 2 && grads[2 * i + 1] == 0);
    td_ddp_destroy(ddp);
}

/* Each rank may have its gradients in other places. Gradients that are adjacent on every rank are sent in one
 * call. */
TD_TEST(ranks_may_have_their_gradients_elsewhere)
{
    enum { TENSORS = 4, EACH = 8 };
    static float grads[TENSORS * EACH], data[TENSORS][EACH];
    td_ddp_tensor tensors[TENSORS + 1];
    const td_ddp_config config = {.count = TENSORS + 1, .tensors = tensors, .strategy = TD_DDP_FLAT};
    td_ddp_info what;
    td_ddp *ddp;

    for (int i = 0; i < TENSORS; i++) {
        /* On the last rank alone the first two tensors lie after the others. */
        const int at = info.rank == 0 || info.rank + 1 < info.ranks ? i : (i + 2) % TENSORS;

        tensors[i] = (td_ddp_tensor){.name = "one",
                                     .dims = 1,
                                     .shape = {EACH},
                                     .dtype = TD_F32,
                                     .grad_dtype = TD_F32,
                                     .data = data[i],
                                     .grad = &grads[at * EACH]};
    }
    /* A frozen tensor has no gradient, whose numbers ranks would compare. */
    tensors[TENSORS] = (td_ddp_tensor){"frozen", 1, {EACH}, TD_F32, .data = data[0], .frozen = true};
    tensors[TENSORS].grad_dtype = info.rank > 0 ? TD_BF16 : TD_F32;
    tensors[TENSORS].grad_elements = EACH + info.rank;
    tensors[TENSORS].uses = 1 + info.rank;
    td_assert_ok(td_ddp_create(dev, comm, &config, &ddp));
    td_assert_ok(td_ddp_describe(ddp, &what));
    assert_int_equal(what.calls, info.ranks == 1 ? 1 : 2);
    td_assert_ok(td_ddp_begin(ddp, true));
    for (int i = 0; i < TENSORS; i++) {
        for (int k = 0; k < EACH; k++)
            ((float *)tensors[i].grad)[k] = (float)(info.rank + 10 * i + k);
        td_assert_ok(td_ddp_ready(ddp, i));
    }
    td_assert_ok(td_ddp_finish(ddp));
    for (int i = 0; i < TENSORS; i++)
        for (int k = 0; k < EACH; k++)
            assert_true(((float *)tensors[i].grad)[k] == (float)(info.ranks - 1) / 2 + (float)(10 * i + k));
    td_ddp_destroy(ddp);
}

/* Adjacent gradients of two types are in one bucket and in two calls. */
TD_TEST(neighbours_of_another_type_are_sent_apart)
{
    enum { EACH = 8 };
    static struct {
        float one[EACH];
        uint16_t other[EACH];
    } grads;
    static float data[EACH];
    static uint16_t other_data[EACH];
    const td_ddp_tensor tensors[] = {{.name = "one",
                                      .dims = 1,
                                      .shape = {EACH},
                                      .dtype = TD_F32,
                                      .grad_dtype = TD_F32,
                                      .data = data,
                                      .grad = grads.one},
                                     {.name = "other",
                                      .dims = 1,
                                      .shape = {EACH},
                                      .dtype = TD_BF16,
                                      .grad_dtype = TD_BF16,
                                      .data = other_data,
                                      .grad = grads.other}};
    const td_ddp_config config = {.count = 2, .tensors = tensors, .strategy = TD_DDP_FLAT};
    td_ddp_info what;
    td_ddp *ddp;

    for (int k = 0; k < EACH; k++) {
        grads.one[k] = (float)info.rank;
        grads.other[k] = td_bf16_from_f32((float)(2 * info.rank));
    }
    td_assert_ok(td_ddp_create(dev, comm, &config, &ddp));
    td_assert_ok(td_ddp_describe(ddp, &what));
    assert_int_equal(what.buckets * 10 + what.calls, 12);
    run_marks(&(pair){.ddp = ddp}, (const int[]){0, 1}, 2);
    for (int k = 0; k < EACH; k++) {
        assert_true(grads.one[k] == (float)(info.ranks - 1) / 2);
        assert_true(td_value_at(TD_BF16, grads.other, k) == info.ranks - 1);
    }
    td_ddp_destroy(ddp);
    td_ddp_tensor planes = tensors[1];
    planes.low = other_data;
    const td_ddp_config bad = {.count = 1, .tensors = &planes};
    td_assert_refused(td_ddp_create(dev, comm, &bad, &ddp), TD_BAD_ARGUMENT,
                      "tensors[0].low is given, but dtype is bf16");
    td_ddp_config orders = config;
    orders.order = (const int64_t[]){0, 2};
    td_assert_refused(td_ddp_create(dev, comm, &orders, &ddp), TD_BAD_ARGUMENT,
                      "order[1] is 2, needs 0 to 1");
    orders.order = (const int64_t[]){1, 1};
    td_assert_refused(td_ddp_create(dev, comm, &orders, &ddp), TD_BAD_ARGUMENT, "is in order already");
}

/* If a rank is killed in its backward pass, all other ranks name it, before the deadline. */
static int killed(void)
{
    static pair p;
    int samples[TOY_SAMPLES];
    td_status status = TD_OK;

    toy_make(&p.model, false, 1);
    wrap(&p, TD_DDP_OVERLAP, 0, true, NULL);
    for (int step = 0; step < 1000 && status == TD_OK; step++) {
        toy_shuffle(step, 20, samples);
        status = td_ddp_begin(p.ddp, true);
        if (status == TD_OK)
            status = td_ddp_ready(p.ddp, 3);
        if (step == 2 && info.rank == 1)
            raise(SIGKILL);
        for (int tensor = 1; tensor >= 0 && status == TD_OK; tensor--)
            status = td_ddp_ready(p.ddp, tensor);
        if (status == TD_OK)
            status = td_ddp_finish(p.ddp);
    }
    const bool said = status == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process") != NULL;
    if (!said)
        fprintf(stderr, "rank %d: %s\n", (int)info.rank, td_last_error());
    td_ddp_destroy(p.ddp);
    return said ? 0 : 1;
}

/* Starts the ranks of `killed`. */
static int check_killed(int argc, char **argv)
{
    const int ranks = argc > 2 ? atoi(argv[2]) : 2;
    int statuses[16] = {0}, wrong = 0;

    td_ranks_run_each(argv, ranks, 60, statuses);
    for (int rank = 0; rank < ranks; rank++)
        wrong += statuses[rank] != (rank == 1 ? 128 + SIGKILL : 0);
    return wrong;
}

int main(int argc, char **argv)
{
    const bool kills = argc > 3 && strcmp(argv[3], "killed") == 0;
    int result;

    if (kills && !td_ranks_inside())
        return check_killed(argc, argv);
    if (!td_ranks_begin(argc, argv, &dev, &comm, &result))
        return result;
    td_assert_ok(td_comm_describe(comm, &info));
    const int failed = kills ? killed() : td_run_tests(argv[1], NULL, NULL);
    if (kills)
        _exit(failed); /* tests of comm/ check the end of the communicator */
    return td_ranks_end(dev, comm, failed);
}
