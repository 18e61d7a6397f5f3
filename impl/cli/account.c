#include "accounting/accounting.h"

#include "base/check.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "transformer/transformer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double mib = 1048576.0, gib = 1073741824.0;

/* Contexts of the handout's table of activations. */
static const int64_t contexts[] = {128, 256, 512};

/* ---- the model ---- */

static td_status add_parameters(td_table *table, const char *name, const td_account_model *model)
{
    td_status status = TD_OK;
    td_account_parameters p;
    char text[6][32];

    TD_TRY(td_account_model_parameters(model, &p));
    td_table_row(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%" PRId64 "\t%.2f", name,
                 td_grouped(p.embedding, text[0]), td_grouped(p.attention, text[1]),
                 td_grouped(p.ffn, text[2]), td_grouped(p.norms, text[3]), td_grouped(p.head, text[4]),
                 td_grouped(p.total, text[5]), p.tensors, (double)p.total * 4.0 / mib);
cleanup:
    return status;
}

static td_status add_flops(td_table *table, const char *name, const td_account_model *model)
{
    td_status status = TD_OK;
    td_account_flops f;

    TD_TRY(td_account_model_flops(model, 4, 512, false, false, &f));
    td_table_row(table, "%s\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%.3f\t%.5f", name, f.projections / 1e12,
                 f.attention_products / 1e12, f.ffn / 1e12, f.head / 1e12, f.forward_matmul / 1e12,
                 f.backward_matmul / 1e12, f.softmax / 1e12);
cleanup:
    return status;
}

/** The leaderboard of 2026: an 8B model on two GPUs; the best step took 3837 ms. */
static td_status add_mfu(td_table *table)
{
    static const td_account_model model = {4096, 11008, 34, 32, 151936};
    static const double peak = 2250e12, seconds = 3.837;
    td_status status = TD_OK;
    td_account_parameters p;
    td_account_flops f;
    td_account_activations a;
    double mfu = 0;
    char text[32];

    TD_TRY(td_account_model_parameters(&model, &p));
    TD_TRY(td_account_model_flops(&model, 2, 32768, true, true, &f));
    TD_TRY(td_account_model_activations(&model, 1, 32768, 2, &a));
    double step = f.forward_matmul + f.backward_matmul;
    TD_TRY(td_account_mfu(step / 2.0, seconds, peak, &mfu));
    td_table_row(table, "%s\t%.2f\t%.2f\t%.0f\t%.0f\t%.1f %%", td_grouped(p.total, text), step / 1e15,
                 (double)a.logits / gib, seconds * 1e3, step / 2.0 / seconds / 1e12, 100.0 * mfu);
cleanup:
    return status;
}

/* ---- memory ---- */

static td_status add_activations(td_table *table, const char *name, const td_account_model *model)
{
    td_status status = TD_OK;

    for (size_t j = 0; j < sizeof contexts / sizeof contexts[0]; j++) {
        td_account_activations a;
        TD_TRY(td_account_model_activations(model, 4, contexts[j], 4, &a));
        td_table_row(table, "%s\t%" PRId64 "\t%.2f\t%.2f\t%.2f\t%.2f", name, contexts[j],
                     (double)a.residual / mib, (double)a.scores / mib, (double)a.ffn / mib,
                     (double)a.logits / mib);
    }
cleanup:
    return status;
}

static td_status add_training(td_table *table, const char *name, const td_account_model *model)
{
    td_status status = TD_OK;
    td_account_parameters p;
    td_account_training t;
    int64_t copies = 0;

    TD_TRY(td_account_model_parameters(model, &p));
    TD_TRY(td_account_training_memory(p.total, 4, 4, 4, &t));
    TD_TRY(td_account_autocast_copies(model, 2, &copies));
    td_table_row(table, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f", name, (double)t.parameters / gib,
                 (double)t.gradients / gib, (double)t.optimizer_state / gib, (double)t.total / gib,
                 (double)copies / gib, ((double)t.parameters + (double)copies) / gib);
cleanup:
    return status;
}

