#include "jit/jit.h"

#include "cli/attend.h"
#include "cli/commands.h"

td_status td_command_jit(int argc, char **argv)
{
    const td_attend attend = {.impl = &td_attention_jit,
                              .deliverable = "torch_compile",
                              .module = "jit",
                              .compiled = true,
                              .doc = "Times attention that is compiled for its shape at its first call, on "
                                     "random queries, keys and values." TD_ATTEND_NOTES
                                     "  tandem jit --batch 8 --seq 256,1024 --head-dim 32\n"
                                     "  tandem jit --seq 512 --causal --compiler gcc --cache none"};

    return td_attend_run(&attend, argc, argv);
}
