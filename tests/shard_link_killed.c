/* A rank is killed in the middle of a pass, on GPUs too. */
#include "support/shard_kit.h"

#include <signal.h>

static int64_t reads;                     /* number of reads in `deadly` passes so far */
static td_pass deadly = TD_PASS_BACKWARD; /* the pass in which a rank dies */

static td_status die(td_hook *hook, td_pass pass, td_range range, const td_range *next, const void **where)
{
    (void)hook, (void)range, (void)next, (void)where;
    if (pass == deadly && shard_info.rank == 1 && ++reads == 40)
        raise(SIGKILL);
    return TD_OK;
}

/* On all other ranks the step returns an error that names the dead rank. */
int shard_killed(td_shard_kind kind, bool forward)
{
    const shard_setting s = {.name = "killed", .kind = kind};
    td_train_config config = shard_config_of(&s);
    td_hook killer = {.needed = die};
    td_ddp_link *ddp = NULL;
    td_shard_link *shard;
    td_train *train;
    td_status status = TD_OK;

    deadly = forward ? TD_PASS_FORWARD : TD_PASS_BACKWARD;
    if (kind == TD_SHARD_TENSORS) {
        td_assert_ok(td_ddp_link_create(shard_comm, TD_DDP_OVERLAP, 0, &ddp));
        config.hooks = td_ddp_link_hook(ddp);
    }
    td_assert_ok(shard_link(kind, 0.001, &config, &shard));
    killer.next = config.hooks;
    config.hooks = &killer;
    td_assert_ok(td_train_create(shard_dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    if (ddp)
        td_assert_ok(td_ddp_link_attach(ddp, shard_dev, train));
    td_assert_ok(td_shard_link_attach(shard, shard_dev, train));
    for (int number = 0; number < 1000 && status == TD_OK; number++) {
        int64_t *ids = shard_tokens_of("ids", number, shard_info.rank, 1);

        status = td_train_step(train, ids, ids, SHARD_BATCH, SHARD_CONTEXT);
        (void)td_device_free(shard_dev, ids);
    }
    const bool said = status == TD_RANK_FAILED && strstr(td_last_error(), "rank 1 (process") != NULL;
    if (!said)
        fprintf(stderr, "rank %d: %s\n", (int)shard_info.rank, td_last_error());
    td_train_destroy(train);
    td_ddp_link_destroy(ddp);
    td_shard_link_destroy(shard);
    (void)td_comm_close(shard_comm);
    td_device_close(shard_dev);
    return said ? 0 : 1;
}

/* Starts the ranks of shard_killed. */
int shard_check_killed(int argc, char **argv)
{
    const int ranks = argc > 2 ? atoi(argv[2]) : 2;
    int statuses[16] = {0}, wrong = 0, result;
    td_comm_backend backend;

    if (!td_ranks_possible(argc, argv, &backend, &result))
        return result;
    td_ranks_run_each(argv, ranks, 60, statuses);
    for (int rank = 0; rank < ranks; rank++)
        wrong += statuses[rank] != (rank == 1 ? 128 + SIGKILL : 0);
    return wrong;
}