static td_status add_fsdp(td_table *table, const char *name, const td_account_model *model)
{
    static const int64_t ranks[] = {2, 4, 8};
    td_status status = TD_OK;

    for (size_t j = 0; j < sizeof ranks / sizeof ranks[0]; j++) {
        td_account_fsdp f;
        TD_TRY(td_account_fsdp_memory(model, ranks[j], 4, 4, 4, &f));
        td_table_row(table, "%s\t%" PRId64 "\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f", name, ranks[j],
                     (double)f.rank.parameters / gib, (double)f.rank.gradients / gib, (double)f.shared / gib,
                     (double)f.rank.optimizer_state / gib, (double)f.rank.total / gib, (double)f.saved / gib,
                     4.0 * (double)f.block / mib);
    }
cleanup:
    return status;
}

static td_status add_checkpointing(td_table *table)
{
    static const int64_t blocks = 32, segments[] = {1, 2, 4, 8, 16, 32};
    /* boundary: one residual tensor of 4 x 2048 x 2560 f32. block: the handout's measurement of one block. */
    static const int64_t boundary = 80 << 20, block = INT64_C(3686) << 20;
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof segments / sizeof segments[0]; i++) {
        int64_t bytes = 0;
        TD_TRY(td_account_checkpointing(blocks, segments[i], boundary, block, &bytes));
        td_table_row(table, "%" PRId64 "\t%.2f", segments[i], (double)bytes / gib);
    }
cleanup:
    return status;
}

/* ---- attention ---- */

static td_status add_attention(td_table *table)
{
    static const int64_t lengths[] = {256, 1024, 4096, 8192, 16384};
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        td_account_attention course, fused;
        TD_TRY(td_account_attention_memory(8, lengths[i], lengths[i], 64, 4, 2, false, &course));
        TD_TRY(td_account_attention_memory(8, lengths[i], lengths[i], 64, 4, 1, false, &fused));
        td_table_row(table, "%" PRId64 "\t%.0f\t%.0f\t%.0f\t%.2f\t%.0f\t%.0f\t%.2f\t%.1f", lengths[i],
                     (double)course.matrix / mib, (double)course.saved_naive / mib,
                     (double)fused.saved_naive / mib, (double)course.saved_flash / mib,
                     (double)course.forward_peak / mib, (double)course.backward_peak / mib,
                     course.forward_flops / 1e9, course.forward_flops / course.softmax_flops);
    }
cleanup:
    return status;
}

static td_status add_attention_oom(td_table *table)
{
    static const int64_t memories[] = {16, 24, 40, 80, 141};
    static const int64_t element_bytes[] = {4, 2};
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof memories / sizeof memories[0]; i++) {
        int64_t seq[2];
        for (int j = 0; j < 2; j++)
            TD_TRY(td_account_attention_oom(8, 64, element_bytes[j], memories[i] << 30, &seq[j]));
        td_table_row(table, "%" PRId64 "\t%" PRId64 "\t%" PRId64, memories[i], seq[0], seq[1]);
    }
cleanup:
    return status;
}

/* ---- communication ---- */

static td_status add_ddp(td_table *table)
{
    static const struct {
        const char *name;
        double bytes_per_second, seconds_per_call;
    } links[] = {{"20 GB/s, 50 us a call", 20e9, 50e-6}, {"230 GB/s, 30 us a call", 230e9, 30e-6}};
    static const double buckets[] = {1, 8, 34, 89, 435};
    static const double bytes = 1998235200.0 * 4.0;
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++) {
        td_account_ddp_optimum best;
        for (size_t j = 0; j < sizeof buckets / sizeof buckets[0]; j++) {
            double seconds = 0;
            TD_TRY(td_account_ddp_overhead(bytes, links[i].bytes_per_second, links[i].seconds_per_call,
                                           buckets[j], &seconds));
            td_table_row(table, "%s\t%.0f\t%.1f\t%.2f", links[i].name, buckets[j], bytes / buckets[j] / 1e6,
                         seconds * 1e3);
        }
        TD_TRY(
            td_account_ddp_optimum_find(bytes, links[i].bytes_per_second, links[i].seconds_per_call, &best));
        td_table_row(table, "%s, optimum\t%.1f\t%.1f\t%.2f", links[i].name, best.buckets,
                     best.bucket_bytes / 1e6, best.seconds * 1e3);
    }
