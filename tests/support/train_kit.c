#include "support/train_kit.h"

#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

td_device *dev;
int64_t *ids, *targets;

int open_device(void **unused)
{
    (void)unused;
    td_assert_ok(td_device_open("cpu", &dev));
    ids = td_draw_tokens("train ids", 0, TOKENS, VOCAB);
    targets = td_draw_tokens("train targets", 1, TOKENS, VOCAB);
    return 0;
}

int close_device(void **unused)
{
    td_memory_stats memory;

    (void)unused;
    td_assert_ok(td_device_memory(dev, &memory));
    assert_true(memory.current_bytes == 0 || td_broken_off());
    td_device_close(dev);
    td_fence_free(ids);
    td_fence_free(targets);
    return 0;
}

td_train *make(const td_train_config *config, uint64_t seed)
{
    td_train *train;

    td_assert_ok(td_train_create(dev, config, &train));
    td_assert_ok(td_train_init(train, seed));
    return train;
}

td_weights weights_of(const td_train *train)
{
    td_weights weights;

    td_assert_ok(td_transformer_weights(td_train_model(train), &weights));
    return weights;
}
