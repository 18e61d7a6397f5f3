#include "cli/attend.h"
#include "cli/commands.h"

td_status td_command_attention(int argc, char **argv)
{
    const td_attend attend = {.impl = &td_attention_naive,
                              .doc = "Times attention with the score matrix in memory, on random queries, "
                                     "keys and values." TD_ATTEND_NOTES
                                     "  tandem attention --batch 8 --seq 256,1024 --head-dim 32\n"
                                     "  tandem attention --seq 1024 --dtype bf16 --json"};

    return td_attend_run(&attend, argc, argv);
}
