/* `tandem attention` and `tandem flash`. */

#include "accounting/accounting.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/stats.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "flash/flash.h"

#include <stdio.h>
#include <stdlib.h>

/** The end of each doc, up to the lines of its examples. */
#define NOTES                                                                                                \
    "\vGFLOP/s counts 4 batch heads seq seq head_dim FLOPs for forward, half of them with --causal, and "    \
    "2.5 "                                                                                                   \
    "times that for backward, even if an implementation computes more. `saved' is the memory that forward "  \
    "keeps for backward, without q, k, v and o. The row of a length that does not fit into memory says oom." \
    "\n\nExamples:\n"

enum { MOST_LENGTHS = 64 };

enum {
    KEY_BATCH = TD_OPTION_KEY,
    KEY_HEADS,
    KEY_SEQ,
    KEY_HEAD_DIM,
    KEY_DTYPE,
    KEY_CAUSAL,
    KEY_WARMUP,
    KEY_ITERS
};

static const struct argp_option options[] = {
    {0, 0, 0, 0, "The problem:", 1},
    {"batch", KEY_BATCH, "N", 0, "sequences (1)", 1},
    {"heads", KEY_HEADS, "N", 0, "heads (1)", 1},
    {"seq", KEY_SEQ, "N,N,...", 0, "numbers of queries, and of as many keys, measured in turn (1024)", 1},
    {"head-dim", KEY_HEAD_DIM, "N", 0, "elements of a head (64)", 1},
    {"dtype", KEY_DTYPE, "NAME", 0,
     "f32 (the default) or bf16; on cuda also f16, and tf32: GEMMs round their f32 inputs to TF32", 1},
    {"causal", KEY_CAUSAL, 0, 0, "query i sees only keys 0 to i", 1},
    {0, 0, 0, 0, "The measurement:", 2},
    {"warmup", KEY_WARMUP, "N", 0, "untimed calls of each pass (5)", 2},
    {"iters", KEY_ITERS, "N", 0, "timed calls of each pass (20)", 2},
    {0}};

typedef struct arguments {
    td_common common;
    td_attention_shape shape; /* seq: the current length */
    int64_t lengths[MOST_LENGTHS];
    int length_count;
    int64_t warmup, iters;
} arguments;

static void take_dtype(const struct argp_state *state, const char *text, td_attention_shape *shape)
{
    td_precision precision;

    if (td_precision_parse(text, &precision) != TD_OK || precision == TD_PRECISION_BF16_MIXED)
        argp_error(state, "--dtype: '%s' needs to be f32, tf32, bf16 or f16", text);
    shape->dtype = td_precision_dtype(precision);
    shape->tf32 = precision == TD_PRECISION_TF32;
}

static const char *dtype_name(const td_attention_shape *shape)
{
    return shape->tf32 ? td_precision_name(TD_PRECISION_TF32) : td_dtype_name(shape->dtype);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->common;
        return 0;
    case KEY_BATCH:
        args->shape.batch = td_option_integer(state, "batch", arg, 1, INT32_MAX);
        return 0;
    case KEY_HEADS:
        args->shape.heads = td_option_integer(state, "heads", arg, 1, INT32_MAX);
        return 0;
    case KEY_SEQ:
        args->length_count = td_option_list(state, "seq", arg, INT32_MAX, args->lengths, MOST_LENGTHS);
        return 0;
    case KEY_HEAD_DIM:
        args->shape.head_dim = td_option_integer(state, "head-dim", arg, 1, INT32_MAX);
        return 0;
    case KEY_DTYPE:
        take_dtype(state, arg, &args->shape);
        return 0;
    case KEY_CAUSAL:
        args->shape.causal = true;
        return 0;
    case KEY_WARMUP:
        args->warmup = td_option_integer(state, "warmup", arg, 0, INT32_MAX);
        return 0;
    case KEY_ITERS:
        args->iters = td_option_integer(state, "iters", arg, 1, INT32_MAX);
        return 0;
    default:
        return td_option_other(state, key, arg);
    }
}

/* ---- one length ---- */

enum { Q, K, V, O, DOUT, DQ, DK, DV, TENSORS };

typedef struct problem {
    td_device *dev;
    const td_attention_impl *impl;
    td_attention_shape shape;
    td_attention_sizes sizes;
    void *tensors[TENSORS];
    void *saved, *work;
} problem;

static void problem_deinit(problem *p)
{
    for (int i = 0; i < TENSORS; i++)
        td_device_free(p->dev, p->tensors[i]);
    td_device_free(p->dev, p->saved);
    td_device_free(p->dev, p->work);
}

