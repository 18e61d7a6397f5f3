/* Steps of trainers whose state is split, beside the same training unsharded (ddp/) and queued. With 1 and 2
 * ranks the bits must be the same, for an addition has no order; but not where products are cut for what
 * collectives leave. */
#include "support/as_if_graphs.h"
#include "support/draw.h"
#include "support/shard_kit.h"
#include "support/weights.h"

#include <math.h>

enum { STEPS = 10 };

/* Every combination of settings, or one in three where programs are instrumented. */
#ifdef TD_FEW
enum { STRIDE = 3 };
#else
enum { STRIDE = 1 };
#endif

/* Steps have the same bits. */
static bool exact(const shard_setting *s)
{
    return shard_info.ranks <= 2 && !(s->sharing && shard_on_gpu());
}

/* What the device has there, for the host. */
static void *here(const void *data, size_t bytes)
{
    void *host = malloc(bytes);

    td_assert_ok(td_device_download(shard_dev, host, data, bytes));
    return host;
}

static void assert_same_everywhere(const void *data, size_t bytes)
{
    uint64_t hash = 1469598103934665603u, all[TD_COMM_MOST_RANKS];

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    td_assert_ok(td_comm_exchange(shard_comm, &hash, sizeof hash, all));
    for (int rank = 0; rank < shard_info.ranks; rank++)
        assert_true(all[rank] == hash);
}

static void assert_alike(const shard_setting *s, const shard_trainer *a, const shard_trainer *b)
{
    const td_weights got = shard_weights_of(a->train), want = shard_weights_of(b->train);
    const size_t bytes = (size_t)got.elements * td_dtype_size(got.dtype);
    td_weights here_got = got, here_want = want;

    here_got.params = here(got.params, bytes);
    here_want.params = here(want.params, bytes);
    void *numbers = td_numbers_in(&here_got, 0, got.elements),
         *wanted = td_numbers_in(&here_want, 0, got.elements);
    double *truth = td_as_f64(want.dtype, wanted, want.elements);
    if (exact(s))
        td_assert_identical(s->name, got.dtype, here_got.params, here_want.params, got.elements);
    td_assert_close(s->name, got.dtype, numbers, truth, got.elements,
                    s->precision == TD_PRECISION_F32 ? 1e-5 : 2e-2);
    assert_same_everywhere(here_got.params, bytes);
    free(here_got.params);
    free(here_want.params);
    free(numbers);
    free(wanted);
    free(truth);
}

static void train_case(const shard_setting *s)
{
    shard_trainer sharded = shard_open_trainer(s, true), whole = shard_open_trainer(s, false);

    for (int number = 0; number < STEPS; number++) {
        shard_micro_step(&sharded, number, s->micro_batches);
        shard_micro_step(&whole, number, s->micro_batches);
        if (number == 2 ||
            number == 6) { /* in between, where weights come as they are needed, or by a call */
            const float loss = shard_evaluate(&sharded), want = shard_evaluate(&whole);

            assert_true(exact(s) ? loss == want : fabsf(loss - want) < 0.05f);
        }
        if (number == 1)
            td_assert_ok(td_shard_link_finish(sharded.shard));
        if (number == 0 || number == 3) {
            td_assert_ok(td_train_settle(sharded.train));
            assert_alike(s, &sharded, &whole);
            td_assert_ok(td_train_settle(sharded.train)); /* nothing is left to do */
        }
    }
    td_assert_ok(td_train_settle(sharded.train));
    assert_alike(s, &sharded, &whole);
    shard_close_trainer(&sharded);
    shard_close_trainer(&whole);
}

static void sharded_weights_are_those_of_unsharded_training(void **unused)
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED};
    static const double sizes[] = {0, 0.004, 0.0005};

    /* More ranks than processors take long, and so do collectives of ranks that share a GPU. */
    const int stride = shard_info.ranks > 2 || (shard_on_gpu() && shard_info.ranks > 1) ? 7 : STRIDE;
    int number = 0;

    (void)unused;
    for (int p = 0; p < 3; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (int groups = 0; groups < 2; groups++) {
                shard_setting s = {.name = "tensors",
                                   .kind = TD_SHARD_TENSORS,
                                   .precision = precisions[p],
                                   .time = time,
                                   .two_groups = groups};

                if (number++ % stride == 0)
                    train_case(&s);
                s.name = "flat";
                s.kind = TD_SHARD_FLAT;
                for (int size = 0; size < 3; size++) {
                    s.bucket_mb = sizes[size];
                    if (number++ % stride == 0)
                        train_case(&s);
                }
            }
}

/* Both kinds, times and precisions, and micro-batches: some of these where more ranks than processors take
 * long. */
static void each_way(const char *name, void (*check)(shard_setting s))
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
    const int stride = shard_info.ranks > 2 ? 3 : STRIDE;
    char words[64];
    int number = 0;

    for (int p = 0; p < 2; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FLAT; kind++)
                for (int64_t micro_batches = 1; micro_batches <= 3; micro_batches += 2) {
                    snprintf(words, sizeof words, "%s, %s", name, kind == TD_SHARD_FLAT ? "flat" : "tensors");
                    if (number++ % stride == 0)
                        check((shard_setting){.name = words,
                                              .kind = kind,
                                              .bucket_mb = 0.004,
                                              .precision = precisions[p],
                                              .time = time,
                                              .micro_batches = micro_batches});
                }
}

