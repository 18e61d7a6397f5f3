#include "flash/flash.h"

#include "cli/attend.h"
#include "cli/commands.h"

td_status td_command_flash(int argc, char **argv)
{
    const td_attend attend = {
        .impl = &td_attention_flash,
        .doc = "Times FlashAttention-2, which never holds the score matrix, on random "
               "queries, keys and values." TD_ATTEND_NOTES
               "  tandem flash --batch 8 --seq 512,1024,2048 --causal\n"
               "  tandem flash --device cuda --heads 16 --seq 16384 --dtype bf16 --causal"};

    return td_attend_run(&attend, argc, argv);
}
