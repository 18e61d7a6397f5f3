/* The program's commands when every call they make fails in turn, and every allocation: each comes back with
 * a status and a reason, and holds nothing. What they print and how they refuse their arguments is
 * cli.py's. */
#include "accounting/accounting.h"
#include "base/record.h"
#include "base/rng.h"
#include "bench/bench.h"
#include "cli/commands.h"
#include "cli/limit.h"
#include "comm/comm.h"
#include "memory/memory.h"
#include "precision/precision.h"
#include "support/fault.h"
#include "trace/trace.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- the doubles ---- */

TD_FAULT(td_account_model_parameters, (const td_account_model *model, td_account_parameters *out),
         (model, out))
TD_FAULT(td_account_model_flops,
         (const td_account_model *model, int64_t batch, int64_t context, bool causal_half, bool flash,
          td_account_flops *out),
         (model, batch, context, causal_half, flash, out))
TD_FAULT(td_account_mfu, (double flops, double seconds, double peak_flops_per_second, double *out),
         (flops, seconds, peak_flops_per_second, out))
TD_FAULT(td_account_model_activations,
         (const td_account_model *model, int64_t batch, int64_t context, int64_t element_bytes,
          td_account_activations *out),
         (model, batch, context, element_bytes, out))
TD_FAULT(td_account_training_memory,
         (int64_t parameters, int64_t parameter_bytes, int64_t gradient_bytes, int64_t moment_bytes,
          td_account_training *out),
         (parameters, parameter_bytes, gradient_bytes, moment_bytes, out))
TD_FAULT(td_account_autocast_copies, (const td_account_model *model, int64_t low_bytes, int64_t *out),
         (model, low_bytes, out))
TD_FAULT(td_account_checkpointing,
         (int64_t blocks, int64_t segment, int64_t boundary_bytes, int64_t block_bytes, int64_t *out),
         (blocks, segment, boundary_bytes, block_bytes, out))
TD_FAULT(td_account_attention_memory,
         (int64_t batch, int64_t seq, int64_t seq_k, int64_t head_dim, int64_t element_bytes,
          int64_t matrices, bool causal, td_account_attention *out),
         (batch, seq, seq_k, head_dim, element_bytes, matrices, causal, out))
TD_FAULT(td_account_attention_oom,
         (int64_t batch, int64_t head_dim, int64_t element_bytes, int64_t memory_bytes, int64_t *out),
         (batch, head_dim, element_bytes, memory_bytes, out))
TD_FAULT(td_account_ddp_overhead,
         (double bytes, double bytes_per_second, double seconds_per_call, double buckets, double *seconds),
         (bytes, bytes_per_second, seconds_per_call, buckets, seconds))
TD_FAULT(td_account_ddp_optimum_find,
         (double bytes, double bytes_per_second, double seconds_per_call, td_account_ddp_optimum *out),
         (bytes, bytes_per_second, seconds_per_call, out))
TD_FAULT(td_account_xxl_memory_of, (const td_account_xxl *model, td_account_xxl_memory *out), (model, out))
TD_FAULT(td_account_xxl_fsdp_bytes,
         (const td_account_xxl *model, int64_t tokens, int64_t devices, double *out),
         (model, tokens, devices, out))
TD_FAULT(td_account_xxl_devices, (const td_account_xxl *model, double device_bytes, int64_t *out),
         (model, device_bytes, out))
TD_FAULT(td_account_mesh_batch_of,
         (const td_account_xxl *model, const td_account_mesh *mesh, td_account_mesh_batch *out),
         (model, mesh, out))
TD_FAULT(td_account_parallel_times_of,
         (td_account_strategy strategy, const td_account_parallel *parallel, td_account_parallel_times *out),
         (strategy, parallel, out))
TD_FAULT(td_account_fsdp_tensor_devices,
         (const td_account_parallel *parallel, double *overlapped, double *shared_wire),
         (parallel, overlapped, shared_wire))
TD_FAULT(td_account_ring_all_reduce,
         (double bytes, int64_t ranks, double bytes_per_second, double *ring, double *alternate),
         (bytes, ranks, bytes_per_second, ring, alternate))
TD_FAULT(td_gemm_cost, (int64_t batch, int64_t m, int64_t n, int64_t k, td_dtype dtype, td_cost *out),
         (batch, m, n, k, dtype, out))
TD_FAULT(td_flash_cost,
         (int64_t batch, int64_t heads, int64_t seq, int64_t seq_k, int64_t head_dim, td_dtype dtype,
          bool causal, bool backward, td_cost *out),
         (batch, heads, seq, seq_k, head_dim, dtype, causal, backward, out))