static void sharing_case(shard_setting s)
{
    s.sharing = true;
    train_case(&s);
    s.captured = true;
    train_case(&s);
}

static void capture_case(shard_setting s)
{
    s.captured = true;
    train_case(&s);
}

/* Graphs on a GPU; on a CPU the same gatherings, at the head of a forward pass. */
static void captured_steps_are_those_of_queued_ones(void **unused)
{
    (void)unused;
    each_way("captured", capture_case);
}

static void steps_whose_products_leave_room_are_as_good(void **unused)
{
    (void)unused;
    if (shard_info.nccl_ctas == 0) /* as on a CPU: no product is cut */
        skip();
    each_way("shared", sharing_case);
}

static int32_t windows(void)
{
    td_comm_info now;

    td_assert_ok(td_comm_describe(shard_comm, &now));
    return now.windows;
}

/* Weights and gradients that NCCL reaches directly on the other GPUs. */
static void window_case(shard_setting s)
{
    const bool copies = s.precision == TD_PRECISION_BF16_MIXED;

    if (s.kind == TD_SHARD_TENSORS || s.micro_batches > 1)
        return;
    s.wide = s.captured = true;
    s.bucket_mb = 4;
    shard_trainer t = shard_open_trainer(&s, true);
    assert_int_equal(windows(), copies ? 3 : 2);
    shard_close_trainer(&t);
    assert_int_equal(windows(), 0);
    train_case(&s);
    assert_int_equal(windows(), 0);
}

static void state_in_windows_is_that_of_unsharded_training(void **unused)
{
    (void)unused;
    if (!td_ranks_direct(&shard_info))
        skip();
    each_way("in windows", window_case);
}

/* Forward, backward and update by themselves. Every second step is settled ahead of its update, which then
 * makes weights that are not yet everywhere. */
static void step_by_parts(const shard_setting *s, shard_trainer *t, int number)
{
    for (int64_t micro = 0; micro < s->micro_batches; micro++) {
        const int part = number * (int)s->micro_batches + (int)micro;
        int64_t *ids = shard_tokens_of("ids", part, shard_info.rank, 1),
                *targets = shard_tokens_of("targets", part, shard_info.rank, 1);

        td_assert_ok(td_train_load(t->train, ids, targets, SHARD_BATCH, SHARD_CONTEXT));
        td_assert_ok(td_train_forward(t->train, NULL));
        td_assert_ok(td_train_backward(t->train));
        td_assert_ok(td_device_free(shard_dev, ids));
        td_assert_ok(td_device_free(shard_dev, targets));
    }
    if (number % 2 == 1)
        td_assert_ok(td_train_settle(t->train));
    if (s->time == TD_UPDATE_AFTER)
        td_assert_ok(td_train_update(t->train));
}

/* Queued in f32; in mixed precision each part is a graph from its second time on, where there are graphs. */
static void parts_case(shard_setting s)
{
    s.captured = s.precision == TD_PRECISION_BF16_MIXED;
    shard_trainer sharded = shard_open_trainer(&s, true), whole = shard_open_trainer(&s, false);

    for (int number = 0; number < STEPS; number++) {
        step_by_parts(&s, &sharded, number);
        step_by_parts(&s, &whole, number);
        if (number == 5 || number == STEPS - 1) {
            td_assert_ok(td_train_settle(sharded.train));
            assert_alike(&s, &sharded, &whole);
        }
    }
    shard_close_trainer(&sharded);
    shard_close_trainer(&whole);
}

static void parts_of_steps_are_those_of_unsharded_training(void **unused)
{
    (void)unused;
    each_way("parts", parts_case);
}

/* Two steps, of which the second is captured: whole, or in its parts. */
static void launch_case(shard_setting s)
{
    const bool parts = s.precision == TD_PRECISION_BF16_MIXED;

    s.captured = s.as_if = true;
    shard_trainer sharded = shard_open_trainer(&s, true), whole = shard_open_trainer(&s, false);

    (void)td_as_if_launches();
    for (int number = 0; number < 2; number++) {
        for (int i = 0; i < 2; i++) {
            shard_trainer *const t = i == 0 ? &sharded : &whole;

            if (parts)
                step_by_parts(&s, t, number);
            else
                shard_micro_step(t, number, s.micro_batches);
        }
        if (number == 0) /* then only the launch can say that there are new ones */
            td_assert_ok(td_train_settle(sharded.train));
    }
    assert_int_equal(td_as_if_launches(),
                     parts ? 2 * s.micro_batches + (s.time == TD_UPDATE_AFTER) : s.micro_batches);
    td_assert_ok(td_train_settle(sharded.train));
    assert_alike(&s, &sharded, &whole);
    shard_close_trainer(&sharded);
    shard_close_trainer(&whole);
}

static void launches_say_what_has_moved(void **unused)
{
    (void)unused;
    if (shard_on_gpu() || shard_info.ranks == 1) /* whose collectives would be of the graph */
        skip();
    each_way("as if", launch_case);
}

int shard_steps_group(const char *name)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sharded_weights_are_those_of_unsharded_training),
        cmocka_unit_test(captured_steps_are_those_of_queued_ones),
        cmocka_unit_test(steps_whose_products_leave_room_are_as_good),
        cmocka_unit_test(state_in_windows_is_that_of_unsharded_training),
        cmocka_unit_test(parts_of_steps_are_those_of_unsharded_training),
        cmocka_unit_test(launches_say_what_has_moved),
    };

    return cmocka_run_group_tests_name(name, tests, NULL, NULL);
}
