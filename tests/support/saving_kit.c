#include "support/saving_kit.h"

#include "support/compare.h"
#include "support/file_kit.h"
#include "support/test.h"
#include "support/weights.h"
#include "transformer/saving.h"

#include <math.h>

int open_device_and_folder(void **unused)
{
    return open_device(unused) != 0 ? -1 : file_folder_make(unused);
}

int remove_folder_and_close_device(void **unused)
{
    return file_folder_remove(unused) != 0 ? -1 : close_device(unused);
}

td_train_config config_of(td_precision precision)
{
    return (td_train_config){
        .model = {.size = {.d_model = 12, .d_ff = 20, .layers = 2, .heads = 2, .vocab = VOCAB},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .precision = precision,
                  .attention = "flash"},
        .hyper = {.kind = TD_OPTIMIZER_ADAMW, .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.1}};
}

td_transformer *make_model(const td_transformer_config *config)
{
    td_transformer *model;

    td_assert_ok(td_transformer_create(dev, config, &model));
    return model;
}

int64_t steps_of(td_train *train)
{
    int64_t steps = -1;

    td_assert_ok(td_train_steps(train, &steps));
    return steps;
}

float step(td_train *train, const td_train_config *config)
{
    float loss = NAN;

    td_assert_ok(td_train_step(train, ids, targets, config->model.batch, CONTEXT));
    td_assert_ok(td_train_loss(train, &loss));
    return loss;
}

void assert_same_weights(const td_transformer *a, const td_transformer *b)
{
    for (int64_t i = 0; i < td_transformer_parameter_count(a); i++) {
        void *const x = td_numbers_of(a, i), *const y = td_numbers_of(b, i); /* with both planes */
        td_parameter p;

        td_assert_ok(td_transformer_parameter(a, i, &p));
        td_assert_identical(p.name, p.dtype, x, y, p.numel);
        free(x);
        free(y);
    }
}

void assert_same(td_train *a, td_train *b)
{
    float *x[2], *y[2];
    td_weights w;

    assert_same_weights(td_train_model(a), td_train_model(b));
    td_assert_ok(td_transformer_weights(td_train_model(a), &w));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(a), 0, &x[0], &x[1]));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(b), 0, &y[0], &y[1]));
    for (int i = 0; i < 2 && x[i]; i++)
        td_assert_identical("moments", TD_F32, x[i], y[i], w.elements);
    assert_int_equal(steps_of(a), steps_of(b));
}

int64_t saving_bytes;

int64_t __wrap_td_saving_bytes(void);
int64_t __wrap_td_saving_bytes(void)
{
    return saving_bytes;
}