cleanup:
    return status;
}

static td_status add_ring(td_table *table)
{
    static const double sizes[] = {1, 10, 100, 1024};
    static const int64_t ranks[] = {2, 4, 6};
    td_status status = TD_OK;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t j = 0; j < sizeof ranks / sizeof ranks[0]; j++) {
            double ring = 0, alternate = 0;
            TD_TRY(td_account_ring_all_reduce(sizes[i] * mib, ranks[j], 180e9, &ring, &alternate));
            td_table_row(table, "%.0f\t%" PRId64 "\t%.4f\t%.4f", sizes[i], ranks[j], ring * 1e3,
                         alternate * 1e3);
        }
cleanup:
    return status;
}

static const td_account_xxl xxl = {.d_model = 16384, .d_ff = 53248, .blocks = 126};

static td_status add_xxl(td_table *table)
{
    td_status status = TD_OK;
    td_account_xxl_memory m;
    int64_t devices = 0;
    double with_activations = 0;
    char text[2][32];

    TD_TRY(td_account_xxl_memory_of(&xxl, &m));
    TD_TRY(td_account_xxl_devices(&xxl, 95e9, &devices));
    TD_TRY(td_account_xxl_fsdp_bytes(&xxl, 1024, devices, &with_activations));
    td_table_row(table, "parameters\t%s\t2 d d_ff blocks", td_grouped(m.parameters, text[0]));
    td_table_row(table, "state TB\t%.3f\t16 bytes a parameter: f32 weight, gradient, two moments",
                 (double)m.state_bytes / 1e12);
    td_table_row(table, "state GiB\t%.0f\t", (double)m.state_bytes / gib);
    td_table_row(table, "devices of 80 GB\t%.0f\tstate alone", ceil(m.devices_80gb));
    td_table_row(table, "devices of 80 GiB\t%.0f\tstate alone", ceil(m.devices_80gib));
    td_table_row(table, "saved bytes a token\t%s\tbf16 inputs of both linears of every block",
                 td_grouped(m.saved_bytes_per_token, text[1]));
    td_table_row(table, "FSDP devices of 95 GB\t%" PRId64 "\tsmallest N with 16 P / N <= 95 GB", devices);
    td_table_row(table, "GB a device\t%.1f\t(16 P + A / 2) / N + A / 2 for A of 1024 tokens and that N",
                 with_activations / 1e9);
cleanup:
    return status;
}

static td_status add_mesh(td_table *table)
{
    static const td_account_mesh mesh = {.flops_per_second = 4.6e14,
                                         .bytes_per_second = 1.8e11,
                                         .fsdp = 16,
                                         .tensor = 4,
                                         .fsdp_axes = 2,
                                         .tensor_axes = 1};
    td_status status = TD_OK;
    td_account_mesh_batch b;

    TD_TRY(td_account_mesh_batch_of(&xxl, &mesh, &b));
    td_table_row(table, "alpha\t%.1f\t\tC / W", b.alpha);
    td_table_row(table, "tokens that hide FSDP\t%.0f\t%.0f\tX alpha / M_X", b.fsdp_tokens,
                 b.fsdp_tokens_per_device);
    td_table_row(table, "d_ff that hides tensor parallelism\t%.0f\t\tY alpha / M_Y; %s", b.tensor_d_ff,
                 b.tensor_met ? "met" : "not met");
    td_table_row(table, "tokens, both on one wire\t%.0f\t%.0f\tX alpha / M_X / (1 - Y alpha / (M_Y d_ff))",
                 b.shared_wire_tokens, b.shared_wire_tokens_per_device);
    td_table_row(table, "tokens, best mesh of any shape\t\t%.1f\talpha^2 / (M_X M_Y d_ff)",
                 b.optimum_tokens_per_device);
cleanup:
    return status;
}

