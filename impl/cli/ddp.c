#include "ddp/ddp.h"

#include "cli/commands.h"
#include "cli/parallel.h"

td_status td_command_ddp(int argc, char **argv)
{
    const td_parallel parallel = {
        .doc = "Times training steps of several ranks, which average their gradients. Start the ranks with "
               "mpirun, srun, torchrun, or a loop that sets RANK and WORLD_SIZE." TD_PARALLEL_NOTES
               "  mpirun -n 2 tandem ddp --strategy bucketed --bucket-mb 25\n"
               "  mpirun -n 2 tandem ddp --device cuda --size xl --batch 2 --json\n"
               "  tandem ddp --strategy naive --steps 5\n"
               "  tandem ddp --strategy flat --optimizer sgd --dtype bf16"};

    return td_parallel_run(&parallel, argc, argv);
}