TD_FAULT(td_adamw_cost, (int64_t count, td_dtype dtype, td_cost *out), (count, dtype, out))
TD_FAULT(td_precision_sum, (const td_sum_case *sum_case, double *sum, int64_t *stalled),
         (sum_case, sum, stalled))
TD_FAULT(td_precision_handout_case, (int64_t index, td_sum_case *out), (index, out))
TD_FAULT(td_autocast_list_entry,
         (td_autocast_device device, int64_t index, const char **op, td_autocast_rule *rule),
         (device, index, op, rule))
TD_FAULT(td_autocast_toy_model,
         (td_autocast_device device, td_dtype low, const char *loss, td_toy_component components[8],
          int64_t *count),
         (device, low, loss, components, count))
TD_FAULT(td_stats_compute, (const double *samples, int64_t count, td_stats *out), (samples, count, out))
TD_FAULT(td_rng_normal, (const td_rng *rng, int64_t offset, int64_t count, float mean, float std, float *out),
         (rng, offset, count, mean, std, out))
TD_FAULT(td_record_create, (const char *deliverable, const char *module, const char *impl, td_record **out),
         (deliverable, module, impl, out))
TD_FAULT(td_record_set_string, (td_record * record, const char *path, const char *value),
         (record, path, value))
TD_FAULT(td_record_set_number, (td_record * record, const char *path, double value), (record, path, value))
TD_FAULT(td_record_set_integer, (td_record * record, const char *path, int64_t value), (record, path, value))
TD_FAULT(td_record_set_bool, (td_record * record, const char *path, bool value), (record, path, value))
TD_FAULT(td_record_set_stats, (td_record * record, const char *path, const td_stats *stats),
         (record, path, stats))
TD_FAULT(td_record_set_samples, (td_record * record, const char *path, const double *samples, int64_t count),
         (record, path, samples, count))
TD_FAULT(td_record_text, (const td_record *record, char **out), (record, out))
TD_FAULT(td_record_append, (const td_record *record, const char *path), (record, path))
TD_FAULT(td_record_probe, (const char *path), (path))
TD_FAULT(td_device_open, (const char *name, td_device **out), (name, out))
TD_FAULT(td_device_alloc, (td_device * dev, size_t bytes, void **out), (dev, bytes, out))
TD_FAULT(td_device_upload, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_device_synchronize, (td_device * dev), (dev))
TD_FAULT(td_device_memory, (const td_device *dev, td_memory_stats *out), (dev, out))
TD_FAULT(td_device_reset_peak, (td_device * dev), (dev))
TD_FAULT(td_cpu_set_threads, (int threads), (threads))
TD_FAULT(td_device_download, (td_device * dev, void *dst, const void *src, size_t bytes),
         (dev, dst, src, bytes))
TD_FAULT(td_account_all_reduce_bandwidth,
         (double bytes, int64_t ranks, double seconds, double *algorithm, double *bus),
         (bytes, ranks, seconds, algorithm, bus))
TD_FAULT(td_comm_open, (td_device * dev, const td_comm_options *options, td_comm **out), (dev, options, out))
TD_FAULT(td_comm_describe, (const td_comm *comm, td_comm_info *out), (comm, out))
TD_FAULT(td_comm_barrier, (td_comm * comm), (comm))
TD_FAULT(td_comm_exchange, (td_comm * comm, const void *mine, size_t bytes, void *all),
         (comm, mine, bytes, all))
TD_FAULT(td_comm_all_reduce,
         (td_comm * comm, const void *in, void *out, int64_t count, td_comm_type type, td_reduction reduction,
          td_work **work),
         (comm, in, out, count, type, reduction, work))
TD_FAULT(td_work_wait, (td_work * work), (work))
TD_FAULT(td_train_plan, (td_device * dev, const td_train_config *config, td_train_bytes *out),
         (dev, config, out))
TD_FAULT(td_bench_run,
         (td_device * dev, const td_bench_config *config, td_bench_progress progress, void *user,
          td_bench_result **out),
         (dev, config, progress, user, out))
TD_FAULT(td_account_block_activations,
         (const td_account_model *model, int64_t batch, int64_t context, int64_t element_bytes,
          int64_t stream_bytes, bool flash, td_account_block *out),
         (model, batch, context, element_bytes, stream_bytes, flash, out))
TD_FAULT(td_memory_record, (td_device * dev, const td_memory_config *config, td_memory_recording **out),
         (dev, config, out))
TD_FAULT(td_memory_summary_of, (const td_memory_recording *recording, td_memory_summary *out),
         (recording, out))
