#include "shard/shard.h"

#include "cli/commands.h"
#include "cli/parallel.h"

td_status td_command_shard(int argc, char **argv)
{
    const td_parallel parallel = {
        .sharded = true,
        .doc = "Times training steps of several ranks and shows their memory. Each rank has a part of the "
               "optimizer's state, or a part of weights, gradients and state. Start the ranks with mpirun, "
               "srun, torchrun, or a loop that sets RANK and WORLD_SIZE." TD_PARALLEL_NOTES
               "  mpirun -n 2 tandem shard --kind flat --bucket-mb 25\n"
               "  mpirun -n 2 tandem shard --device cuda --size xl --batch 2 --json\n"
               "  tandem shard --kind tensors --strategy naive --steps 5\n"
               "  tandem shard --kind full --prefetch 2 --dtype bf16_mixed"};

    return td_parallel_run(&parallel, argc, argv);
}
