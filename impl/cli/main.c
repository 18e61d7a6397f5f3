#include "cli/commands.h"

#include "base/build.h"
#include "cli/guard.h"

#include <argp.h>
#include <dnnl.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

static void print_version(FILE *stream, struct argp_state *state);

/* Exported, because it replaces the C library's variable. */
TD_API void (*argp_program_version_hook)(FILE *, struct argp_state *) = print_version;

static void print_version(FILE *stream, struct argp_state *state)
{
    const td_build *build = td_build_info();
    const dnnl_version_t *onednn = dnnl_version(); /* of the loaded library */
    const bool cuda = strstr(build->backends, "cuda") != NULL;

    (void)state;
    fprintf(stream, "tandem %s\n", build->version);
    fprintf(stream, "commit %s%s, build %s\n", build->commit, build->dirty ? " with changes" : "", build->id);
    fprintf(stream, "%s, -march=%s, %s\n", build->compiler, build->march, build->flags);
    fprintf(stream, "backends: cpu, %s%s\n", cuda ? "cuda of GPU architectures " : "no cuda",
            build->architectures);
    fprintf(stream, "oneDNN %d.%d.%d\n", onednn->major, onednn->minor, onednn->patch);
    fprintf(stream, "collectives:");
    for (int backend = TD_COMM_MPI; backend <= TD_COMM_NCCL; backend++)
        if (td_comm_backend_check((td_comm_backend)backend) == TD_OK)
            fprintf(stream, " %s", td_comm_backend_name((td_comm_backend)backend));
    fprintf(stream, "\n");
}

static const struct command {
    const char *name, *does;
    td_status (*run)(int argc, char **argv);
} commands[] = {
    {"bench", "time a Transformer: forward, backward, optimizer", td_command_bench},
    {"attention", "time attention with the score matrix in memory", td_command_attention},
    {"flash", "time FlashAttention-2", td_command_flash},
    {"trace", "show what runs in a step, kernel by kernel", td_command_trace},
    {"memory", "record the memory of a step, tensor by tensor", td_command_memory},
    {"precision", "add in low precision; show what autocast does to each component", td_command_precision},
    {"sizes", "show the model sizes of the handout", td_command_sizes},
    {"account", "show the arithmetic: parameters, FLOPs, memory, communication", td_command_account},
    {"allreduce", "time all-reduce among ranks", td_command_allreduce},
    {"ddp", "time training steps of several ranks, with averaged gradients", td_command_ddp},
    {"shard", "time training steps of several ranks, with sharded state", td_command_shard},
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

/** Appends to a text in `capacity` bytes, which are enough for all commands. */
static void append(char *text, size_t capacity, const char *format, const char *name, const char *more)
{
    const size_t used = strlen(text);

    snprintf(text + used, capacity - used, format, name, more);
}

typedef struct invocation {
    const struct command *command;
    int argc;
    char **argv; /* from the command's name on */
} invocation;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    invocation *call = state->input;
    char names[256] = "";

    switch (key) {
    case ARGP_KEY_ARG:
        for (int i = 0; i < COMMANDS && !call->command; i++)
            if (strcmp(arg, commands[i].name) == 0)
                call->command = &commands[i];
        for (int i = 0; i < COMMANDS; i++)
            append(names, sizeof names, "%s%s", i > 0 ? ", " : "", commands[i].name);
        if (!call->command)
            argp_error(state, "'%s' is no command; there are %s", arg, names);
        call->argc = state->argc - state->next + 1;
        call->argv = &state->argv[state->next - 1];
        state->next = state->argc; /* the rest belongs to the command */
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_state_help(state, state->err_stream, ARGP_HELP_USAGE | ARGP_HELP_DOC | ARGP_HELP_EXIT_ERR);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* "tandem" or "tandem <command>", for the last message. */
static char name[64] = "tandem";

/* Runs at exit, also after argp's --help: printed text may still be in a buffer, and a full disk may refuse
 * it. That is a failure too. */
static void check_output(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return;
    fprintf(stderr, "%s: standard output: %s\n", name, strerror(errno));
    _exit(EXIT_FAILED);
}

int main(int argc, char **argv)
{
    static const char after[] = "\v`tandem COMMAND --help' explains a command. Tables go to standard output, "
                                "in Markdown; messages and "
                                "progress go to standard error. The exit status is 0, or 1 if something "
                                "failed, or 2 for a mistake in "
                                "the arguments.\n\n"
                                "Examples:\n"
                                "  tandem bench --size small --timed phases\n"
                                "  tandem flash --seq 512,1024 --causal --json";
    char doc[2048] = "Measures and accounts for the training of language models, in C.\n\n";
    const struct argp argp = {.parser = parse, .args_doc = "COMMAND [OPTION...]", .doc = doc};
    invocation call = {0};

    for (int i = 0; i < COMMANDS; i++)
        append(doc, sizeof doc, "  %-11s%s\n", commands[i].name, commands[i].does);
    append(doc, sizeof doc, "%s%s", after, "");
    if (atexit(check_output) != 0)
        return EXIT_FAILED;
    signal(SIGXFSZ, SIG_IGN); /* so a write beyond a limit on file sizes returns an error */
    argp_err_exit_status = EXIT_USAGE;
    argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &call);
    snprintf(name, sizeof name, "tandem %s", call.command->name);
    call.argv[0] = name;

    td_status status = call.command->run(call.argc, call.argv);
    if (status != TD_OK && td_guard_reports_first())
        fprintf(stderr, "%s: %s\n", name, td_last_error());
    return status == TD_OK ? 0 : EXIT_FAILED;
}
