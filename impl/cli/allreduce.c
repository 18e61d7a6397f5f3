#include "accounting/accounting.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/names.h"
#include "base/rng.h"
#include "base/stats.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/ranks.h"
#include "comm/flight.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SIZES = 32, MOST_ITERS = 4096, MIB = 1 << 20 };

enum {
    KEY_MIB = TD_OPTION_KEY,
    KEY_BYTES,
    KEY_DTYPE,
    KEY_REDUCTION,
    KEY_OUT_OF_PLACE,
    KEY_WARMUP,
    KEY_ITERS
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "The problem:", 1},
    {"mib", KEY_MIB, "N,N,...", 0, "sizes of each rank's buffer in MiB (1,10,100,1024)", 1},
    {"bytes", KEY_BYTES, "N,N,...", 0, "sizes of each rank's buffer in bytes, in place of --mib", 1},
    {"dtype", KEY_DTYPE, "NAME", 0, "f32 (the default), f64, f16, bf16 or i64", 1},
    {"reduction", KEY_REDUCTION, "NAME", 0, "sum (the default), average or max", 1},
    {"out-of-place", KEY_OUT_OF_PLACE, 0, 0, "reduce from one buffer to another (default: in place)", 1},
    {0, 0, 0, 0, "The measurement:", 2},
    {"warmup", KEY_WARMUP, "N", 0, "untimed calls of each size (5)", 2},
    {"iters", KEY_ITERS, "N", 0, "timed calls of each size (20; from 512 MiB on 5)", 2},
    {0}};

typedef struct arguments {
    td_common common;
    td_ranks_options ranks;
    bool out_of_place;
    td_comm_type type;
    td_reduction reduction;
    int64_t sizes[MOST_SIZES]; /* bytes */
    int size_count;
    int64_t warmup, iters; /* iters 0: the default for the size */
} arguments;

static const char *const reductions[] = {"sum", "average", "max"};