TD_FAULT(td_memory_largest,
         (const td_memory_recording *recording, td_memory_phase phase, int64_t capacity,
          td_memory_tensor *largest, int64_t *count),
         (recording, phase, capacity, largest, count))
TD_FAULT(td_memory_block_of, (const td_memory_recording *recording, int64_t layer, td_memory_block *out),
         (recording, layer, out))
TD_FAULT(td_memory_write_snapshot, (const td_memory_recording *recording, const char *path),
         (recording, path))
TD_FAULT(td_memory_write_events, (const td_memory_recording *recording, const char *path), (recording, path))
TD_FAULT(td_memory_write_timeline, (const td_memory_recording *recording, const char *path),
         (recording, path))
TD_FAULT(td_trace_begin, (td_device * dev, td_trace **out), (dev, out))
TD_FAULT(td_trace_end, (td_trace * trace), (trace))
TD_FAULT(td_trace_info_of, (const td_trace *trace, td_trace_info *out), (trace, out))
TD_FAULT(td_trace_total_of, (const td_trace *trace, unsigned phases, td_trace_total *out),
         (trace, phases, out))
TD_FAULT(td_trace_kernels,
         (const td_trace *trace, unsigned phases, int64_t capacity, td_trace_kernel *rows, int64_t *count),
         (trace, phases, capacity, rows, count))
TD_FAULT(td_trace_labels, (const td_trace *trace, int64_t capacity, td_trace_label *rows, int64_t *count),
         (trace, capacity, rows, count))
TD_FAULT(td_trace_attention_of, (const td_trace *trace, td_trace_attention *out), (trace, out))
TD_FAULT(td_trace_write_json, (const td_trace *trace, const char *path), (trace, path))
TD_FAULT(td_trace_write_timeline, (const td_trace *trace, const char *path), (trace, path))
TD_FAULT(td_bench_summary_of, (const td_bench_result *result, td_bench_summary *out), (result, out))

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t size);
void *__wrap_realloc(void *block, size_t size);
char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text);
int __real_vasprintf(char **out, const char *format, va_list args);
int __wrap_vasprintf(char **out, const char *format, va_list args);

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

static char json[] = "/tmp/tandem_cli_faults_XXXXXX", other[] = "/tmp/tandem_cli_other_XXXXXX";
static char others[3][64];

typedef struct command {
    const char *name;
    td_status (*run)(int argc, char **argv);
    const char
        *words[MOST_WORDS]; /* NULL ends them; "FILE" is one for records, "OTHER1" to "OTHER3" others */
    bool goes_on;           /* without memory for one length or some ranges, which is a result of its own */
} command;

static const command commands[] = {
    {"account", td_command_account, {"tandem account"}, false},
    {"account with records",
     td_command_account,
     {"tandem account", "flops", "training", "--json", "FILE"},
     false},
    {"precision", td_command_precision, {"tandem precision"}, false},
    {"precision with records", td_command_precision, {"tandem precision", "--json", "FILE"}, false},
    {"autocast to standard output",
     td_command_precision,
     {"tandem precision", "--ops", "--json", "-"},
     false},
    {"sizes", td_command_sizes, {"tandem sizes"}, false},
    {"sizes with records", td_command_sizes, {"tandem sizes", "--json", "FILE"}, false},
    {"attention",
     td_command_attention,
     {"tandem attention", "--seq", "3,5", "--head-dim", "4", "--warmup", "1", "--iters", "2", "--threads",
      "1", "--json", "FILE"},
     true},
    {"flash to standard output",
     td_command_flash,
     {"tandem flash", "--seq", "3", "--head-dim", "4", "--dtype", "bf16", "--causal", "--warmup", "0",
      "--iters", "2", "--json", "-"},
     true},
    {"bench",
     td_command_bench,
     {"tandem bench",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--warmup",
      "1",
      "--steps",
      "2",
      "--json",
      "FILE"},
     false},
#ifdef TANDEM_HAVE_GLOO
    {"allreduce",
     td_command_allreduce,
     {"tandem allreduce", "--backend", "gloo", "--bytes", "40,8", "--warmup", "1", "--iters", "2",
      "--out-of-place", "--json", "FILE"},
     false},
#endif
    {"bench forward",
     td_command_bench,
     {"tandem bench",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--warmup",
      "0",
      "--steps",
      "1",
      "--mode",
      "forward"},
     false},
    {"memory",
     td_command_memory,
     {"tandem memory",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--attention",
      "naive",
      "--json",
      "FILE",
      "--snapshot",
      "OTHER1",
      "--events",
      "OTHER2",
      "--timeline",
      "OTHER3"},
     false},
    {"memory of checkpoints",
     td_command_memory,
     {"tandem memory",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "2",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--keep",
      "inputs",
      "--update",
      "after",
      "--gradients",
      "held",
      "--json",
      "-"},
     false},
    {"trace",
     td_command_trace,
     {"tandem trace",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--attention",
      "naive",
      "--warmup",
      "0",
      "--steps",
      "1",
      "--top",
      "2",
      "--json",
      "FILE",
      "--trace",
      "OTHER1",
      "--timeline",
      "OTHER2"},
     true},
    {"trace of micro-batches, whole",
     td_command_trace,
     {"tandem trace",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--warmup",
      "1",
      "--steps",
      "1",
      "--timed",
      "whole",
      "--micro-batches",
      "2",
      "--json",
      "FILE"},
     true},
    {"trace of inference",
     td_command_trace,
     {"tandem trace",
      "--d-model",
      "4",
      "--d-ff",
      "3",
      "--layers",
      "1",
      "--heads",
      "2",
      "--vocab",
      "5",
      "--batch",
      "1",
      "--context",
      "3",
      "--mode",
      "forward",
      "--warmup",
      "0",
      "--steps",
      "1"},
     true},
    {"memory of inference",
     td_command_memory,
     {"tandem memory", "--d-model", "4", "--d-ff", "3", "--layers", "1", "--heads", "2", "--vocab", "5",
      "--batch", "1", "--context", "3", "--pass", "inference", "--top", "2"},
     false},
};

