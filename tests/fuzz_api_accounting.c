/* The functions of accounting.h. */
#include "support/fuzz_api_kit.h"

#include "accounting/accounting.h"

/* Draws an extent whose products with others may be too large. If they need not be counts, that is
 * allowed. */
static int64_t large_extent(const char *words)
{
    static const int64_t large[] = {1000000, INT64_MAX / 2, INT64_MAX};

    if (wrong()) {
        possible(TD_BAD_ARGUMENT, words);
        return BAD(large);
    }
    return at_least_one(words);
}

/* The names in messages about overflows of the model's counts. */
#define COUNTS                                                                                               \
    "d_model|d_ff|layers|heads|vocab|embedding|attention|ffn|norms|head|parameters|total|tensors|batch|"     \
    "context|"                                                                                               \
    "element_bytes|residual|score|scores|logits|low_bytes|copies|tokens|weights|feed|autocast|logit|"        \
    "activation"

static td_account_model draw_model(void)
{
    td_account_model m = {.d_model = large_extent(COUNTS),
                          .d_ff = large_extent(COUNTS),
                          .layers = large_extent(COUNTS),
                          .heads = large_extent(COUNTS),
                          .vocab = large_extent(COUNTS)};
    return m;
}

API(td_account_model_parameters)
{
    const td_account_model m = draw_model();

    return td_account_model_parameters(pointer("model", &m), out("out", sizeof(td_account_parameters)));
}

API(td_account_model_flops)
{
    const td_account_model m = draw_model();
    const int64_t batch = large_extent(COUNTS), context = large_extent(COUNTS);

    impossible_if(m.heads > 0 && m.d_model % m.heads != 0, COUNTS);
    return td_account_model_flops(pointer("model", &m), batch, context, td_fuzz_chance(50),
                                  td_fuzz_chance(50), out("out", sizeof(td_account_flops)));
}

API(td_account_mfu)
{
    const double flops = positive("flops"), seconds = positive("seconds"),
                 peak = positive("peak_flops_per_second");

    return td_account_mfu(flops, seconds, peak, out("out", sizeof(double)));
}

API(td_account_model_activations)
{
    const td_account_model m = draw_model();
    const int64_t batch = large_extent(COUNTS), context = large_extent(COUNTS), bytes = large_extent(COUNTS);

    return td_account_model_activations(pointer("model", &m), batch, context, bytes,
                                        out("out", sizeof(td_account_activations)));
}

API(td_account_training_memory)
{
    static const char words[] = "parameters|parameter_bytes|gradient_bytes|moment_bytes|parameter|gradient|"
                                "optimizer|training";
    const int64_t count = large_extent(words), p = large_extent(words), g = large_extent(words),
                  m = large_extent(words);

    return td_account_training_memory(count, p, g, m, out("out", sizeof(td_account_training)));
}

API(td_account_fsdp_memory)
{
    static const char words[] =
        COUNTS "|ranks|parameter_bytes|gradient_bytes|moment_bytes|parameter|gradient|"
               "optimizer|training";
    const td_account_model m = draw_model();
    const int64_t ranks = large_extent(words), p = large_extent(words), g = large_extent(words),
                  moment = large_extent(words);

    return td_account_fsdp_memory(pointer("model", &m), ranks, p, g, moment,
                                  out("out", sizeof(td_account_fsdp)));
}

API(td_account_autocast_copies)
{
    const td_account_model m = draw_model();
    const int64_t bytes = large_extent(COUNTS);

    return td_account_autocast_copies(pointer("model", &m), bytes, out("out", sizeof(int64_t)));
}

API(td_account_block_activations)
{
    static const char words[] = COUNTS "|stream_bytes|block|final|q|sum";
    const td_account_model m = {.d_model = large_extent(words),
                                .d_ff = large_extent(words),
                                .layers = large_extent(words),
                                .heads = large_extent(words),
                                .vocab = large_extent(words)};
    const int64_t batch = large_extent(words), context = large_extent(words), bytes = large_extent(words),
                  stream = large_extent(words);

    return td_account_block_activations(pointer("model", &m), batch, context, bytes, stream,
                                        index_in("saved_floats", 2), out("out", sizeof(td_account_block)));
}

API(td_account_checkpointing)
{
    static const char words[] = "blocks|segment|boundary_bytes|block_bytes|checkpoint|activation";
    const int64_t blocks = large_extent(words), segment = large_extent(words), boundary = large_extent(words),
                  block = large_extent(words);

    impossible_if(segment > blocks, "segment|blocks");
    return td_account_checkpointing(blocks, segment, boundary, block, out("out", sizeof(int64_t)));
}

#define ATTENDED                                                                                             \
    "batch|seq|seq_k|head_dim|element_bytes|matrices|matrix|scores|q|k|mask|saved|peak|memory_bytes|bytes|"  \
    "backward_peak|saved_naive|saved_flash|forward_peak"

API(td_account_attention_memory)
{
    const int64_t batch = large_extent(ATTENDED), seq = large_extent(ATTENDED),
                  seq_k = large_extent(ATTENDED), head_dim = large_extent(ATTENDED),
                  element = large_extent(ATTENDED), matrices = large_extent(ATTENDED);

    return td_account_attention_memory(batch, seq, seq_k, head_dim, element, matrices, td_fuzz_chance(50),
                                       out("out", sizeof(td_account_attention)));
}

API(td_account_attention_oom)
{
    const int64_t batch = large_extent(ATTENDED), head_dim = large_extent(ATTENDED),
                  element = large_extent(ATTENDED), memory = large_extent(ATTENDED);

    return td_account_attention_oom(batch, head_dim, element, memory, out("out", sizeof(int64_t)));
}

