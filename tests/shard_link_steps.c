/* Steps of trainers with split state, compared with the same training unsharded (ddp/) and queued: clipping,
 * reduced micro-batches, and GPUs. With 1 and 2 ranks the bits are the same, unless GEMMs leave SMs to
 * collectives: a sum of two numbers has only one order. test_matrix has the other options. */
#include "support/draw.h"
#include "support/shard_kit.h"

#include <math.h>

enum { STEPS = 5 };

/* Steps have the same bits, unless each micro-batch is reduced. */
static bool exact(const shard_setting *s)
{
    return shard_info.ranks <= 2 && s->clip == 0 && !(s->sharing && shard_on_gpu()) &&
           !(s->kind == TD_SHARD_FULL && s->micro_batches > 1 && !s->reduce_last);
}

/* Copies the device's data to the host. */
static void *here(const void *data, size_t bytes)
{
    void *host = malloc(bytes);

    td_assert_ok(td_device_download(shard_dev, host, data, bytes));
    return host;
}

static void assert_alike(const shard_setting *s, shard_trainer *a, shard_trainer *b)
{
    const td_weights w = shard_weights_of(a->train);
    void *const numbers = shard_numbers_of(a), *const wanted = shard_numbers_of(b);
    double *truth = td_as_f64(w.dtype, wanted, w.elements);

    if (exact(s))
        td_assert_identical(s->name, w.dtype, numbers, wanted, w.elements);
    td_assert_close(s->name, w.dtype, numbers, truth, w.elements,
                    s->precision == TD_PRECISION_F32 ? 1e-5 : 2e-2);
    td_ranks_assert_same(shard_comm, numbers, (size_t)w.elements * td_dtype_size(w.dtype));
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
        if (number == 2) { /* between steps: weights are gathered as needed, or by a call */
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

/* The gradients' norm over all ranks equals the float64 norm of one trainer's gradients. */
static void assert_norm(const shard_trainer *sharded, const shard_trainer *whole)
{
    /* Sums over more than two ranks may have another order. */
    const double tolerance = shard_weights_of(whole->train).grad_dtype == TD_F32 ? 1e-5 : 0x1p-9;
    const td_weights w = shard_weights_of(whole->train);
    void *const grads = here(w.grads, w.grad_bytes);
    double sum = 0;
    float norm;

    for (int64_t i = 0; i < w.elements; i++)
        sum += pow(td_value_at(w.grad_dtype, grads, i), 2);
    td_assert_ok(td_clip_norm(td_train_clip(sharded->train), &norm));
    assert_true(fabs((double)norm - sqrt(sum)) <= tolerance * sqrt(sum));
    assert_true(sum > 0);
    td_ranks_assert_same(shard_comm, &norm, sizeof norm);
    free(grads);
}

TD_TEST(steps_are_clipped_by_the_norm_of_all_ranks)
{
    for (int i = 0; i < 6; i++) {
        const shard_setting s = {.name = "clipped",
                                 .kind = i < 4 ? TD_SHARD_FLAT : TD_SHARD_FULL,
                                 .bucket_mb = i < 2 ? 0.004 : 0,
                                 .precision = i % 2 ? TD_PRECISION_BF16_MIXED : TD_PRECISION_F32,
                                 .time = i / 2 == 1 ? TD_UPDATE_AFTER : TD_UPDATE_ALONG,
                                 .captured = i % 3 == 0,
                                 .micro_batches = i == 1 || i == 5 ? 3 : 1,
                                 .clip = 0.05f};
        shard_trainer sharded = shard_open_trainer(&s, true), whole = shard_open_trainer(&s, false);

        for (int number = 0; number < 3; number++) {
            shard_micro_step(&sharded, number, s.micro_batches);
            shard_micro_step(&whole, number, s.micro_batches);
            assert_norm(&sharded, &whole);
        }
        td_assert_ok(td_train_settle(sharded.train));
        assert_alike(&s, &sharded, &whole);
        shard_close_trainer(&sharded);
        shard_close_trainer(&whole);
    }
}

/* Runs `check` with both kinds, update times and precisions, and with micro-batches. */
static void each_way(const char *name, void (*check)(shard_setting s))
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
    char words[64];

    for (int p = 0; p < 2; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (td_shard_kind kind = TD_SHARD_TENSORS; kind <= TD_SHARD_FULL; kind++)
                for (int64_t micro_batches = 1; micro_batches <= 3; micro_batches += 2) {
                    snprintf(words, sizeof words, "%s, %s", name, td_shard_kind_name(kind));
                    check((shard_setting){.name = words,
                                          .kind = kind,
                                          .bucket_mb = 0.004,
                                          .precision = precisions[p],
                                          .time = time,
                                          .micro_batches = micro_batches});
                }
}

/* Each micro-batch is reduced and added to this rank's part. test_matrix reduces only the last one. */
TD_TEST(micro_batches_of_full_sharding_add_up)
{
    for (int i = 0; i < 2; i++) {
        const shard_setting s = {.name = "full, micro-batches",
                                 .kind = TD_SHARD_FULL,
                                 .precision = i == 1 ? TD_PRECISION_BF16_MIXED : TD_PRECISION_F32,
                                 .time = i == 1 ? TD_UPDATE_AFTER : TD_UPDATE_ALONG,
                                 .captured = shard_on_gpu(),
                                 .sharing = true,
                                 .micro_batches = 3,
                                 .keep_weights = i == 1};

        train_case(&s);
    }
}

static void sharing_case(shard_setting s)
{
    s.sharing = true;
    train_case(&s);
    s.captured = true;
    train_case(&s);
}

TD_TEST(steps_whose_products_leave_room_are_as_good)
{
    if (shard_info.nccl_ctas == 0) /* as on a CPU: GEMMs use all SMs */
        skip();
    each_way("shared", sharing_case);
}

static int32_t windows(void)
{
    td_comm_info now;

    td_assert_ok(td_comm_describe(shard_comm, &now));
    return now.windows;
}

/* NCCL reads weights and gradients directly from the other GPUs. */
static void window_case(shard_setting s)
{
    if (s.kind == TD_SHARD_TENSORS || s.micro_batches > 1)
        return;
    s.wide = s.captured = true;
    s.bucket_mb = 4;
    shard_trainer t = shard_open_trainer(&s, true);
    assert_int_equal(windows(), s.kind == TD_SHARD_FULL ? 4 : 2);
    shard_close_trainer(&t);
    assert_int_equal(windows(), 0);
    train_case(&s);
    assert_int_equal(windows(), 0);
}

TD_TEST(state_in_windows_is_that_of_unsharded_training)
{
    if (!td_ranks_direct(&shard_info))
        skip();
    each_way("in windows", window_case);
}

int shard_steps_group(const char *name)
{
    return td_run_tests(name, NULL, NULL);
}