/* Runs it with what it prints thrown away. */
static td_status run_quietly(const command *c)
{
    static const int outputs[] = {STDOUT_FILENO, STDERR_FILENO};
    char *argv[MOST_WORDS + 1] = {0};
    int argc = 0, kept[2], nothing = open("/dev/null", O_WRONLY);

    assert_true(nothing >= 0);
    for (; argc < MOST_WORDS && c->words[argc]; argc++)
        argv[argc] = strcmp(c->words[argc], "FILE") == 0        ? json
                     : strncmp(c->words[argc], "OTHER", 5) == 0 ? others[c->words[argc][5] - '1']
                                                                : (char *)c->words[argc];
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

/* A machine of two. */
td_status __wrap_td_device_count(td_device_kind kind, int *out);
td_status __wrap_td_device_count(td_device_kind kind, int *out)
{
    (void)kind;
    *out = 2;
    return TD_OK;
}

static void each_rank_needs_a_gpu(void **state)
{
    static const struct {
        const char *rank, *ranks, *local_rank, *local_ranks, *words;
    } cases[] = {{"0", "4", "0", "4", "rank 0 of 4: 4 ranks on this host, which has 2 GPUs: each needs one"},
                 {"3", "4", "2", NULL, "rank 3 of 4: 3 ranks on this host, which has 2 GPUs"},
                 {"1", "4", NULL, "2", "the launcher does not say which rank of its host it is"},
                 {"x", "4", NULL, NULL, "RANK is 'x', needs a whole number"},
                 {"0", "1", "x", NULL, "LOCAL_RANK is 'x', needs a whole number"},
                 {"0", "1", "0", "x", "LOCAL_WORLD_SIZE is 'x', needs a whole number"},
                 {"0", "x", "0", "1", "WORLD_SIZE is 'x', needs a whole number"}};
    const command c = {"allreduce", td_command_allreduce, {"tandem allreduce", "--device", "cuda"}, false};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
        const char *const values[] = {cases[i].rank, cases[i].ranks, cases[i].local_rank,
                                      cases[i].local_ranks};

        for (int j = 0; j < 4; j++)
            if (values[j])
                setenv(names[j], values[j], 1);
        const td_status status = run_quietly(&c);
        for (int j = 0; j < 4; j++)
            unsetenv(names[j]);
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

/* Trees as the kernel shows them. */
static void control_groups_lower_the_limit(void **state)
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

    (void)state;
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
    const int file = mkstemp(json), second = mkstemp(other);

    if (file < 0 || second < 0)
        return 1;
    close(file);
    close(second);
    for (int i = 0; i < 3; i++)
        snprintf(others[i], sizeof others[i], "%s%d", other, i + 1);
    for (int i = 0; i < COMMANDS; i++)
        tests[i + 2] = (struct CMUnitTest){.name = commands[i].name,
                                           .test_func = every_fault_comes_back_as_a_status,
                                           .initial_state = (void *)&commands[i]};
    const int failed = cmocka_run_group_tests_name("faults of the commands", tests, NULL, NULL);
    unlink(json);
    unlink(other);
    for (int i = 0; i < 3; i++)
        unlink(others[i]);
    return failed;
}