static td_status add_parallel(td_table *table)
{
    static const struct {
        const char *name;
        td_account_strategy strategy;
    } strategies[] = {{"data parallel", TD_ACCOUNT_DATA},
                      {"FSDP", TD_ACCOUNT_FSDP},
                      {"tensor parallel", TD_ACCOUNT_TENSOR}};
    static const td_account_parallel parallel = {.tokens = 1048576,
                                                 .d_model = 16384,
                                                 .d_ff = 53248,
                                                 .devices = 64,
                                                 .flops_per_second = 4.6e14,
                                                 .bytes_per_second = 1.8e11};
    td_status status = TD_OK;
    double overlapped = 0, shared = 0;

    for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
        td_account_parallel_times t;
        char forward[32] = "any";
        TD_TRY(td_account_parallel_times_of(strategies[i].strategy, &parallel, &t));
        if (isfinite(t.forward_devices))
            snprintf(forward, sizeof forward, "%.1f", t.forward_devices);
        td_table_row(table, "%s\t%.3f\t%.3f\t%s\t%.3f\t%.3f\t%.1f", strategies[i].name,
                     t.forward_compute * 1e3, t.forward_comm * 1e3, forward, t.backward_compute * 1e3,
                     t.backward_comm * 1e3, t.backward_devices);
    }
    TD_TRY(td_account_fsdp_tensor_devices(&parallel, &overlapped, &shared));
    td_table_row(table, "FSDP and tensor, overlapped\t\t\t%.0f", overlapped);
    td_table_row(table, "FSDP and tensor, one wire\t\t\t%.0f", shared);
cleanup:
    return status;
}

/* ---- operations ---- */

static void add_cost(td_table *table, const char *operation, td_dtype dtype, const td_cost *cost)
{
    td_table_row(table, "%s\t%s\t%.3f\t%.2f\t%.1f", operation, td_dtype_name(dtype), cost->flops / 1e9,
                 cost->bytes / mib, cost->flops / cost->bytes);
}

static td_status add_costs(td_table *table)
{
    static const td_dtype dtypes[] = {TD_F32, TD_BF16};
    td_status status = TD_OK;
    td_cost cost;

    for (int i = 0; i < 2; i++) {
        td_dtype dtype = dtypes[i];
        TD_TRY(td_gemm_cost(1, 512, 3072, 768, dtype, &cost));
        add_cost(table, "gemm, 512 x 3072 x 768", dtype, &cost);
        TD_TRY(td_flash_cost(1, 16, 16384, 16384, 64, dtype, true, false, &cost));
        add_cost(table, "flash forward, 16 heads, 16384, 64, causal", dtype, &cost);
        TD_TRY(td_flash_cost(1, 16, 16384, 16384, 64, dtype, true, true, &cost));
        add_cost(table, "flash backward, the same", dtype, &cost);
        TD_TRY(td_adamw_cost(128625408, dtype, &cost));
        add_cost(table, "AdamW, small", dtype, &cost);
    }
cleanup:
    return status;
}

/* ---- the command ---- */

