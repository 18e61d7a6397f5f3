/* The container in the steps of a trainer: what is final is marked ready, and goes on when it is reduced. */
#include "base/check.h"
#include "comm/agree.h"
#include "ddp/reduce.h"
#include "train/state.h"
#include "transformer/saving.h"

#include <stdlib.h>

/** A range that became final, and the last bucket that has something of it. */
typedef struct held {
    td_range range;
    int64_t bucket;
} held;

struct td_ddp_link {
    td_hook hook;
    td_comm *comm;
    td_ddp_strategy strategy;
    double bucket_mb;
    td_ddp *ddp;         /* NULL: not attached */
    td_range *ranges;    /* [count] of the parameters, in the order of the block */
    int64_t *parameters; /* [count] their indices */
    int64_t count;
    bool running; /* in a step's last backward pass */
    held *held;   /* [count] in the order in which they became final */
    int64_t held_count, passed;
    td_train_listener listener;
};

/** Passes on what is reduced, behind the reduction's event. */
static td_status pass_on(td_ddp_link *link)
{
    td_status status = TD_OK;

    while (link->passed < link->held_count && link->held[link->passed].bucket < link->ddp->done) {
        const td_range range = link->held[link->passed++].range;

        TD_TRY(td_hooks_final(link->hook.next, range, link->ddp->reduced));
    }
cleanup:
    return status;
}

static td_status progress(td_ddp_link *link, bool all)
{
    td_status status = TD_OK;

    TD_TRY(td_ddp_advance(link->ddp, all));
    TD_TRY(pass_on(link));
cleanup:
    return status;
}

static td_status on_begin(td_hook *hook, td_pass pass, bool last)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD)
        goto cleanup;
    if (!link->ddp) {
        status = td_fail(TD_BAD_STATE, "the link is joined to no trainer: td_ddp_link_attach comes first");
        goto cleanup;
    }
    link->held_count = link->passed = 0;
    TD_TRY(td_ddp_begin(link->ddp, last));
    link->running = last;
cleanup:
    return status;
}

static td_status on_read(td_hook *hook)
{
    td_ddp_link *link = (td_ddp_link *)hook;

    return link->running && link->passed < link->held_count ? progress(link, false) : TD_OK;
}

static td_status on_needed(td_hook *hook, td_pass pass, const td_need *need, const td_need *next,
                           const void **where)
{
    (void)pass, (void)need, (void)next, (void)where;
    return on_read(hook);
}

static td_status on_done(td_hook *hook, td_pass pass, const td_need *need)
{
    (void)pass, (void)need;
    return on_read(hook);
}

/** The first parameter that begins at `end` or behind it; count: none. */
static int64_t first_behind(const td_ddp_link *link, int64_t end)
{
    int64_t low = 0, high = link->count;

    while (low < high) {
        const int64_t middle = (low + high) / 2;

        if (link->ranges[middle].begin < end)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/** Marks the parameters of the range from its end to its begin: layers become final from the last to the
 * first, so that a bucket has them without gaps. */
static td_status on_final(td_hook *hook, td_range range, td_event *event)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    td_status status = TD_OK;
    int64_t bucket = -1, i = first_behind(link, range.end);

    if (event)
        TD_TRY(td_event_wait(event));
    while (i > 0 && link->ranges[i - 1].begin >= range.begin) {
        const int64_t parameter = link->parameters[--i];

        TD_CHECK(link->ranges[i].end <= range.end,
                 "range %" PRId64 " to %" PRId64 " ends within a parameter of %" PRId64 " to %" PRId64,
                 range.begin, range.end, link->ranges[i].begin, link->ranges[i].end);
        if (link->ddp->buckets.of[parameter] > bucket)
            bucket = link->ddp->buckets.of[parameter];
        TD_TRY(td_ddp_ready(link->ddp, parameter));
    }
    TD_CHECK(bucket >= 0, "range %" PRId64 " to %" PRId64 " begins within a parameter, or has none",
             range.begin, range.end);
    link->held[link->held_count++] = (held){range, bucket};
    TD_TRY(progress(link, false));
cleanup:
    return status;
}

static td_status on_end(td_hook *hook, td_pass pass, td_status ended)
{
    td_ddp_link *link = (td_ddp_link *)hook;
    td_status status = TD_OK;

    if (pass != TD_PASS_BACKWARD || !link->running)
        goto cleanup;
    link->running = false;
    if (ended != TD_OK) { /* nobody else may use what is on its way */
        (void)td_ddp_settle(link->ddp);
        goto cleanup;
    }
    TD_TRY(td_ddp_send(link->ddp));
    TD_TRY(progress(link, true));
    TD_TRY(td_ddp_end(link->ddp));
cleanup:
    return status;
}

/* ---- creation ---- */

td_status td_ddp_link_create(td_comm *comm, td_ddp_strategy strategy, double bucket_mb, td_ddp_link **out)
{
    td_ddp_link *link = NULL;
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    *out = NULL;
    TD_CHECK(comm, "comm is NULL");
    TD_TRY(td_ddp_check_strategy(strategy, bucket_mb));
    link = calloc(1, sizeof *link);
    if (!link) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %zu bytes", sizeof *link);
        goto cleanup;
    }
    link->hook =
        (td_hook){.begin = on_begin, .needed = on_needed, .done = on_done, .final = on_final, .end = on_end};
    link->comm = comm;
    link->strategy = strategy;
    link->bucket_mb = bucket_mb;
    *out = link;
cleanup:
    return status;
}

