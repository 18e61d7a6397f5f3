/* The functions of ddp.h, on a communicator of one rank. tests/ddp.c and tests/ddp_link.c test several
 * ranks. */
#include "support/fuzz_api_train.h"

#include "base/check.h"
#include "ddp/ddp.h"

enum { TENSORS = 4, ROOM = 24 };

/* A list of tensors, with or without a container. */
typedef struct bed {
    td_comm *comm;
    float data[TENSORS][ROOM], grads[TENSORS][ROOM];
    td_ddp_tensor tensors[TENSORS];
    int64_t order[TENSORS];
    td_ddp_config config;
    td_ddp *ddp;
} bed;

static bed *open_bed(void)
{
    static bed b;
    int64_t members = 0;

    b = (bed){.comm = api_one_rank()};
    b.config = (td_ddp_config){.count = 1 + td_fuzz_below(TENSORS),
                               .tensors = b.tensors,
                               .strategy = (td_ddp_strategy)td_fuzz_below(4),
                               .bucket_mb = td_fuzz_chance(50) ? 0 : 0.0001,
                               .sum = td_fuzz_chance(50)};
    for (int64_t i = 0; i < b.config.count; i++) {
        b.tensors[i] = (td_ddp_tensor){.name = "weight",
                                       .dims = (int32_t)td_fuzz_below(3),
                                       .shape = {1 + td_fuzz_below(4), 1 + td_fuzz_below(5)},
                                       .dtype = TD_F32,
                                       .grad_dtype = TD_F32,
                                       .data = b.data[i],
                                       .grad = td_fuzz_chance(50) ? b.grads[i] : NULL,
                                       .grad_elements = td_fuzz_chance(50) ? ROOM : 0,
                                       .frozen = td_fuzz_chance(20),
                                       .uses = (int32_t)td_fuzz_below(3)};
        if (!b.tensors[i].frozen)
            b.order[members++] = i;
    }
    if (td_fuzz_chance(50))
        b.config.order = b.order;
    return &b;
}

static bed *open_container(void)
{
    bed *b = open_bed();

    td_assert_ok(td_ddp_create(api_dev, b->comm, &b->config, &b->ddp));
    td_forget_error();
    return b;
}

static td_status close_bed(bed *b, td_status status)
{
    td_ddp_destroy(b->ddp);
    return api_close_rank(b->comm, status);
}

static int32_t uses_of(const bed *b, int64_t index)
{
    return b->tensors[index].uses > 0 ? b->tensors[index].uses : 1;
}

static int64_t draw_index(const bed *b)
{
    if (!wrong())
        return td_fuzz_below(b->config.count);
    impossible(TD_BAD_ARGUMENT, "index");
    return bad_below(2) == 0 ? -1 : b->config.count;
}

API_NAMES(td_ddp_strategy, td_ddp_strategy_name, "naive", "flat", "overlap", "bucketed")

API(td_ddp_nccl_ctas)
{
    assert_int_equal(td_ddp_nccl_ctas(TD_BF16), td_ddp_nccl_ctas(TD_F16));
    assert_in_range(td_ddp_nccl_ctas(TD_BF16), 1, TD_COMM_MOST_CTAS);
    assert_int_equal(td_ddp_nccl_ctas(TD_F32), 0);
    assert_int_equal(td_ddp_nccl_ctas((td_dtype)-1), 0);
    return TD_OK;
}

API_PARSE(td_ddp_strategy, td_ddp_strategy_parse, "name|strategy", "naive", "flat", "overlap", "bucketed")

static double draw_bucket_mb(void)
{
    static const double bad[] = {-1, NAN, INFINITY};

    if (!wrong())
        return td_fuzz_chance(50) ? 0 : 25;
    impossible(TD_BAD_ARGUMENT, "bucket_mb");
    return BAD_NUMBER(bad);
}

API(td_ddp_create)
{
    bed *b = open_bed();
    td_ddp_tensor *const any = &b->tensors[td_fuzz_below(b->config.count)];

    b->config.strategy = (td_ddp_strategy)choice("strategy", 4);
    b->config.bucket_mb = draw_bucket_mb();
    if (wrong()) {
        any->dims = bad_below(2) == 0 ? -1 : TD_DDP_DIMS + 1;
        impossible(TD_BAD_ARGUMENT, "dims");
    } else if (any->dims > 0 && wrong()) {
        any->shape[0] = bad_below(2) == 0 ? 0 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "shape");
    } else if (any->dims > 1 && wrong()) {
        any->shape[0] = any->shape[1] = INT64_MAX - 2;
        impossible(TD_BAD_ARGUMENT, "tensors");
    } else if (!any->frozen && wrong()) {
        any->grad_elements = bad_below(2) == 0 ? -1 : INT64_MIN;
        impossible(TD_BAD_ARGUMENT, "grad_elements");
    } else if (!any->frozen && wrong()) {
        any->grad_elements = INT64_MAX - 2;
        impossible(TD_BAD_ARGUMENT, "tensors");
    }
    SPOIL(any->name, "name", NULL);
    SPOIL(any->data, "data", NULL);
    SPOIL(any->dtype, "dtype", (td_dtype)77);
    if (!any->frozen && wrong()) {
        any->uses = -1;
        impossible(TD_BAD_ARGUMENT, "uses");
    }
    if (!any->frozen && wrong()) {
        any->grad_dtype = (td_dtype)-1;
        impossible(TD_BAD_ARGUMENT, "grad_dtype");
    }
    if (b->config.order && !b->tensors[b->order[0]].frozen && wrong()) {
        b->order[0] = bad_below(2) == 0 ? -1 : b->config.count;
        impossible(TD_BAD_ARGUMENT, "order");
    }
    SPOIL_NUMBER(b->config.count, "count", 0, -1, INT64_MIN, INT64_MAX);
    SPOIL(b->config.tensors, "tensors", NULL);
    td_device *device = dev();
    td_comm *comm = pointer("comm", b->comm);
    const td_ddp_config *config = pointer("config", &b->config);
    td_ddp **to = pointer("out", &b->ddp);
    const td_status status = td_ddp_create(device, comm, config, to);

    if (to && status != TD_OK)
        assert_null(b->ddp);
    return close_bed(b, status);
}