static const struct listing {
    const char *section, *title, *align, *heads;
    const char *name; /* of the table */
    td_status (*add)(td_table *table);
    /* Instead: adds the rows of one size of the handout's table. */
    td_status (*add_size)(td_table *table, const char *name, const td_account_model *model);
} listings[] = {
    {"parameters",
     "Parameters by part: embedding and head V d each, attention 4 d^2 a layer, feed-forward 3 "
     "d d_ff a layer",
     "lrrrrrrrr", "size\tembedding\tattention\tfeed-forward\tnorms\thead\ttotal\ttensors\tf32 MiB",
     "parameters", .add_size = add_parameters},
    {"flops",
     "TFLOP of one pass, batch 4, context 512: a multiply-add is 2, backward is 2x forward; the "
     "masked half of attention is counted",
     "lrrrrrrr", "size\tprojections\tQK^T and PV\tfeed-forward\thead\tforward\tbackward\tsoftmax", "flops",
     .add_size = add_flops},
    {"flops",
     "Model FLOPs utilisation: the leaderboard of 2026, d 4096, d_ff 11008, 34 layers, 32 "
     "heads, vocabulary 151,936, batch 2, context 32768, causal flash attention",
     "rrrrrr",
     "parameters\tPFLOP a step\tbf16 logits GiB a sequence\tstep ms\tTFLOP/s a GPU, of two\tof "
     "a peak of 2250 TFLOP/s",
     "mfu", .add = add_mfu},
    {"activations",
     "Activations in MiB, f32, batch 4: one residual tensor B S d, one layer's scores B H S^2, "
     "one feed-forward hidden B S d_ff, logits B S V",
     "lrrrrr", "size\tcontext\tresidual MiB\tscores MiB\tfeed-forward MiB\tlogits MiB", "activations",
     .add_size = add_activations},
    {"training",
     "Memory in GiB without activations, f32 and AdamW: 16 bytes a parameter; copies are what "
     "bf16 autocast keeps of every linear's weight",
     "lrrrrrr",
     "size\tparameters GiB\tgradients GiB\tAdamW state GiB\ttraining GiB\tautocast copies GiB\t"
     "bf16 inference GiB",
     "training", .add_size = add_training},
    {"training",
     "Gradient checkpointing, 2.7B (the xl of 2026), batch 4, context 2048: 32 blocks, 80 MiB a "
     "boundary, 3.6 GiB a block",
     "rr", "blocks a segment\tactivations GiB", "checkpointing", .add = add_checkpointing},
    {"fsdp",
     "Fully sharded weights: memory of one rank without activations and buffers, f32 and AdamW; shared: "
     "gradients if blocks share two places for them; saved: the difference from no sharding; a block: "
     "weights that are gathered together",
     "lrrrrrrrr",
     "size\tranks\tparameters GiB\tgradients GiB\tshared GiB\tAdamW state GiB\ttraining GiB\tsaved GiB\ta "
     "block MiB",
     "fsdp", .add_size = add_fsdp},
    {"attention",
     "Attention, batch 8, one head of 64, f32, no mask: M = B S^2 e is one score matrix; saved "
     "is kept for backward, with q, k, v and o",
     "rrrrrrrrr",
     "seq\tM MiB\tsaved, course softmax MiB\tsaved, fused softmax MiB\tsaved, flash MiB\t"
     "forward peak MiB\tbackward peak MiB\tforward GFLOP\tproducts to softmax",
     "attention", .add = add_attention},
    {"attention",
     "The first power of two at which naive attention's backward peak, 8 M + 8 B S d e, does "
     "not fit: batch 8, one head of 64",
     "rrr", "memory GiB\tseq, f32\tseq, bf16", "attention_oom", .add = add_attention_oom},
    {"ddp",
     "Distributed data parallel, xl in f32: s = 7.993 GB of gradients; overhead after backward "
     "s / (n w) + n o for n buckets",
     "lrrr", "link\tbuckets\tMB a bucket\toverhead ms", "ddp", .add = add_ddp},
    {"ddp",
     "All-reduce in ms over links of 180 GB/s: ring 2 (N - 1) / N S / W; alternate, which "
     "passes whole buffers on, (N - 1) S / W",
     "rrrr", "MiB\tranks\tring ms\talternate ms", "ring", .add = add_ring},
    {"xxl", "communication_accounting, XXL: d 16384, d_ff 53248, 126 blocks of two linears", "lrl",
     "quantity\tvalue\thow", "xxl", .add = add_xxl},
    {"xxl",
     "XXL on a mesh of X = 16 ways FSDP over M_X = 2 axes and Y = 4 ways tensor parallel over "
     "M_Y = 1; assumed: C = 4.6e14 FLOP/s a device, W = 1.8e11 bytes/s an axis (2 directions of "
     "9e10)",
     "lrrl", "quantity\tvalue\ta device\thow", "mesh", .add = add_mesh},
    {"parallel",
     "The calculations of 2026 for one feed-forward of three matrices: B = 2^20 tokens, D "
     "16384, F 53248, N = 64 devices, C = 4.6e14 FLOP/s, W = 1.8e11 bytes/s",
     "lrrrrrr",
     "strategy\tforward compute ms\tforward communication ms\tlargest N, forward\tbackward "
     "compute ms\tbackward communication ms\tlargest N, backward",
     "parallel", .add = add_parallel},
    {"operations", "Operations: FLOPs, the least bytes they move, and the ratio", "llrrr",
     "operation\tdtype\tGFLOP\tMiB\tFLOP a byte", "operations", .add = add_costs},
};

