/* Groups of the optimizer, as trainers and links compare them. */
#include "train/state.h"

#include <string.h>

int64_t td_train_groups(const td_train_config *config, int64_t elements, td_optimizer_group *all,
                        const td_optimizer_group **out)
{
    *all = (td_optimizer_group){.range = {0, elements}, .hyper = config->hyper};
    *out = config->groups ? config->groups : all;
    return config->groups ? config->group_count : 1;
}

void td_group_hash(const td_optimizer_group *group, uint64_t *lr, uint64_t *others)
{
    const td_hyperparameters *h = &group->hyper; /* only the fields of its kind count */
    const bool adamw = h->kind == TD_OPTIMIZER_ADAMW;
    const double rate = adamw ? h->adamw.lr : h->sgd.lr;
    const double values[] = {
        (double)group->range.begin,   (double)group->range.end,         h->kind,
        adamw ? h->adamw.variant : 0, adamw ? h->adamw.beta1 : 0,       adamw ? h->adamw.beta2 : 0,
        adamw ? h->adamw.eps : 0,     adamw ? h->adamw.weight_decay : 0};

    *lr = td_hash(*lr, &rate, sizeof rate);
    *others = td_hash(*others, values, sizeof values);
}

void td_group_settings(int64_t count, const td_optimizer_group *groups, td_setting out[TD_GROUP_SETTINGS])
{
    const td_hyperparameters *h = count > 0 ? &groups[0].hyper : NULL;
    const bool adamw = h && h->kind == TD_OPTIMIZER_ADAMW;
    uint64_t hash = TD_HASH_BEGIN;

    for (int64_t i = 0; i < count; i++)
        td_group_hash(&groups[i], &hash, &hash);
    memcpy(out,
           (td_setting[]){{"groups of the optimizer", (double)count},
                          {"optimizer (0 adamw, 1 sgd)", h ? (int)h->kind : -1},
                          {"adamw's variant", adamw ? (int)h->adamw.variant : 0},
                          {"lr", adamw ? h->adamw.lr
                                 : h   ? h->sgd.lr
                                       : 0},
                          {"beta1", adamw ? h->adamw.beta1 : 0},
                          {"beta2", adamw ? h->adamw.beta2 : 0},
                          {"eps", adamw ? h->adamw.eps : 0},
                          {"weight_decay", adamw ? h->adamw.weight_decay : 0},
                          {"a hash of the groups' ranges and hyperparameters", (double)(hash >> 12)}},
           TD_GROUP_SETTINGS * sizeof *out);
}
