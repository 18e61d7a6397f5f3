/* A trainer whose optimizer updates some weights, or none, with links: notifications of updates, and
 * the request for all weights. */
#include "train/state.h"

#include "support/cases.h"
#include "support/compare.h"
#include "support/test.h"
#include "support/train_kit.h"
#include "support/weights.h"

#include <unistd.h>

enum { BATCH = 2, CONTEXT = 8 };

/* A link that counts its calls and may refuse one. */
typedef struct listener {
    td_hook hook;
    int64_t updated, settled; /* elements; calls */
    td_status answer;
} listener;

static td_status on_updated(td_hook *hook, td_range range, td_event *event)
{
    listener *l = (listener *)hook;

    assert_null(event);
    l->updated += range.end - range.begin;
    return l->answer;
}

static td_status on_settle(td_hook *hook)
{
    listener *l = (listener *)hook;

    l->settled++;
    return l->answer;
}

static td_train_config config_of(td_update_time time, listener *heard)
{
    *heard = (listener){.hook = {.updated = on_updated, .settle = on_settle}};
    return (td_train_config){
        .model = {.size = {.d_model = 12, .d_ff = 20, .layers = 2, .heads = 2, .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = TD_PRECISION_BF16_MIXED,
                  .attention = "flash",
                  .keep = TD_KEEP_ALL},
        .hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH)},
        .time = time,
        .hooks = &heard->hook};
}

TD_TEST(links_hear_of_every_element_once)
{
    static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
    listener heard;

    for (int p = 0; p < 2; p++)
        for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++)
            for (int clip = 0; clip < 2; clip++) {
                td_train_config config = config_of(time, &heard);

                config.model.precision = precisions[p];
                config.clip = (float)clip;
                td_train *train = make(&config, 7);
                for (int step = 1; step <= 2; step++) {
                    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
                    assert_int_equal(heard.updated, step * weights_of(train).elements);
                }
                heard.answer = TD_IO_ERROR;
                assert_int_equal(td_train_step(train, ids, targets, BATCH, CONTEXT), TD_IO_ERROR);
                td_train_destroy(train);
                assert_null(heard.hook.next);
            }
}

/* Two trainers, each with half of the weights, give the results of one trainer with all weights. */
TD_TEST(groups_are_updated_and_nothing_else_is)
{
    for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++) {
        listener heard, heard_half;
        td_train_config config = config_of(time, &heard);
        td_train *whole = make(&config, 7);
        const td_weights all = weights_of(whole);
        const int64_t middle = all.elements / 2 + 3;

        td_train_config alone = config;
        alone.hooks = NULL;
        td_train *untouched = make(&alone, 7);
        td_assert_ok(td_train_step(whole, ids, targets, BATCH, CONTEXT));
        for (int half = 0; half < 2; half++) {
            td_train_config of_half = config_of(time, &heard_half);
            const td_optimizer_group group = {.range = {half ? middle : 0, half ? all.elements : middle},
                                              .hyper = config.hyper};

            of_half.groups = &group;
            of_half.group_count = 1;
            td_train *train = make(&of_half, 7);
            const td_weights mine = weights_of(train), before = weights_of(untouched);

            td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
            for (int part = 0; part < 2; part++) {
                const td_weights *want = part == half ? &all : &before;
                const int64_t begin = part ? middle : 0, end = part ? all.elements : middle;

                void *got = td_numbers_in(&mine, begin, end), *wanted = td_numbers_in(want, begin, end);

                td_assert_identical("weights", TD_F32, got, wanted, end - begin);
                free(got);
                free(wanted);
            }
            assert_int_equal(heard_half.updated, group.range.end - group.range.begin);
            assert_int_equal(heard.updated, all.elements);
            td_train_destroy(train);
        }
        td_train_destroy(whole);
        td_train_destroy(untouched);
    }
}

TD_TEST(an_optimizer_may_have_no_weights)
{
    for (td_update_time time = TD_UPDATE_ALONG; time <= TD_UPDATE_AFTER; time++) {
        listener heard;
        td_train_config config = config_of(time, &heard);
        const td_optimizer_group unused_group = {.range = {-1, -1}};
        td_train_bytes bytes;

        config.groups = &unused_group; /* group_count is 0 */
        td_assert_ok(td_train_plan(dev, &config, &bytes));
        assert_int_equal(bytes.optimizer + bytes.moments, 0);
        td_train *train = make(&config, 7);
        config.hooks = NULL;
        td_train *untouched = make(&config, 7);
        td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
        assert_int_equal(heard.updated, 0);
        td_assert_identical("weights", TD_F32, weights_of(train).params, weights_of(untouched).params,
                            weights_of(train).elements);
        td_assert_ok(td_train_set(train, &config.hyper));
        td_assert_ok(td_train_reset(train));
        td_train_destroy(train);
        td_train_destroy(untouched);
    }
}