enum { LISTINGS = sizeof listings / sizeof listings[0] };

static td_status show(const td_common *common, const struct listing *listing)
{
    td_status status = TD_OK;
    td_table table = {
        .align = listing->align, .heads = listing->heads, .common = common, .name = listing->name};
    td_model_size size;
    const char *name;

    if (listing->add)
        TD_TRY(listing->add(&table));
    for (int64_t i = 0; listing->add_size && (name = td_model_size_name(i)); i++) {
        TD_TRY(td_model_size_find(name, &size));
        TD_TRY(listing->add_size(
            &table, name, &(td_account_model){size.d_model, size.d_ff, size.layers, size.heads, size.vocab}));
    }
    fprintf(td_common_tables(common), "%s\n\n", listing->title);
cleanup:
    return td_table_end(&table, status, td_common_tables(common));
}

typedef struct arguments {
    td_common common;
    bool wanted[LISTINGS];
    bool any;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    arguments *args = state->input;
    bool known = false;

    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &args->common;
        return 0;
    }
    if (key != ARGP_KEY_ARG)
        return ARGP_ERR_UNKNOWN;
    for (int i = 0; i < LISTINGS; i++)
        if (strcmp(arg, listings[i].section) == 0)
            args->wanted[i] = known = true;
    if (!known)
        argp_error(state,
                   "'%s' is no section; there are parameters, flops, activations, training, fsdp, attention, "
                   "ddp, xxl, parallel, operations",
                   arg);
    args->any = true;
    return 0;
}

td_status td_command_account(int argc, char **argv)
{
    static const struct argp_child children[] = {{&td_json_argp, 0, NULL, 0}, {0}};
    static const struct argp argp = {
        .parser = parse,
        .children = children,
        .args_doc = "[SECTION...]",
        .doc = "Shows the arithmetic of the reports: all sections, or the named ones.\n"
               "\n"
               "  parameters   number of parameters of each size, by part\n"
               "  flops        FLOPs of forward and backward; model FLOPs utilisation\n"
               "  activations  bytes of residual, scores, feed-forward, logits\n"
               "  training     bytes of parameters, gradients, AdamW; checkpointing\n"
               "  fsdp         bytes of one rank with fully sharded weights\n"
               "  attention    bytes and FLOPs of naive and flash attention\n"
               "  ddp          overhead of bucketed gradients; time of a ring all-reduce\n"
               "  xxl          communication_accounting: memory, devices, batch of a mesh\n"
               "  parallel     the parallelism calculations of 2026\n"
               "  operations   FLOPs and bytes of single operations"
               "\vExamples:\n"
               "  tandem account flops training\n"
               "  tandem account ddp --json"};
    arguments args = {.any = false};
    td_status status = TD_OK;

    argp_parse(&argp, argc, argv, 0, NULL, &args);
    for (int i = 0; i < LISTINGS; i++)
        if (!args.any || args.wanted[i])
            TD_TRY(show(&args.common, &listings[i]));
cleanup:
    return status;
}
