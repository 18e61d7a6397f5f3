#include "ddp/agree.h"

#include "base/check.h"
#include "base/dtype.h"
#include "base/setting.h"
#include "comm/agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t td_ddp_elements(const td_ddp_tensor *tensor)
{
    int64_t elements = 1;

    for (int32_t i = 0; i < tensor->dims; i++)
        elements *= tensor->shape[i];
    return elements;
}

int64_t td_ddp_grad_elements(const td_ddp_tensor *tensor)
{
    return tensor->grad_elements > 0 ? tensor->grad_elements : td_ddp_elements(tensor);
}

/** The properties of a tensor that must be the same on all ranks. The struct has no padding, because it is
 * compared as bytes. */
typedef struct description {
    int64_t shape[TD_DDP_DIMS];
    int64_t grad_elements;
    uint64_t name; /* a hash */
    int32_t dims, dtype, grad_dtype, frozen, uses, unused;
} description;

static td_status describe(void *user, int64_t index, void *row)
{
    const td_ddp_tensor *const tensor = &((const td_ddp_config *)user)->tensors[index];
    description *const d = row;

    *d = (description){.name = td_hash(TD_HASH_BEGIN, tensor->name, strlen(tensor->name)),
                       .dims = tensor->dims,
                       .dtype = (int32_t)tensor->dtype,
                       .grad_dtype = tensor->frozen ? 0 : (int32_t)tensor->grad_dtype,
                       .frozen = tensor->frozen,
                       .uses = tensor->frozen ? 0 : tensor->uses,
                       .grad_elements = tensor->frozen ? 0 : td_ddp_grad_elements(tensor)};

    for (int32_t i = 0; i < tensor->dims; i++)
        d->shape[i] = tensor->shape[i];
    return TD_OK;
}

/** "f32 [50, 10], frozen" */
static void say(const description *d, char text[320])
{
    size_t at = (size_t)snprintf(text, 320, "%s [", td_dtype_name((td_dtype)d->dtype));

    for (int32_t i = 0; i < d->dims; i++)
        at += (size_t)snprintf(text + at, 320 - at, "%s%" PRId64, i > 0 ? ", " : "", d->shape[i]);
    if (d->frozen)
        snprintf(text + at, 320 - at, "], frozen");
    else
        snprintf(text + at, 320 - at, "] with a gradient of %s in %" PRId64 " grad_elements, used %d times",
                 td_dtype_name((td_dtype)d->grad_dtype), d->grad_elements, (int)d->uses);
}

static td_status compare(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    const char *const name = ((const td_ddp_config *)user)->tensors[index].name;
    const description *const d = row, *const is = first;
    td_status status = TD_OK;
    char odd[320], usual[320];

    if (memcmp(d, is, sizeof *d) == 0)
        return TD_OK;
    TD_CHECK(d->name == is->name,
             "tensors[%" PRId64 "], '%s' here: rank %d has a tensor of another name than rank 0", index, name,
             (int)rank);
    say(d, odd);
    say(is, usual);
    TD_CHECK(false, "tensors[%" PRId64 "], '%s' here: rank %d has %s, where rank 0 has %s", index, name,
             (int)rank, odd, usual);
cleanup:
    return status;
}

td_status td_ddp_agree_lists(td_comm *comm, const td_ddp_config *config)
{
    const td_setting settings[] = {{"tensors", (double)config->count},
                                   {"strategy (0 naive, 1 flat, 2 overlap, 3 bucketed)", config->strategy},
                                   {"sum (0 averages)", config->sum},
                                   {"bucket_mb", config->bucket_mb}};
    td_ddp_config list = *config;
    td_status status = TD_OK;

    TD_TRY(td_comm_agree(comm, sizeof settings / sizeof *settings, settings));
    TD_TRY(td_comm_compare(comm, &(td_rows){list.count, sizeof(description), describe, compare, &list}));
cleanup:
    return status;
}

/* ---- orders ---- */

static td_status number_of(void *user, int64_t index, void *row)
{
    *(int64_t *)row = ((int64_t *)user)[index];
    return TD_OK;
}

static td_status take_first(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    (void)rank, (void)row;
    ((int64_t *)user)[index] = *(const int64_t *)first;
    return TD_OK;
}

td_status td_ddp_agree_order(td_comm *comm, int64_t members, int64_t *order)
{
    return td_comm_compare(comm, &(td_rows){members, sizeof *order, number_of, take_first, order});
}

/** The address of a tensor's gradient. */
typedef struct begin {
    const char *at;
    int64_t index;
} begin;