static td_status draw(problem *p, int tensor, int64_t count)
{
    td_status status = TD_OK;
    const td_rng rng = {.seed = 0, .stream = (uint64_t)tensor};
    size_t size = td_dtype_size(p->shape.dtype);
    float *normal = malloc((size_t)count * sizeof *normal);
    void *narrow = malloc((size_t)count * size);

    TD_FAIL_IF(!normal || !narrow, TD_NO_MEMORY, "no memory to draw %" PRId64 " numbers", count);
    TD_TRY(td_rng_normal(&rng, 0, count, 0.0f, 1.0f, normal));
    TD_TRY(td_convert(count, TD_F32, normal, p->shape.dtype, narrow));
    TD_TRY(td_device_upload(p->dev, p->tensors[tensor], narrow, (size_t)count * size));
cleanup:
    free(normal);
    free(narrow);
    return status;
}

/** Allocates and draws everything. */
static td_status problem_init(problem *p)
{
    td_status status = TD_OK;
    int64_t count = 0;

    TD_TRY(td_product("elements of q", 4,
                      (const int64_t[]){p->shape.batch, p->shape.heads, p->shape.seq, p->shape.head_dim},
                      &count));
    TD_TRY(p->impl->sizes(p->dev, &p->shape, &p->sizes));
    size_t bytes = (size_t)count * td_dtype_size(p->shape.dtype);
    size_t work =
        p->sizes.forward_work > p->sizes.backward_work ? p->sizes.forward_work : p->sizes.backward_work;
    TD_TRY(td_common_fits(p->dev, TENSORS * (double)bytes + (double)p->sizes.saved + (double)work));
    for (int i = 0; i < TENSORS; i++)
        TD_TRY(td_device_alloc(p->dev, bytes, &p->tensors[i]));
    TD_TRY(td_device_alloc(p->dev, p->sizes.saved, &p->saved));
    TD_TRY(td_device_alloc(p->dev, work, &p->work));
    TD_TRY(draw(p, Q, count));
    TD_TRY(draw(p, K, count));
    TD_TRY(draw(p, V, count));
    TD_TRY(draw(p, DOUT, count));
cleanup:
    return status;
}

static td_status run_pass(const problem *p, bool backward)
{
    void *const *t = p->tensors;

    return backward ? p->impl->backward(p->dev, &p->shape, t[Q], t[K], t[V], t[O], t[DOUT], p->saved, t[DQ],
                                        t[DK], t[DV], p->work)
                    : p->impl->forward(p->dev, &p->shape, t[Q], t[K], t[V], t[O], p->saved, p->work);
}

static td_status time_pass(const problem *p, bool backward, int64_t warmup, int64_t iters, double *samples)
{
    td_status status = TD_OK;

    for (int64_t i = -warmup; i < iters; i++) {
        int64_t start = td_clock_ns();
        TD_TRY(run_pass(p, backward));
        TD_TRY(td_device_synchronize(p->dev));
        double ms = (double)(td_clock_ns() - start) / 1e6;
        if (i >= 0)
            samples[i] = ms;
        td_progress("seq %" PRId64 ", %s %" PRId64 " of %" PRId64 ": %.2f ms", p->shape.seq,
                    backward ? "backward" : "forward", warmup + i + 1, warmup + iters, ms);
    }
cleanup:
    td_progress_end();
    return status;
}

/* ---- results ---- */

/** One measured pass. samples is NULL if the pass did not fit into memory. */
typedef struct result {
    bool backward;
    const double *samples;
    td_stats ms;
    double gflops, saved_mib, peak_mib;
} result;

static void add_row(td_table *table, int64_t seq, const result *r)
{
    const char *pass = r->backward ? "backward" : "forward";

    if (!r->samples)
        td_table_row(table, "%" PRId64 "\t%s\toom", seq, pass);
    else
        td_table_row(table, "%" PRId64 "\t%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.1f\t%.3f\t%.2f", seq, pass,
                     r->ms.mean, r->ms.std, r->ms.median, r->ms.min, r->gflops, r->saved_mib, r->peak_mib);
}