void td_ddp_link_destroy(td_ddp_link *link)
{
    if (!link)
        return;
    td_ddp_destroy(link->ddp);
    free(link->ranges);
    free(link->parameters);
    free(link->held);
    free(link);
}

td_hook *td_ddp_link_hook(td_ddp_link *link)
{
    return link ? &link->hook : NULL;
}

td_ddp *td_ddp_link_container(const td_ddp_link *link)
{
    return link ? link->ddp : NULL;
}

typedef struct placed {
    td_parameter parameter;
    int64_t index;
} placed;

static int by_offset(const void *a, const void *b)
{
    const placed *x = a, *y = b;

    return x->parameter.offset < y->parameter.offset ? -1 : x->parameter.offset > y->parameter.offset;
}

/** The order in which gradients become final, as td_transformer_set_hooks says: head, layers from the last to
 * the first, norms, embedding. */
static void order_of(const placed *all, int64_t count, int64_t *order)
{
    *order++ = all[count - 1].index;
    for (int vectors = 0; vectors < 2; vectors++)
        for (int64_t i = count - 2; i > 0; i--)
            if ((all[i].parameter.cols == 0) == vectors)
                *order++ = all[i].index;
    *order = all[0].index;
}

static td_status fill_tensors(const placed *all, int64_t count, const td_weights *weights,
                              td_ddp_tensor *tensors)
{
    td_status status = TD_OK;
    td_master master;

    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &all[i].parameter;
        const int64_t next = i + 1 < count ? all[i + 1].parameter.offset : weights->elements;

        TD_TRY(td_weights_master(weights, p->offset, &master));
        tensors[all[i].index] = (td_ddp_tensor){.name = p->name,
                                                .dims = p->cols > 0 ? 2 : 1,
                                                .shape = {p->rows, p->cols},
                                                .dtype = p->dtype,
                                                .grad_dtype = p->grad_dtype,
                                                .data = master.at,
                                                .low = master.low,
                                                .grad = p->grad,
                                                .room = next - p->offset};
    }
cleanup:
    return status;
}

static td_status attach(td_ddp_link *link, td_device *dev, const td_transformer *model)
{
    const int64_t count = td_transformer_parameter_count(model);
    td_ddp_config config = {
        .count = count, .strategy = link->strategy, .bucket_mb = link->bucket_mb, .sum = true};
    placed *all = calloc((size_t)count, sizeof *all);
    td_ddp_tensor *tensors = calloc((size_t)count, sizeof *tensors);
    int64_t *order = calloc((size_t)count, sizeof *order);
    td_status status = TD_OK;
    td_weights weights;

    link->ranges = calloc((size_t)count, sizeof *link->ranges);
    link->parameters = calloc((size_t)count, sizeof *link->parameters);
    link->held = calloc((size_t)count, sizeof *link->held);
    if (!all || !tensors || !order || !link->ranges || !link->parameters || !link->held) {
        status = td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " parameters", count);
        goto cleanup;
    }
    TD_TRY(td_transformer_weights(model, &weights));
    for (int64_t i = 0; i < count; i++) {
        all[i].index = i;
        TD_TRY(td_transformer_parameter(model, i, &all[i].parameter));
    }
    qsort(all, (size_t)count, sizeof *all, by_offset);
    for (int64_t i = 0; i < count; i++) {
        const td_parameter *p = &all[i].parameter;

        link->ranges[i] = (td_range){p->offset, p->offset + p->numel};
        link->parameters[i] = all[i].index;
    }
    link->count = count;
    order_of(all, count, order);
    TD_TRY(fill_tensors(all, count, &weights, tensors));
    config.tensors = tensors;
    config.order = order;
    TD_TRY(td_ddp_create(dev, link->comm, &config, &link->ddp));
cleanup:
    free(all);
    free(tensors);
    free(order);
    return status;
}

/** All ranks' trainers do the same with the same gradients. */
static td_status agree(const td_ddp_link *link, td_train *train)
{
    td_setting settings[TD_TRAIN_SETTINGS + TD_GROUP_SETTINGS];
    td_status status = TD_OK;

    TD_TRY(td_train_settings(train, settings));
    TD_TRY(td_train_group_settings(train, settings + TD_TRAIN_SETTINGS));
    TD_TRY(td_comm_agree(link->comm, TD_TRAIN_SETTINGS + TD_GROUP_SETTINGS, settings));
cleanup:
    return status;
}

static void on_step(void *user, uint64_t state)
{
    (void)td_comm_carry(((td_ddp_link *)user)->comm, state); /* which is no NULL */
}

td_status td_ddp_link_attach(td_ddp_link *link, td_device *dev, td_train *train)
{
    td_status status = TD_OK;
    td_weights weights;

    TD_CHECK(link, "link is NULL");
    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(train, "train is NULL");
    if (link->ddp) {
        status = td_fail(TD_BAD_STATE, "the link is joined to a trainer already");
        goto cleanup;
    }
    TD_TRY(td_transformer_weights(td_train_model(train), &weights));
    TD_CHECK(weights.grads, "train goes forward only, without gradients");
    TD_TRY(td_train_check_link(train, &link->hook));
    TD_TRY(agree(link, train));
    status = attach(link, dev, td_train_model(train));
    if (status != TD_OK) {
        free(link->ranges);
        free(link->parameters);
        free(link->held);
        link->ranges = NULL;
        link->parameters = NULL;
        link->held = NULL;
        goto cleanup;
    }
    td_weights_written(td_train_model(train), true);
    link->listener = (td_train_listener){.step = on_step, .user = link};
    td_train_listen(train, &link->listener);
cleanup:
    return status;
}