static int by_address(const void *a, const void *b)
{
    const begin *x = a, *y = b;

    return x->at < y->at ? -1 : x->at > y->at;
}

/** Fills next [count] for this rank: the tensor whose gradient follows in memory. */
static td_status find_touching(const td_ddp_config *config, int64_t *next)
{
    begin *begins = calloc((size_t)config->count, sizeof *begins);
    int64_t count = 0;

    if (!begins)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", config->count);
    for (int64_t i = 0; i < config->count; i++) {
        next[i] = -1;
        if (!config->tensors[i].frozen)
            begins[count++] = (begin){config->tensors[i].grad, i};
    }
    qsort(begins, (size_t)count, sizeof *begins, by_address);
    for (int64_t i = 0; i + 1 < count; i++) {
        const td_ddp_tensor *one = &config->tensors[begins[i].index];
        const td_ddp_tensor *other = &config->tensors[begins[i + 1].index];
        const char *end = begins[i].at + (size_t)td_ddp_grad_elements(one) * td_dtype_size(one->grad_dtype);

        if (one->grad_dtype == other->grad_dtype && end == begins[i + 1].at)
            next[begins[i].index] = begins[i + 1].index;
    }
    free(begins);
    return TD_OK;
}

static td_status keep_equal(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    (void)rank;
    if (*(const int64_t *)row != *(const int64_t *)first)
        ((int64_t *)user)[index] = -1;
    return TD_OK;
}

td_status td_ddp_agree_touching(td_comm *comm, const td_ddp_config *config, int64_t *next)
{
    td_status status = TD_OK;

    TD_TRY(find_touching(config, next));
    TD_TRY(td_comm_compare(comm, &(td_rows){config->count, sizeof *next, number_of, keep_equal, next}));
cleanup:
    return status;
}

td_status td_ddp_broadcast(td_comm *comm, int64_t count, const td_ddp_tensor *tensors)
{
    td_flight flight = {.host = true};
    td_status status = TD_OK;
    td_work **work;

    for (int64_t i = 0; i < 2 * count; i++) { /* a tensor's data, then its lower planes */
        const td_ddp_tensor *const t = &tensors[i / 2];
        void *const at = i % 2 == 0 ? t->data : t->low;

        if (!at)
            continue;
        TD_TRY(td_flight_slot(&flight, &work));
        TD_TRY(td_comm_broadcast(comm, at, td_ddp_elements(t), (td_comm_type)(t->low ? TD_BF16 : t->dtype), 0,
                                 work));
        flight.sent++;
    }
    TD_TRY(td_flight_wait(&flight, flight.sent));
cleanup:
    td_flight_deinit(&flight);
    return status;
}

/* ---- links of trainers ---- */

td_status td_link_check(const td_hook *link, bool attached, td_device *dev, td_train *train, td_weights *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, train);
    TD_FAIL_IF(attached, TD_BAD_STATE, "link was attached to a trainer already: make another link");
    TD_TRY(td_transformer_weights(td_train_model(train), out));
    TD_CHECK(out->grads, "train goes forward only, without gradients");
    TD_TRY(td_train_check_link(train, link));
cleanup:
    return status;
}

td_status td_link_agree(td_comm *comm, td_train *train, bool sums, int64_t count, const td_setting *own)
{
    td_setting settings[TD_TRAIN_SETTINGS + 1 + TD_LINK_SETTINGS] = {{0}};
    td_status status = TD_OK;
    td_comm_info info;

    TD_TRY(td_comm_describe(comm, &info));
    if (sums)
        td_train_average(train, info.ranks);
    /* First, because it changes the others. */
    settings[0] = (td_setting){"link (0 ddp, 1 shard)", count == TD_LINK_SETTINGS};
    TD_TRY(td_train_settings(train, settings + 1));
    memcpy(settings + TD_TRAIN_SETTINGS + 1, own, (size_t)count * sizeof *own);
    TD_TRY(td_comm_agree(comm, sizeof settings / sizeof *settings, settings));
cleanup:
    return status;
}

static void on_step(void *user, const td_train_now *now)
{
    const uint64_t parts[TD_COMM_PARTS] = {[TD_COMM_LR] = now->lr,
                                           [TD_COMM_HYPERPARAMETERS] = now->hyper,
                                           [TD_COMM_BATCH] = now->batch,
                                           [TD_COMM_PAST] = now->past};

    (void)td_comm_carry(user, parts); /* fails only for NULL */
}

void td_link_listen(td_train_listener *listener, td_comm *comm, td_train *train)
{
    *listener = (td_train_listener){.step = on_step, .user = comm};
    td_train_listen(train, listener);
}