/** Times both passes of args->shape into samples [2 iters] and results. */
static td_status measure(const td_attention_impl *impl, const arguments *args, td_device *dev,
                         double *samples, result results[2])
{
    td_status status = TD_OK;
    problem p = {.dev = dev, .impl = impl, .shape = args->shape};
    const td_attention_shape *shape = &args->shape;
    td_memory_stats memory;
    td_cost cost;

    TD_TRY(td_device_reset_peak(dev));
    TD_TRY(problem_init(&p));
    TD_TRY(td_device_memory(dev, &memory));
    for (int i = 0; i < 2; i++) {
        result *r = &results[i];
        TD_TRY(time_pass(&p, r->backward, args->warmup, args->iters, &samples[i * args->iters]));
        TD_TRY(td_stats_compute(&samples[i * args->iters], args->iters, &r->ms));
        TD_TRY(td_flash_cost(shape->batch, shape->heads, shape->seq, shape->seq, shape->head_dim,
                             shape->dtype, shape->causal, r->backward, &cost));
        r->gflops = cost.flops / (r->ms.median / 1e3) / 1e9;
        r->saved_mib = (double)p.sizes.saved / 1048576.0;
        r->peak_mib = (double)memory.peak_bytes / 1048576.0;
    }
    for (int i = 0; i < 2; i++) /* both or none */
        results[i].samples = &samples[i * args->iters];
cleanup:
    problem_deinit(&p);
    return status;
}

/** Fills the table length by length. Rows stay in it if a later length fails. */
static td_status measure_lengths(const td_attention_impl *impl, arguments *args, td_device *dev,
                                 double *samples, td_table *table)
{
    td_status status = TD_OK;

    for (int i = 0; i < args->length_count; i++) {
        result results[2] = {{.backward = false}, {.backward = true}};
        args->shape.seq = args->lengths[i];
        status = measure(impl, args, dev, samples, results);
        if (status != TD_OK && status != TD_NO_MEMORY) /* no memory is a result: the table says oom */
            goto cleanup;
        status = TD_OK;
        for (int j = 0; j < 2; j++)
            add_row(table, args->shape.seq, &results[j]);
    }
cleanup:
    return status;
}

static void print_head(const td_attention_impl *impl, const arguments *args, td_device *dev, FILE *out)
{
    char machine[160];

    fprintf(out,
            "%s attention: batch %" PRId64 ", heads %" PRId64 ", head_dim %" PRId64 ", %s%s, %" PRId64
            " warm-up and %" PRId64 " timed calls on %s: %s",
            impl->name, args->shape.batch, args->shape.heads, args->shape.head_dim, dtype_name(&args->shape),
            args->shape.causal ? ", causal" : "", args->warmup, args->iters, td_device_name(dev),
            td_machine_name(dev, machine));
    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        fprintf(out, "; %d used", td_cpu_threads());
    fprintf(out, "\n\n");
}

/** Times forward and backward for every length of --seq, and prints a row for each pass. If a length does not
 * fit into memory its rows say "oom", and the next length follows. */
static td_status run(const td_attention_impl *impl, const char *doc, int argc, char **argv)
{
    const struct argp_child children[] = {{&td_common_argp, 0, NULL, 3}, {0}};
    const struct argp argp = {.options = options, .parser = parse, .doc = doc, .children = children};
    arguments args = {.common = {.device = "cpu"},
                      .shape = {.batch = 1, .heads = 1, .head_dim = 64, .dtype = TD_F32},
                      .lengths = {1024},
                      .length_count = 1,
                      .warmup = 5,
                      .iters = 20};
    td_status status = TD_OK;
    td_device *dev = NULL;
    td_table table = {.align = "rlrrrrrrr",
                      .heads = "seq\tpass\tmean ms\tstd ms\tmedian ms\tmin ms\tGFLOP/s\tsaved MiB\tpeak MiB",
                      .common = &args.common};
    double *samples = NULL;
    FILE *out;

    argp_parse(&argp, argc, argv, 0, NULL, &args);
    out = td_common_tables(&args.common);
    TD_TRY(td_common_begin(&args.common, &dev));
    samples = malloc(2 * (size_t)args.iters * sizeof *samples);
    TD_FAIL_IF(!samples, TD_NO_MEMORY, "no memory for %" PRId64 " samples", 2 * args.iters);
    status = measure_lengths(impl, &args, dev, samples, &table);
    if (table.count > 0)
        print_head(impl, &args, dev, out);
    td_table_write(&table, out);
cleanup:
    status = td_table_end(&table, status, NULL);
    free(samples);
    td_device_close(dev);
    return status;
}

td_status td_command_attention(int argc, char **argv)
{
    return run(&td_attention_naive,
               "Times attention with the score matrix in memory, on random queries, keys and values." NOTES
               "  tandem attention --batch 8 --seq 256,1024 --head-dim 32\n"
               "  tandem attention --seq 1024 --dtype bf16 --json",
               argc, argv);
}

td_status td_command_flash(int argc, char **argv)
{
    return run(&td_attention_flash,
               "Times FlashAttention-2, which never holds the score matrix, on random queries, keys and "
               "values." NOTES "  tandem flash --batch 8 --seq 512,1024,2048 --causal\n"
               "  tandem flash --device cuda --heads 16 --seq 16384 --dtype bf16 --causal",
               argc, argv);
}
