/* Optimizer state that is split among ranks, in the steps of a trainer. test_shard_link BACKEND RANKS starts
 * the ranks itself. Under mpirun the process is one of the ranks. With the further arguments "killed KIND",
 * rank 1 is killed in a backward pass. With "killed KIND forward" it is killed in a forward pass, in which
 * full sharding gathers. */
#include "support/as_if_graphs.h"
#include "support/shard_kit.h"

int main(int argc, char **argv)
{
    td_shard_kind kind = TD_SHARD_TENSORS;
    const bool kills =
        argc > 4 && strcmp(argv[3], "killed") == 0 && td_shard_kind_parse(argv[4], &kind) == TD_OK;
    int result;

    td_as_if_graphs();
    if (kills && !td_ranks_inside())
        return shard_check_killed(argc, argv);
    if (!td_ranks_begin(argc, argv, &shard_dev, &shard_comm, &result))
        return result;
    td_assert_ok(td_comm_describe(shard_comm, &shard_info));
    td_assert_ok(td_cpu_set_threads(1)); /* there are as many ranks as processors, or more */
    if (kills)
        return shard_killed(kind, argc > 5);
    const int failed = shard_steps_group(argv[1]) + shard_rules_group(argv[1]) + shard_full_group(argv[1]) +
                       shard_places_group(argv[1]);
    return td_ranks_end(shard_dev, shard_comm, failed);
}
