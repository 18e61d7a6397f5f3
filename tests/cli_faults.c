/* The program's commands, with each of their calls and allocations failing in turn. Every command returns a
 * status and a reason, and frees everything. cli.py tests output and refusals of arguments. */
#include "accounting/accounting.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "cli/commands.h"
#include "cli/limit.h"
#include "comm/comm.h"
#include "memory/memory.h"
#include "precision/precision.h"
#include "support/fault.h"
#include "support/test.h"
#include "trace/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- doubles that cannot be made from prototypes ---- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
char *__real_strdup(const char *text);
int __real_vasprintf(char **out, const char *format, va_list args);

void *__wrap_malloc(size_t size)
{
    return td_fault("malloc") ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return td_fault("calloc") ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t size)
{
    return td_fault("realloc") ? NULL : __real_realloc(block, size);
}

char *__wrap_strdup(const char *text)
{
    return td_fault("strdup") ? NULL : __real_strdup(text);
}

int __wrap_vasprintf(char **out, const char *format, va_list args)
{
    return td_fault("vasprintf") ? -1 : __real_vasprintf(out, format, args);
}

/* ---- commands ---- */

enum { MOST_WORDS = 32 };

static char other[] = "/tmp/tandem_cli_other_XXXXXX";
static char others[3][64];

typedef struct command {
    const char *name;
    td_status (*run)(int argc, char **argv);
    const char *words; /* "OTHER1" to "OTHER3" are files */
    /* the command succeeds without memory for one length or some ranks, and says so */
    bool goes_on;
} command;

static const command commands[] = {
    {"account", td_command_account, "", false},
    {"account as JSON", td_command_account, "flops training --json", false},
    {"precision", td_command_precision, "", false},
    {"precision as JSON", td_command_precision, "--json", false},
    {"autocast as JSON", td_command_precision, "--ops --json", false},
    {"sizes", td_command_sizes, "", false},
    {"sizes as JSON", td_command_sizes, "--json", false},
    {"attention", td_command_attention, "--seq 3,5 --head-dim 4 --warmup 1 --iters 2 --threads 1 --json",
     true},
    {"flash as JSON", td_command_flash,
     "--seq 3 --head-dim 4 --dtype bf16 --causal --warmup 0 --iters 2 --json", true},
    {"bench", td_command_bench,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --warmup 1 "
     "--steps 2 --json",
     false},
#ifdef TANDEM_HAVE_GLOO
    {"allreduce", td_command_allreduce,
     "--backend gloo --bytes 40,8 --warmup 1 --iters 2 --out-of-place --json", false},
#endif
    {"bench forward", td_command_bench,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --warmup 0 "
     "--steps 1 --mode forward",
     false},
    {"memory", td_command_memory,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --attention "
     "naive --json --snapshot OTHER1 --events OTHER2 --timeline OTHER3",
     false},
    {"memory of checkpoints", td_command_memory,
     "--d-model 4 --d-ff 3 --layers 2 --heads 2 --vocab 5 --batch 1 --context 3 --keep inputs "
     "--update after --gradients held --json",
     false},
    {"trace", td_command_trace,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --attention "
     "naive --warmup 0 --steps 1 --top 2 --json --trace OTHER1 --timeline OTHER2",
     true},
    {"trace of micro-batches, whole", td_command_trace,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --warmup 1 "
     "--steps 1 --timed whole --micro-batches 2 --json",
     true},
    {"trace of inference", td_command_trace,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --mode forward "
     "--warmup 0 --steps 1",
     true},
    {"memory of inference", td_command_memory,
     "--d-model 4 --d-ff 3 --layers 1 --heads 2 --vocab 5 --batch 1 --context 3 --pass "
     "inference --top 2",
     false},
};

/* Runs the command and discards its output. */
static td_status run_quietly(const command *c)
{
    static const int outputs[] = {STDOUT_FILENO, STDERR_FILENO};
    char program[] = "tandem", line[512], *argv[MOST_WORDS + 1] = {program};
    int argc = 1, kept[2], nothing = open("/dev/null", O_WRONLY);

    assert_true(nothing >= 0);
    assert_in_range(snprintf(line, sizeof line, "%s", c->words), 0, sizeof line - 1);
    for (char *word = strtok(line, " "); word && argc < MOST_WORDS; word = strtok(NULL, " "))
        argv[argc++] = strncmp(word, "OTHER", 5) == 0 ? others[word[5] - '1'] : word;
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        kept[i] = dup(outputs[i]);
        dup2(nothing, outputs[i]);
    }
    const td_status status = c->run(argc, argv);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        dup2(kept[i], outputs[i]);
        close(kept[i]);
    }
    close(nothing);
    return status;
}

static td_status run_command(void *state)
{
    return run_quietly(*(const command **)state);
}

static void every_fault_comes_back_as_a_status(void **state)
{
    const command *c = *state;
    const td_fault_loop loop = {.name = c->name, .run = run_command, .may_go_on = c->goes_on, .least = 10};

    td_fault_each(&loop, &c);
}

/* ---- a GPU for each rank ---- */

/* A machine with two GPUs. */
td_status __wrap_td_device_count(td_device_kind kind, int *out)
{
    (void)kind;
    *out = 2;
    return TD_OK;
}

#define SRUN "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=9 SLURM_LOCALID=1 "