/* The ranges of both groups; their border lies within a parameter. */
static void assert_same_moments(const td_train *got, const td_train *want)
{
    td_optimizer *const a = td_train_optimizer(got), *const b = td_train_optimizer(want);
    float *x[2], *y[2];
    td_optimizer_group group;

    for (int64_t i = 0; i < td_optimizer_group_count(b); i++) {
        td_assert_ok(td_optimizer_group_at(b, i, &group));
        const int64_t begin = group.range.begin;
        td_assert_ok(td_optimizer_moments(a, begin, &x[0], &x[1]));
        td_assert_ok(td_optimizer_moments(b, begin, &y[0], &y[1]));
        for (int which = 0; which < 2; which++)
            td_assert_identical("moments", TD_F32, x[which], y[which], group.range.end - begin);
    }
}

TD_TEST(weights_settle_before_they_are_saved)
{
    char path[] = "train_groups_XXXXXX";
    listener heard;
    td_train_config config = config_of(TD_UPDATE_ALONG, &heard);
    const int file = mkstemp(path);

    assert_true(file >= 0);
    close(file);
    td_train *train = make(&config, 7);
    const td_weights all = weights_of(train);
    td_assert_ok(td_train_settle(train));
    assert_int_equal(heard.settled, 1);
    td_assert_ok(td_train_save(train, path));
    assert_int_equal(heard.settled, 2);
    td_assert_ok(td_train_restore(train, path));
    assert_int_equal(heard.settled, 3);
    heard.answer = TD_IO_ERROR;
    assert_int_equal(td_train_settle(train), TD_IO_ERROR);
    assert_int_equal(td_train_save(train, path), TD_IO_ERROR);
    assert_int_equal(td_train_restore(train, path), TD_IO_ERROR);
    td_train_destroy(train);

    td_optimizer_group groups[] = {{.range = {0, 100}, .hyper = config.hyper},
                                   {.range = {100, all.elements}, .hyper = config.hyper}};
    heard.answer = TD_OK;
    config.groups = groups;
    config.group_count = 1;
    train = make(&config, 7);
    td_assert_refused(td_train_save(train, path), TD_UNSUPPORTED, "groups leave out weights");
    td_assert_refused(td_train_restore(train, path), TD_UNSUPPORTED, "groups leave out weights");
    td_train_destroy(train);
    config.group_count = 2;
    groups[1].range.begin = 104;
    train = make(&config, 7);
    td_assert_refused(td_train_save(train, path), TD_UNSUPPORTED, "groups leave out weights");
    td_train_destroy(train);
    groups[1].range.begin = 100;
    train = make(&config, 7);
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    td_assert_ok(td_train_save(train, path));
    config.hooks = NULL;
    td_train *other = make(&config, 7);
    td_assert_ok(td_train_restore(other, path));
    assert_same_moments(other, train);
    td_train_destroy(other);
    td_train_destroy(train);
    groups[1].hyper = (td_hyperparameters){.kind = TD_OPTIMIZER_SGD, .sgd.lr = 0.1};
    train = make(&config, 7);
    td_assert_refused(td_train_save(train, path), TD_UNSUPPORTED,
                      "group 1 has 0 moments of a weight, earlier groups have 2");
    td_train_destroy(train);
    unlink(path);
}

/* If the trainer has no optimizer, links still get passes and the call to settle. */
TD_TEST(links_are_there_without_an_optimizer)
{
    listener heard;
    td_train_config config = config_of(TD_UPDATE_ALONG, &heard);

    config.until = TD_TRAIN_BACKWARD;
    td_train *train = make(&config, 7);
    td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    td_assert_ok(td_train_settle(train));
    assert_true(heard.updated == 0 && heard.settled == 1);
    for (int capture = 1; capture >= 0; capture--) {
        td_train_set_capture(train, capture);
        assert_int_equal(heard.hook.captured, capture);
    }
    td_train_destroy(train);
}

int main(void)
{
    return td_run_group("groups", (size_t)td_test_count, td_tests, open_device, close_device);
}
