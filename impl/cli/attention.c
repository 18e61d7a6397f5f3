#include "cli/attend.h"
#include "cli/commands.h"

td_status td_command_attention(int argc, char **argv)
{
    const td_attend attend = {.impl = &td_attention_naive,
                              .deliverable = "pytorch_attention",
                              .module = "attention",
                              .doc = "Times attention with the score matrix in memory, on random queries, "
                                     "keys and values." TD_ATTEND_NOTES};

    return td_attend_run(&attend, argc, argv);
}