API_OF_NULL(td_ddp_destroy)

API(td_ddp_gradient)
{
    bed *b = open_container();
    const int64_t index = draw_index(b);
    void *gradient = b;
    const td_status status = td_ddp_gradient(pointer("ddp", b->ddp), index, pointer("out", &gradient));

    if (status == TD_OK)
        assert_int_equal(gradient == NULL, b->tensors[index].frozen);
    return close_bed(b, status);
}

API(td_ddp_describe)
{
    bed *b = open_container();
    const td_ddp *ddp = pointer("ddp", b->ddp);

    return close_bed(b, td_ddp_describe(ddp, out("out", sizeof(td_ddp_info))));
}

API(td_ddp_begin)
{
    bed *b = open_container();

    return close_bed(b, td_ddp_begin(pointer("ddp", b->ddp), td_fuzz_chance(50)));
}

API(td_ddp_ready)
{
    bed *b = open_container();
    const int64_t index = draw_index(b);
    const bool begins = td_fuzz_chance(80), inside = index >= 0 && index < b->config.count;
    const int32_t marks =
        inside && !b->tensors[index].frozen ? (int32_t)td_fuzz_below(uses_of(b, index) + 1) : 0;

    if (begins)
        td_assert_ok(td_ddp_begin(b->ddp, td_fuzz_chance(50)));
    for (int32_t i = 0; begins && i < marks; i++)
        td_assert_ok(td_ddp_ready(b->ddp, index));
    if (inside && b->tensors[index].frozen)
        impossible(TD_BAD_ARGUMENT, "frozen");
    else if (inside && !begins)
        impossible(TD_BAD_STATE, "no backward pass");
    else if (inside && marks == uses_of(b, index))
        impossible(TD_BAD_STATE, "once more");
    td_forget_error();
    return close_bed(b, td_ddp_ready(pointer("ddp", b->ddp), index));
}

API(td_ddp_finish)
{
    bed *b = open_container();
    const bool begins = td_fuzz_chance(80);
    bool lacks = false;

    if (begins)
        td_assert_ok(td_ddp_begin(b->ddp, true));
    for (int64_t i = 0; begins && i < b->config.count; i++)
        for (int32_t use = 0; use < uses_of(b, i) && !b->tensors[i].frozen; use++)
            if (td_fuzz_chance(95))
                td_assert_ok(td_ddp_ready(b->ddp, i));
            else
                lacks = true;
    if (!begins || lacks)
        impossible(TD_BAD_STATE, "no backward pass|never became ready");
    td_forget_error();
    return close_bed(b, td_ddp_finish(pointer("ddp", b->ddp)));
}

/* ---- the link ---- */

API(td_ddp_link_create)
{
    bed *b = open_bed();
    const td_ddp_strategy strategy = (td_ddp_strategy)choice("strategy", 4);
    const double bucket_mb = draw_bucket_mb();
    td_comm *comm = pointer("comm", b->comm);
    API_MAKES(td_ddp_link, td_ddp_link_destroy, td_ddp_link_create(comm, strategy, bucket_mb, to));
    return close_bed(b, status);
}

API_OF_NULL(td_ddp_link_destroy)

API(td_ddp_link_hook)
{
    assert_null(td_ddp_link_hook(NULL));
    return TD_OK;
}

API(td_ddp_link_container)
{
    assert_null(td_ddp_link_container(NULL));
    return TD_OK;
}

API(td_ddp_link_attach)
{
    bed *b = open_bed();
    td_train_config config = api_good_train();
    td_ddp_link *link;
    td_train *train;

    td_assert_ok(td_ddp_link_create(b->comm, b->config.strategy, b->config.bucket_mb, &link));
    config.hooks = td_ddp_link_hook(link);
    td_assert_ok(td_train_create(api_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    if (config.until == TD_TRAIN_FORWARD)
        impossible(TD_BAD_ARGUMENT, "forward only");
    td_forget_error();
    td_ddp_link *to = pointer("link", link);
    td_device *device = dev();
    const td_status status = td_ddp_link_attach(to, device, pointer("train", train));
    assert_int_equal(td_ddp_link_container(link) != NULL, status == TD_OK);
    td_train_destroy(train);
    td_ddp_link_destroy(link);
    return close_bed(b, status);
}
