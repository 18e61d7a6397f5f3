/* What must be the same in the trainers of all ranks. */
#include "base/check.h"
#include "train/state.h"
#include "transformer/owned.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

td_status td_train_settings(td_train *train, td_setting out[TD_TRAIN_SETTINGS])
{
    const td_train_config *config = td_train_config_of(train);
    const td_transformer_config *model = &config->model;
    const td_model_size *size = &model->size;
    td_status status = TD_OK;
    int attention;
    int64_t steps;

    TD_TRY(td_train_steps(train, &steps));
    TD_TRY(td_attention_index(model->attention, &attention));
    memcpy(out,
           (td_setting[]){{"d_model", (double)size->d_model},
                          {"d_ff", (double)size->d_ff},
                          {"layers", (double)size->layers},
                          {"heads", (double)size->heads},
                          {"vocab", (double)size->vocab},
                          {"precision", model->precision},
                          {"attention (0 flash, 1 naive)", attention},
                          {"rope_theta", model->rope_theta > 0 ? model->rope_theta : 10000},
                          {"keep (0 most, 1 all, 2 inputs, 3 attention)", model->keep},
                          {"checkpoint_layers", fmax(1, (double)model->checkpoint_layers)},
                          {"kept_layers", fmax(1, (double)model->kept_layers)},
                          {"transient_gradients", model->transient_gradients},
                          {"micro_batches", (double)config->micro_batches},
                          {"f32_gradients", model->f32_gradients}, /* micro_batches may set it */
                          {"gain", (double)config->gain},
                          {"clip", (double)config->clip},
                          {"until", config->until},
                          {"time (0 along, 1 after)", config->time},
                          {"capture", config->capture},
                          {"update_sms", td_train_sms(train)},
                          {"steps so far", (double)steps}},
           TD_TRAIN_SETTINGS * sizeof *out);
cleanup:
    return status;
}

td_status td_train_group_settings(const td_train *train, td_setting out[TD_GROUP_SETTINGS])
{
    const td_optimizer *const optimizer = td_train_optimizer(train);
    const int64_t count = td_train_config_of(train)->own_groups ? 0 : td_optimizer_group_count(optimizer);
    td_optimizer_group *groups = calloc((size_t)count + 1, sizeof *groups);

    if (!groups)
        return td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " groups", count);
    for (int64_t i = 0; i < count; i++)
        (void)td_optimizer_group_at(optimizer, i, &groups[i]); /* group i exists */
    td_group_settings(count, groups, out);
    free(groups);
    return TD_OK;
}
