/** Shared by the groups of test_shard_link: the ranks' device and communicator, and small trainers with and
 * without split state. */
#ifndef TD_TESTS_SHARD_KIT_H
#define TD_TESTS_SHARD_KIT_H

#include "ddp/ddp.h"
#include "shard/state.h"
#include "support/compare.h"
#include "support/ranks.h"
#include "support/test.h"

/* 37 rows of 12 weights divided by three ranks leave a rest with weights, not only padding. */
enum { SHARD_BATCH = 2, SHARD_CONTEXT = 8, SHARD_VOCAB = 37 };

/* The groups, one in each file. Each returns the number of failed tests. */
int shard_steps_group(const char *name);
int shard_rules_group(const char *name);
int shard_full_group(const char *name);
int shard_places_group(const char *name);

/* A rank is killed in a backward or a forward pass. shard_killed is run by each rank; the other function
 * starts the ranks and judges their exit statuses. Both return the exit status. */
int shard_killed(td_shard_kind kind, bool forward);
int shard_check_killed(int argc, char **argv);

/* Open from the first test to the last. */
extern td_device *shard_dev;
extern td_comm *shard_comm;
extern td_comm_info shard_info;

typedef struct shard_setting {
    const char *name;
    td_shard_kind kind;
    double bucket_mb;
    td_precision precision;
    td_update_time time;
    bool two_groups, captured;
    bool adamw;            /* also with more than two ranks */
    bool wide;             /* weights large enough for windows */
    bool sharing;          /* GEMMs on a GPU are cut, because collectives reserve SMs: other bits */
    int64_t micro_batches; /* 0: 1 */
    float clip;
    int64_t prefetch; /* these three are for TD_SHARD_FULL */
    bool keep_weights, reduce_last;
} shard_setting;

/* A trainer with its links. */
typedef struct shard_trainer {
    td_train *train;
    td_ddp_link *ddp;
    td_shard_link *shard;
} shard_trainer;

bool shard_on_gpu(void);

/* td_shard_link_create on the ranks' communicator. With TD_SHARD_FULL gradients are held. */
td_status shard_link(td_shard_kind kind, double bucket_mb, td_train_config *config, td_shard_link **out);

/* The config of a trainer with the whole state and no links. */
td_train_config shard_config_of(const shard_setting *s);

/* A trainer with its links and weights; sharded: its state is split. The caller calls shard_close_trainer. */
shard_trainer shard_open_trainer(const shard_setting *s, bool sharded);
void shard_close_trainer(shard_trainer *t);
td_weights shard_weights_of(const td_train *train);

/* All weights as numbers on the host, with zeros between them; all ranks call it together. The caller frees
 * them. */
void *shard_numbers_of(shard_trainer *t);

/* A rank's tokens of a step with so many micro-batches (0: 1), on the device. The caller calls
 * td_device_free. */
int64_t *shard_tokens_of(const char *what, int step, int rank, int64_t micro_batches);

void shard_step(shard_trainer *t, int number);
void shard_micro_step(shard_trainer *t, int number, int64_t micro_batches);

/* The loss on a batch that is equal on all ranks, without a step. */
float shard_evaluate(shard_trainer *t);

#endif