TD_BODY(each_rank_needs_a_gpu)
{
    static const struct {
        const char *variables, *words;
    } cases[] = {
        {"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4",
         "rank 0 of 4: this host has 4 ranks and 2 GPUs: each rank needs a GPU"},
        {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=2", "rank 3 of 4: this host has 3 ranks and 2 GPUs"},
        {"RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", "the launcher does not say its number on this host"},
        {"RANK=x WORLD_SIZE=4", "RANK is 'x', needs a whole number"},
        {"RANK=0 WORLD_SIZE=1 LOCAL_RANK=x", "LOCAL_RANK is 'x', needs a whole number"},
        {"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=x",
         "LOCAL_WORLD_SIZE is 'x', needs a whole number"},
        {"RANK=0 WORLD_SIZE=x LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", "WORLD_SIZE is 'x', needs a whole number"},
        {SRUN "SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=9", "this host has 9 ranks and 2 GPUs"},
        {SRUN "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3(x2),2,1", "this host has 3 ranks and 2 GPUs"},
        {SRUN "SLURM_NODEID=3 SLURM_STEP_TASKS_PER_NODE=2(x2),1,4", "this host has 4 ranks and 2 GPUs"},
        {SRUN "SLURM_NODEID=x SLURM_STEP_TASKS_PER_NODE=9", "SLURM_NODEID is 'x', needs a whole number"}};
    const command c = {"allreduce", td_command_allreduce, "--device cuda", false};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[160], *end = text, *set[6], name[40];
        int count = 0;

        snprintf(text, sizeof text, "%s", cases[i].variables);
        while ((set[count] = strsep(&end, " ")))
            putenv(set[count++]);
        const td_status status = run_quietly(&c);
        while (count-- > 0) {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(set[count], "="), set[count]);
            unsetenv(name);
        }
        assert_true(status == TD_UNSUPPORTED || status == TD_BAD_ARGUMENT);
        assert_non_null(strstr(td_last_error(), cases[i].words));
    }
}

/* ---- the limit of memory ---- */

static char root[] = "/tmp/tandem_cli_memory_XXXXXX";

static void write_file(const char *path, const char *text)
{
    char full[512];

    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')); at++) {
        *at = '\0';
        mkdir(full, 0700);
        *at = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void remove_tree(void)
{
    char line[64];

    snprintf(line, sizeof line, "rm -rf %s", root);
    assert_int_equal(system(line), 0);
}

/* Directory trees as the kernel shows them. */
TD_BODY(control_groups_lower_the_limit)
{
    static const struct {
        const char *name;
        const char *files[8]; /* path, text, ... */
        double limit;         /* 0: the machine's */
    } cases[] = {
        {"no groups at all", {NULL}, 0},
        {"version 2, no limit", {"/proc/self/cgroup", "0::/a\n", "/sys/fs/cgroup/a/memory.max", "max\n"}, 0},
        {"version 2",
         {"/proc/self/cgroup", "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max", "1048576\n"},
         1048576},
        {"version 2, the group above has less",
         {"/proc/self/cgroup", "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max", "2097152\n",
          "/sys/fs/cgroup/a/memory.max", "1048576\n"},
         1048576},
        {"version 2, a container's root",
         {"/proc/self/cgroup", "0::/\n", "/sys/fs/cgroup/memory.max", "4096\n"},
         4096},
        {"version 1",
         {"/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/x\n0::/\n",
          "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "8192\n"},
         8192},
        {"version 1, no limit",
         {"/proc/self/cgroup", "4:memory:/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
          "9223372036854771712\n"},
         0},
        {"another controller's name",
         {"/proc/self/cgroup", "4:memoryless:/x\n1:name=memory:/x\n",
          "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "8192\n"},
         0},
        {"lines that are none",
         {"/proc/self/cgroup", "\nmemory\n0:\n", "/sys/fs/cgroup/memory.max", "8192\n"},
         0},
        {"a limit that is no number", {"/proc/self/cgroup", "0::/", "/sys/fs/cgroup/memory.max", ""}, 0},
    };
    const double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_non_null(mkdtemp(root));
        for (int j = 0; j < 8 && cases[i].files[j]; j += 2)
            write_file(cases[i].files[j], cases[i].files[j + 1]);
        const double limit = td_memory_limit(root), want = cases[i].limit > 0 ? cases[i].limit : machine;
        remove_tree();
        memcpy(root + strlen(root) - 6, "XXXXXX", 6);
        if (limit != want)
            fail_msg("%s: the limit is %.0f, needs to be %.0f", cases[i].name, limit, want);
    }
    assert_true(td_memory_limit("") > 0 && td_memory_limit("") <= machine);
}

int main(void)
{
    enum { COMMANDS = sizeof commands / sizeof *commands };
    struct CMUnitTest tests[COMMANDS + 2] = {cmocka_unit_test(control_groups_lower_the_limit),
                                             cmocka_unit_test(each_rank_needs_a_gpu)};
    const int file = mkstemp(other);

    if (file < 0)
        return 1;
    close(file);
    for (int i = 0; i < 3; i++)
        snprintf(others[i], sizeof others[i], "%s%d", other, i + 1);
    for (int i = 0; i < COMMANDS; i++)
        tests[i + 2] = (struct CMUnitTest){.name = commands[i].name,
                                           .test_func = every_fault_comes_back_as_a_status,
                                           .initial_state = (void *)&commands[i]};
    const int failed = cmocka_run_group_tests_name("faults of the commands", tests, NULL, NULL);
    unlink(other);
    for (int i = 0; i < 3; i++)
        unlink(others[i]);
    return failed;
}