static void take_sizes(const struct argp_state *state, const char *option, const char *arg, int64_t unit,
                       arguments *args)
{
    args->size_count = td_option_list(state, option, arg, (INT64_C(1) << 40) / unit, args->sizes, MOST_SIZES);
    for (int i = 0; i < args->size_count; i++)
        args->sizes[i] *= unit;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    static const char *const types[] = {"f64", "f32", "f16", "bf16", "i64"};
    arguments *args = state->input;
    int value = 0;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->ranks;
        state->child_inputs[1] = &args->common;
        return 0;
    case KEY_MIB:
        take_sizes(state, "mib", arg, MIB, args);
        return 0;
    case KEY_BYTES:
        take_sizes(state, "bytes", arg, 1, args);
        return 0;
    case KEY_DTYPE:
        if (td_names_find("dtype", types, sizeof *types, 5, arg, &value) != TD_OK)
            argp_error(state, "--dtype: '%s' needs to be f32, f64, f16, bf16 or i64", arg);
        args->type = (td_comm_type)value;
        return 0;
    case KEY_REDUCTION:
        if (td_names_find("reduction", reductions, sizeof *reductions, 3, arg, &value) != TD_OK)
            argp_error(state, "--reduction: '%s' needs to be sum, average or max", arg);
        args->reduction = (td_reduction)value;
        return 0;
    case KEY_OUT_OF_PLACE:
        args->out_of_place = true;
        return 0;
    case KEY_WARMUP:
        args->warmup = td_option_integer(state, "warmup", arg, 0, MOST_ITERS);
        return 0;
    case KEY_ITERS:
        args->iters = td_option_integer(state, "iters", arg, 1, MOST_ITERS);
        return 0;
    case ARGP_KEY_SUCCESS:
        for (int i = 0; i < args->size_count; i++)
            if (args->sizes[i] % (int64_t)td_comm_type_size(args->type) != 0)
                argp_error(state, "--bytes: '%" PRId64 "' needs to be whole elements of %s", args->sizes[i],
                           td_comm_type_name(args->type));
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/* ---- one size ---- */

typedef struct problem {
    const arguments *args;
    td_device *dev;
    td_comm *comm;
    td_comm_info info;
    int64_t bytes, count, iters;
    void *in, *out; /* the same in place */
} problem;

/** The results of one size, the same on every rank. */
typedef struct result {
    double throughput_ms;  /* mean over the ranks of the time of a call, if calls are back to back */
    double *samples;       /* [iters] ms of a single call on the slowest rank */
    td_stats ms;           /* over samples */
    double algorithm, bus; /* bytes/s */
    int64_t wrong;         /* number of wrong elements on all ranks */
} result;

enum { CHUNK = 1 << 18 }; /* elements that are made or checked at a time */

/** A small integer for element i of a rank. Any type holds the sum over many ranks exactly. */
static double value_of(int64_t i, int rank)
{
    return (double)(i % 5 + rank % 4);
}

static double expected(const problem *p, int64_t i)
{
    double sum = 0, most = 0;

    for (int rank = 0; rank < p->info.ranks; rank++) {
        const double value = value_of(i, rank);

        sum += value;
        most = value > most ? value : most;
    }
    return p->args->reduction == TD_MAX ? most : sum;
}

/** Writes a number as an element; load reads it back. */
static void store(td_comm_type type, double number, void *out)
{
    const int64_t integer = (int64_t)number;

    if (type == TD_COMM_I64)
        memcpy(out, &integer, sizeof integer);
    else
        (void)td_convert(1, TD_F64, &number, (td_dtype)type, out);
}

static double load(td_comm_type type, const void *in)
{
    double number = 0;
    int64_t integer;

    if (type != TD_COMM_I64) {
        (void)td_convert(1, (td_dtype)type, in, TD_F64, &number);
        return number;
    }
    memcpy(&integer, in, sizeof integer);
    return (double)integer;
}

static td_status call(const problem *p, td_work **work)
{
    return td_comm_all_reduce(p->comm, p->in, p->out, p->count, p->args->type, p->args->reduction, work);
}

/** Runs the collective once on known numbers, which repeat after 5 elements, and counts wrong elements. */
static td_status verify(const problem *p, result *r)
{
    td_status status = TD_OK;
    const size_t size = td_comm_type_size(p->args->type), capacity = CHUNK / 5 * 5;
    unsigned char *chunk = malloc(capacity * size), want[5][8];
    int64_t wrong = 0, *all = calloc((size_t)p->info.ranks, sizeof *all);

    TD_FAIL_IF(!chunk || !all, TD_NO_MEMORY, "no memory to check %" PRId64 " elements", p->count);
    for (int64_t i = 0; i < (int64_t)capacity; i++)
        store(p->args->type, value_of(i, p->info.rank), chunk + (size_t)i * size);
    for (int64_t at = 0; at < p->count; at += (int64_t)capacity)
        TD_TRY(td_device_upload(
            p->dev, (char *)p->in + (size_t)at * size, chunk,
            (size_t)(p->count - at < (int64_t)capacity ? p->count - at : (int64_t)capacity) * size));
    TD_TRY(call(p, NULL));
    for (int i = 0; i < 5; i++) {
        double number = expected(p, i);

        if (p->args->reduction == TD_AVERAGE)
            number = p->args->type == TD_COMM_F64 ? number * (1.0 / p->info.ranks)
                                                  : (double)((float)number * (1.0f / (float)p->info.ranks));
        store(p->args->type, number, want[i]);
    }
    for (int64_t at = 0; at < p->count; at += (int64_t)capacity) {
        const int64_t here = p->count - at < (int64_t)capacity ? p->count - at : (int64_t)capacity;

        TD_TRY(td_device_download(p->dev, chunk, (char *)p->out + (size_t)at * size, (size_t)here * size));
        for (int64_t i = 0; i < here; i++)
            wrong += !(load(p->args->type, chunk + (size_t)i * size) == load(p->args->type, want[i % 5]));
    }
    TD_TRY(td_comm_exchange(p->comm, &wrong, sizeof wrong, all));
    r->wrong = 0;
    for (int rank = 0; rank < p->info.ranks; rank++)
        r->wrong += all[rank];
cleanup:
    free(chunk);
    free(all);
    return status;
}

/** Fills `in` with random numbers so small that repeated sums in place stay within f32's range. */
static td_status refill(const problem *p)
{
    td_status status = TD_OK;
    const size_t size = td_comm_type_size(p->args->type);
    const td_rng rng = {.seed = 1, .stream = (uint64_t)p->info.rank};
    const int64_t chunk = p->count < CHUNK ? p->count : CHUNK;
    float *numbers = malloc((size_t)chunk * sizeof *numbers);
    unsigned char *data = malloc((size_t)chunk * 8);

    TD_FAIL_IF(!numbers || !data, TD_NO_MEMORY, "no memory to draw %" PRId64 " elements", chunk);
    TD_TRY(td_rng_normal(&rng, 0, chunk, 0, 1e-12f, numbers));
    for (int64_t i = 0; i < chunk; i++)
        store(p->args->type, (double)numbers[i], data + (size_t)i * size);
    for (int64_t at = 0; at < p->count; at += chunk)
        TD_TRY(td_device_upload(p->dev, (char *)p->in + (size_t)at * size, data,
                                (size_t)(p->count - at < chunk ? p->count - at : chunk) * size));
cleanup:
    free(numbers);
    free(data);
    return status;
}

/** Times single calls, each from a barrier to its end on the host. */
static td_status time_calls(const problem *p, result *r)
{
    td_status status = TD_OK;
    double *all = malloc((size_t)(p->iters * p->info.ranks) * sizeof *all);

    TD_FAIL_IF(!all, TD_NO_MEMORY, "no memory for %" PRId64 " samples", p->iters * p->info.ranks);
    TD_TRY(refill(p));
    for (int64_t i = -p->args->warmup; i < p->iters; i++) {
        TD_TRY(td_comm_barrier(p->comm));
        const int64_t start = td_clock_ns();
        TD_TRY(call(p, NULL));
        if (i >= 0)
            r->samples[i] = (double)(td_clock_ns() - start) / 1e6;
        if (p->info.rank == 0)
            td_progress("%" PRId64 " bytes, call %" PRId64 " of %" PRId64, p->bytes, p->args->warmup + i + 1,
                        p->args->warmup + p->iters);
    }
    TD_TRY(td_comm_exchange(p->comm, r->samples, (size_t)p->iters * sizeof *r->samples, all));
    for (int64_t i = 0; i < p->iters; i++)
        for (int rank = 0; rank < p->info.ranks; rank++)
            r->samples[i] = fmax(r->samples[i], all[rank * p->iters + i]);
    TD_TRY(td_stats_compute(r->samples, p->iters, &r->ms));
cleanup:
    td_progress_end();
    free(all);
    return status;
}

/** Times all calls back to back, as nccl-tests does: total time / number of calls, mean over the ranks. */
static td_status time_throughput(const problem *p, result *r)
{
    td_status status = TD_OK;
    td_flight flight = {.dev = p->dev, .host = true};
    td_work **work;
    double mine, *all = calloc((size_t)p->info.ranks, sizeof *all);
    int64_t start = 0;

    TD_FAIL_IF(!all, TD_NO_MEMORY, "no memory for %d samples", (int)p->info.ranks);
    TD_TRY(refill(p));
    TD_TRY(td_comm_barrier(p->comm));
    start = td_clock_ns();
    for (int64_t i = 0; i < p->iters; i++) {
        TD_TRY(td_flight_slot(&flight, &work));
        TD_TRY(call(p, work));
        flight.sent++;
    }
    TD_TRY(td_flight_wait(&flight, flight.sent));
    mine = (double)(td_clock_ns() - start) / 1e6 / (double)p->iters;
    TD_TRY(td_comm_exchange(p->comm, &mine, sizeof mine, all));
    r->throughput_ms = 0;
    for (int rank = 0; rank < p->info.ranks; rank++)
        r->throughput_ms += all[rank] / p->info.ranks;
    TD_TRY(td_account_all_reduce_bandwidth((double)p->bytes, p->info.ranks, r->throughput_ms / 1e3,
                                           &r->algorithm, &r->bus));
cleanup:
    free(all);
    return status;
}

/* ---- results ---- */

/** Measures one size; rank 0 adds a row. */
static td_status measure(problem *p, td_table *table, int64_t *wrong)
{
    td_status status = TD_OK;
    result r = {0};
    char bytes[32], count[32], algorithm[32] = "n/a", bus[32] = "n/a";

    p->count = p->bytes / (int64_t)td_comm_type_size(p->args->type);
    p->iters = p->args->iters ? p->args->iters : p->bytes < INT64_C(512) * MIB ? 20 : 5;
    TD_TRY(td_common_fits(p->dev, (double)p->bytes * (p->args->out_of_place ? 2 : 1) * p->info.local_ranks));
    r.samples = calloc((size_t)p->iters, sizeof *r.samples);
    TD_FAIL_IF(!r.samples, TD_NO_MEMORY, "no memory for %" PRId64 " samples", p->iters);
    TD_TRY(td_device_alloc(p->dev, (size_t)p->bytes, &p->in));
    if (p->args->out_of_place)
        TD_TRY(td_device_alloc(p->dev, (size_t)p->bytes, &p->out));
    else
        p->out = p->in;
    TD_TRY(verify(p, &r));
    TD_TRY(time_calls(p, &r));
    TD_TRY(time_throughput(p, &r));
    *wrong += r.wrong;
    if (p->info.ranks > 1) {
        snprintf(algorithm, sizeof algorithm, "%.2f", r.algorithm / 1e9);
        snprintf(bus, sizeof bus, "%.2f", r.bus / 1e9);
    }
    if (p->info.rank == 0)
        td_table_row(table, "%s\t%s\t%s\t%s\t%.2f\t%s\t%s\t%" PRId64 "\t%.4f\t%.4f\t%.4f",
                     td_grouped(p->bytes, bytes), td_grouped(p->count, count),
                     td_comm_type_name(p->args->type), reductions[p->args->reduction], r.throughput_ms * 1e3,
                     algorithm, bus, r.wrong, r.ms.median, r.ms.min, r.ms.p95);
cleanup:
    /* After an error a library may still use the buffers. The device frees them when it is closed. */
    if (status == TD_OK && p->out != p->in)
        status = td_device_free(p->dev, p->out);
    if (status == TD_OK)
        status = td_device_free(p->dev, p->in);
    p->in = p->out = NULL;
    free(r.samples);
    return status;
}

static void print_head(const problem *p, FILE *out)
{
    char machine[160], ranks[160];

    td_ranks_text(&p->info, ranks, sizeof ranks);
    fprintf(out, "all_reduce of %s (%s), %s, among %s, %" PRId64 " warm-up calls; %s\n\n",
            td_comm_type_name(p->args->type), reductions[p->args->reduction],
            p->args->out_of_place ? "out of place" : "in place", ranks, p->args->warmup,
            td_machine_name(p->dev, machine));
}

td_status td_command_allreduce(int argc, char **argv)
{
    const struct argp_child children[] = {{&td_ranks_argp, 0, NULL, 3}, {&td_common_argp, 0, NULL, 4}, {0}};
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .doc =
                                  "Times all-reduce among ranks. Start the ranks with mpirun, srun, "
                                  "torchrun, or a loop that sets RANK and WORLD_SIZE.\v"
                                  "`time' is the mean over the ranks of the time of a call, if --iters calls "
                                  "are issued back to back. `algbw' = bytes / time and `busbw' = "
                                  "algbw 2 (N - 1) / N, in GB/s, are as in nccl-tests. `one call' is the "
                                  "time from a barrier to the end of a single call on the slowest rank. "
                                  "`#wrong' is the number of wrong elements on all ranks in a call on known "
                                  "numbers.\n\n"
                                  "Examples:\n"
                                  "  mpirun -n 4 tandem allreduce\n"
                                  "  mpirun -n 2 tandem allreduce --device cuda --json\n"
                                  "  tandem allreduce --mib 1 --iters 5\n"
                                  "  tandem allreduce --bytes 1000,4096 --dtype bf16 --reduction average",
                              .children = children};
    arguments args = {.common = {.device = "cpu"},
                      .type = TD_COMM_F32,
                      .sizes = {MIB, 10 * MIB, 100 * MIB, 1024 * MIB},
                      .size_count = 4,
                      .warmup = 5};
    td_status status = TD_OK;
    td_table table = {
        .align = "rrllrrrrrrr",
        .heads = "bytes\tcount\ttype\tredop\ttime (us)\talgbw (GB/s)\tbusbw (GB/s)\t#wrong\tone call, median "
                 "(ms)\tmin (ms)\tp95 (ms)",
        .common = &args.common};
    td_ranks ranks = {.dev = NULL};
    int64_t wrong = 0;

    argp_parse(&argp, argc, argv, 0, NULL, &args);
    TD_TRY(td_ranks_begin(argv[0], &args.ranks, &args.common, &ranks));
    problem p = {.args = &args, .dev = ranks.dev, .comm = ranks.comm, .info = ranks.info};
    FILE *out = td_common_tables(&args.common);
    for (int i = 0; i < args.size_count && status == TD_OK; i++) {
        p.bytes = args.sizes[i];
        status = measure(&p, &table, &wrong);
    }
    if (table.count > 0) { /* on rank 0, if at least one size was measured */
        print_head(&p, out);
        td_table_write(&table, out);
    }
    if (status == TD_OK && wrong > 0)
        status = td_fail(TD_LIBRARY_ERROR, "%" PRId64 " elements are wrong", wrong);
cleanup:
    return td_ranks_end(argv[0], &ranks, td_table_end(&table, status, NULL));
}