API(td_account_ddp_overhead)
{
    const double bytes = positive("bytes"), rate = positive("bytes_per_second"),
                 call = positive("seconds_per_call"), buckets = positive("buckets");

    return td_account_ddp_overhead(bytes, rate, call, buckets, out("seconds", sizeof(double)));
}

API(td_account_ddp_optimum_find)
{
    const double bytes = positive("bytes"), rate = positive("bytes_per_second"),
                 call = positive("seconds_per_call");

    return td_account_ddp_optimum_find(bytes, rate, call, out("out", sizeof(td_account_ddp_optimum)));
}

#define XXL                                                                                                  \
    "d_model|d_ff|blocks|parameters|tokens|devices|state_bytes|state|saved|saved_bytes_per_token|bytes"

static td_account_xxl draw_xxl(void)
{
    return (td_account_xxl){
        .d_model = large_extent(XXL), .d_ff = large_extent(XXL), .blocks = large_extent(XXL)};
}

API(td_account_xxl_memory_of)
{
    const td_account_xxl m = draw_xxl();

    return td_account_xxl_memory_of(pointer("model", &m), out("out", sizeof(td_account_xxl_memory)));
}

API(td_account_xxl_fsdp_bytes)
{
    const td_account_xxl m = draw_xxl();
    const int64_t tokens = large_extent(XXL), devices = large_extent(XXL);

    return td_account_xxl_fsdp_bytes(pointer("model", &m), tokens, devices, out("out", sizeof(double)));
}

API(td_account_xxl_devices)
{
    const td_account_xxl m = draw_xxl();
    const double bytes = positive("device_bytes");

    possible(TD_BAD_ARGUMENT, "device_bytes");
    return td_account_xxl_devices(pointer("model", &m), bytes, out("out", sizeof(int64_t)));
}

API(td_account_mesh_batch_of)
{
    const td_account_xxl m = draw_xxl();
    const td_account_mesh mesh = {.flops_per_second = positive("flops_per_second"),
                                  .bytes_per_second = positive("bytes_per_second"),
                                  .fsdp = large_extent("fsdp"),
                                  .tensor = large_extent("tensor"),
                                  .fsdp_axes = large_extent("fsdp_axes"),
                                  .tensor_axes = large_extent("tensor_axes")};

    return td_account_mesh_batch_of(pointer("model", &m), pointer("mesh", &mesh),
                                    out("out", sizeof(td_account_mesh_batch)));
}

static td_account_parallel draw_parallel(void)
{
    td_account_parallel p = {.tokens = positive("tokens"),
                             .d_model = positive("d_model"),
                             .d_ff = positive("d_ff"),
                             .devices = 1 + positive("devices"),
                             .flops_per_second = positive("flops_per_second"),
                             .bytes_per_second = positive("bytes_per_second")};

    if (p.devices <= 1)
        p.devices = says_number(0.5); /* 1 + this number could also be right */
    return p;
}

API(td_account_parallel_times_of)
{
    const td_account_strategy strategy = (td_account_strategy)choice("strategy", 3);
    const td_account_parallel p = draw_parallel();

    return td_account_parallel_times_of(strategy, pointer("parallel", &p),
                                        out("out", sizeof(td_account_parallel_times)));
}

API(td_account_fsdp_tensor_devices)
{
    const td_account_parallel p = draw_parallel();
    double *overlapped = out("overlapped", sizeof(double)), *shared = out("shared_wire", sizeof(double));

    return td_account_fsdp_tensor_devices(pointer("parallel", &p), overlapped, shared);
}

API(td_account_ring_all_reduce)
{
    const double bytes = positive("bytes"), rate = positive("bytes_per_second");
    const int64_t ranks = large_extent("ranks");
    double *ring = out("ring", sizeof(double)), *alternate = out("alternate", sizeof(double));
    return td_account_ring_all_reduce(bytes, ranks, rate, ring, alternate);
}

API(td_account_all_reduce_bandwidth)
{
    const double bytes = positive("bytes"), seconds = positive("seconds");
    const int64_t ranks = large_extent("ranks");
    double *algorithm = out("algorithm", sizeof(double)), *bus = out("bus", sizeof(double));
    return td_account_all_reduce_bandwidth(bytes, ranks, seconds, algorithm, bus);
}

#define COSTS "batch|m|n|k|a|b|c|heads|seq|seq_k|head_dim|count|q|scores|lse|p|elements|bytes"

API(td_gemm_cost)
{
    const int64_t batch = large_extent(COSTS), m = large_extent(COSTS), n = large_extent(COSTS),
                  k = large_extent(COSTS);
    const td_dtype type = dtype_any("dtype");

    return td_gemm_cost(batch, m, n, k, type, out("out", sizeof(td_cost)));
}

API(td_softmax_cost)
{
    const int64_t rows = large_extent("rows|bytes"), cols = large_extent("cols|bytes");
    const td_dtype type = dtype_any("dtype");

    return td_softmax_cost(rows, cols, type, out("out", sizeof(td_cost)));
}

API(td_flash_cost)
{
    const int64_t batch = large_extent(COSTS), heads = large_extent(COSTS), seq = large_extent(COSTS),
                  seq_k = large_extent(COSTS), head_dim = large_extent(COSTS);
    const td_dtype type = dtype_any("dtype");

    return td_flash_cost(batch, heads, seq, seq_k, head_dim, type, td_fuzz_chance(50), td_fuzz_chance(50),
                         out("out", sizeof(td_cost)));
}

API_IS(td_adamw_cost, td_adamw_cost(large_extent(COSTS), dtype_any("dtype"), out("out", sizeof(td_cost))))
