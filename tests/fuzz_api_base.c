/* The functions of base/, accounting/ and precision/. */
#include "support/fuzz_api_kit.h"

#include "accounting/accounting.h"
#include "base/build.h"
#include "base/clock.h"
#include "base/record.h"
#include "base/rng.h"
#include "precision/precision.h"

#include <unistd.h>

/* An enum value of those in [0, count), or another: for functions that cannot refuse. */
static int any_enum(int count)
{
    static const int bad[] = {-1, 17, INT32_MAX, INT32_MIN};

    return td_fuzz_chance(50) ? (int)td_fuzz_below(count) : TD_FUZZ_PICK(bad);
}

/* A name, and "unknown ..." where the value is none. */
static td_status check_name(const char *name, int value, int count)
{
    assert_non_null(name);
    assert_int_equal(strncmp(name, "unknown", 7) != 0, value >= 0 && value < count);
    return TD_OK;
}

/* ---- status, clock, dtype ---- */

API(td_status_name)
{
    const int value = any_enum(7);

    return check_name(td_status_name((td_status)value), value, 7);
}

API(td_last_error)
{
    assert_non_null(td_last_error());
    return TD_OK;
}

API(td_build_info)
{
    const td_build *build = td_build_info();

    assert_true(build && build == td_build_info() && *build->version && *build->id);
    assert_true(build->modules && build->module_count > 0);
    return TD_OK;
}

API(td_clock_ns)
{
    const int64_t first = td_clock_ns();

    assert_true(td_clock_ns() >= first);
    return TD_OK;
}

API(td_dtype_name)
{
    const int value = any_enum(4);

    return check_name(td_dtype_name((td_dtype)value), value, 4);
}

API(td_precision_name)
{
    const int value = any_enum(5);
    const char *name = td_precision_name((td_precision)value);
    td_precision parsed;

    assert_int_equal(name != NULL, value >= 0 && value < 5);
    if (name) {
        td_assert_ok(td_precision_parse(name, &parsed));
        assert_int_equal(parsed, value);
    }
    return TD_OK;
}

API(td_precision_parse)
{
    static const char *const names[] = {"f32", "tf32", "bf16", "f16", "bf16_mixed"};
    const char *name = text("name|precision", 5, names);

    return td_precision_parse(name, out("out", sizeof(td_precision)));
}

API(td_precision_dtype)
{
    assert_true(td_dtype_size(td_precision_dtype((td_precision)any_enum(5))) > 0);
    return TD_OK;
}

API(td_precision_weights)
{
    const td_precision precision = (td_precision)any_enum(5);

    assert_true(td_dtype_size(td_precision_weights(precision)) >=
                td_dtype_size(td_precision_dtype(precision)));
    return TD_OK;
}

API(td_dtype_size)
{
    const int value = any_enum(4);

    assert_int_equal(td_dtype_size((td_dtype)value) > 0, value >= 0 && value < 4);
    return TD_OK;
}

API(td_dtype_eps)
{
    const int value = any_enum(4);

    assert_int_equal(td_dtype_eps((td_dtype)value) > 0, value >= 0 && value < 4);
    return TD_OK;
}

API(td_dtype_parse)
{
    static const char *const names[] = {"f64", "f32", "f16", "bf16"};
    const char *name = text("name|dtype", 4, names);

    return td_dtype_parse(name, out("out", sizeof(td_dtype)));
}

API(td_convert)
{
    const int64_t count = index_in("count", 64);
    const td_dtype from = dtype_any("src_dtype"), to = dtype_any("dst_dtype");
    const void *src = count ? in("src", BYTES(from, count)) : NULL;
    void *dst = count ? out("dst", BYTES(to, count)) : NULL;

    return td_convert(count, from, src, to, dst);
}

/* ---- random numbers ---- */

API(td_philox4x32_10)
{
    const uint32_t counter[4] = {(uint32_t)td_fuzz_bits(), 0, UINT32_MAX, 7},
                   key[2] = {(uint32_t)td_fuzz_bits(), 1};
    uint32_t first[4] = {0}, again[4] = {1, 1, 1, 1};

    td_philox4x32_10(counter, key, first);
    td_philox4x32_10(counter, key, again);
    assert_memory_equal(first, again, sizeof first);
    return TD_OK;
}

typedef struct slice {
    td_rng rng;
    int64_t offset, count;
} slice;

static slice draw_slice(void)
{
    slice s = {.rng = {td_fuzz_bits(), td_fuzz_bits()},
               .offset = index_in("offset", 1000),
               .count = index_in("count", 64)};

    if (td_fuzz_chance(10) && !api_spoilt() && s.count > 0) {
        s.offset = INT64_MAX - s.count + (wrong() ? 1 : 0);
        impossible_if(s.offset > INT64_MAX - s.count, "offset|count");
    }
    return s;
}

static size_t slice_bytes(const slice *s, size_t element)
{
    return s->count > 0 ? (size_t)s->count * element : 8;
}

API(td_rng_uniform)
{
    const slice s = draw_slice();
    const double first = number("low"), second = number("high|low");
    const bool ordered = !(first > second); /* a NaN stays where it is */
    const double low = ordered ? first : second, high = ordered ? second : first;
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    return td_rng_uniform(pointer("rng", &s.rng), s.offset, s.count, (float)low, (float)high, to);
}

static double draw_std(void)
{
    static const double good[] = {0, 1, 1e-45, 0.5}, bad[] = {-1, NAN, INFINITY, -INFINITY};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, "std");
    return TD_FUZZ_PICK(bad);
}

API(td_rng_normal)
{
    const slice s = draw_slice();
    const double mean = number("mean"), std = draw_std();
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    return td_rng_normal(pointer("rng", &s.rng), s.offset, s.count, (float)mean, (float)std, to);
}

API(td_rng_truncated_normal)
{
    const slice s = draw_slice();
    const double mean = number("mean"), std = draw_std(), low = number("low"), high = number("high|low");
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    impossible_if(low > high, "low|high");
    possible(TD_BAD_ARGUMENT, "low|high"); /* beyond 10 std from mean */
    return td_rng_truncated_normal(pointer("rng", &s.rng), s.offset, s.count, (float)mean, (float)std,
                                   (float)low, (float)high, to);
}

API(td_rng_tokens)
{
    static const int64_t good[] = {1, 2, 10000, INT64_MAX}, bad[] = {0, -1, INT64_MIN};
    const slice s = draw_slice();
    int64_t bound = TD_FUZZ_PICK(good);
    void *to = s.count ? out("out", slice_bytes(&s, 8)) : NULL;

    if (wrong()) {
        bound = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "bound");
    }
    return td_rng_tokens(pointer("rng", &s.rng), s.offset, s.count, bound, to);
}

/* ---- statistics ---- */

static int64_t draw_count(void)
{
    static const int64_t bad[] = {0, -1, INT64_MIN};

    if (!wrong())
        return 1 + td_fuzz_below(20);
    impossible(TD_BAD_ARGUMENT, "count");
    return TD_FUZZ_PICK(bad);
}

static const double *draw_samples(const char *name, int64_t count, bool sorted)
{
    static const double values[] = {0, 1, -1, NAN, INFINITY, -INFINITY, 1e308, -1e308, 5e-324};
    double samples[20];

    for (int i = 0; i < 20; i++)
        samples[i] = sorted ? i : TD_FUZZ_PICK(values);
    return in_copy(name, samples, (size_t)(count >= 1 && count <= 20 ? count : 20) * sizeof *samples);
}

API(td_stats_compute)
{
    const int64_t count = draw_count();
    const double *samples = draw_samples("samples", count, false);

    return td_stats_compute(samples, count, out("out", sizeof(td_stats)));
}

API(td_stats_percentile)
{
    static const double bad[] = {-1, 100.5, NAN, INFINITY, -5e-324};
    const int64_t count = draw_count();
    const double *samples = draw_samples("sorted", count, true);
    double p = td_fuzz_uniform(0, 100);

    if (wrong()) {
        p = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "p");
    }
    return td_stats_percentile(samples, count, p, out("out", sizeof(double)));
}

/* ---- records ---- */

/* A record with some keys, and its text, to see that a refusal leaves it as it was. */
static td_record *record;
static char *record_text;

static void open_record(void)
{
    td_assert_ok(td_record_create("d", "m", "c", &record));
    td_assert_ok(td_record_set_number(record, "case.seq", 128));
    td_assert_ok(td_record_text(record, &record_text));
}

static td_status close_record(td_status status)
{
    char *now = NULL;

    td_assert_ok(td_record_text(record, &now));
    if (status != TD_OK)
        assert_string_equal(record_text, now);
    td_record_text_free(now);
    td_record_text_free(record_text);
    td_record_destroy(record);
    return status;
}

#define OF_RECORD(call) (open_record(), close_record((td_forget_error(), (call))))

static const char *record_path(void)
{
    static const char *const good[] = {"key", "case.batch", "a.b.c.d", "case.seq", "status"};
    static const char *const bad[] = {NULL,
                                      "",
                                      ".",
                                      "a.",
                                      ".a",
                                      "a..b",
                                      "case.seq.deeper",
                                      "1.2.3.4.5.6.7.8.9",
                                      "\xff",
                                      "a.\xc0\x80",
                                      "1234567890123456789012345678901234567890123456789012345678901234"};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, "path");
    return TD_FUZZ_PICK(bad);
}

API(td_record_create)
{
    static const char *const good[] = {"deliverable", "x"}, *const bad[] = {NULL, "", "\xff"};
    static const char *const names[] = {"deliverable", "module", "impl"};
    const char *values[3];
    td_record *made = (td_record *)&values;
    td_record **to = pointer("out", &made);

    for (int i = 0; i < 3; i++) {
        values[i] = TD_FUZZ_PICK(good);
        if (wrong()) {
            values[i] = TD_FUZZ_PICK(bad);
            impossible(TD_BAD_ARGUMENT, names[i]);
        }
    }
    const td_status status = td_record_create(values[0], values[1], values[2], to);
    if (to && status != TD_OK)
        assert_null(made);
    if (to)
        td_record_destroy(made);
    return status;
}

API(td_record_destroy)
{
    td_record_destroy(NULL);
    return TD_OK;
}

API(td_record_set_string)
{
    static const char *const good[] = {"", "text", "\"quoted\\\n", "\xc3\xa9"};
    const char *path = record_path(), *value = TD_FUZZ_PICK(good);

    if (wrong()) {
        value = td_fuzz_chance(50) ? NULL : "\xed\xa0\x80"; /* a surrogate */
        impossible(TD_BAD_ARGUMENT, "value");
    }
    return OF_RECORD(td_record_set_string(pointer("record", record), path, value));
}

API(td_record_set_number)
{
    static const double values[] = {0, -0.0, 1e308, 5e-324, NAN, INFINITY, -INFINITY};
    const char *path = record_path();

    return OF_RECORD(td_record_set_number(pointer("record", record), path, TD_FUZZ_PICK(values)));
}

API(td_record_set_integer)
{
    static const int64_t values[] = {0, -1, INT64_MAX, INT64_MIN};
    const char *path = record_path();

    return OF_RECORD(td_record_set_integer(pointer("record", record), path, TD_FUZZ_PICK(values)));
}

API(td_record_set_bool)
{
    const char *path = record_path();

    return OF_RECORD(td_record_set_bool(pointer("record", record), path, td_fuzz_chance(50)));
}

API(td_record_set_stats)
{
    const char *path = record_path();
    const td_stats stats = {
        .n = td_fuzz_chance(50) ? 3 : INT64_MIN, .mean = NAN, .std = INFINITY, .p95 = 1e308};

    return OF_RECORD(td_record_set_stats(pointer("record", record), path, pointer("stats", &stats)));
}

API(td_record_set_samples)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, (int64_t)INT32_MAX + 1};
    const char *path = record_path();
    int64_t count = 1 + td_fuzz_below(19);

    if (wrong()) {
        count = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "count");
    }
    const double *samples = draw_samples("samples", count, false);
    return OF_RECORD(td_record_set_samples(pointer("record", record), path, samples, count));
}

API(td_record_text)
{
    char *line = NULL;

    const td_status status = OF_RECORD(td_record_text(pointer("record", record), pointer("out", &line)));
    if (status == TD_OK)
        assert_non_null(line);
    else
        assert_null(line);
    td_record_text_free(line);
    return status;
}

API(td_record_text_free)
{
    td_record_text_free(NULL);
    return TD_OK;
}

/* Calls with a file of its own, or a path that is none. */
static td_status with_file(bool append)
{
    const char *path = path_or_none(path_own(true));

    return path_done(append ? OF_RECORD(td_record_append(pointer("record", record), path))
                            : td_record_probe(path));
}

API(td_record_append)
{
    return with_file(true);
}

API(td_record_probe)
{
    return with_file(false);
}

/* ---- accounting ---- */

/* An extent whose products may be out of range, where they are not counts. */
static int64_t large_extent(const char *words)
{
    static const int64_t large[] = {1000000, INT64_MAX / 2, INT64_MAX};

    if (td_fuzz_chance(20)) {
        possible(TD_BAD_ARGUMENT, words);
        return TD_FUZZ_PICK(large);
    }
    return at_least_one(words);
}

/* What an overflow of the model's counts is told by. */
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
                                        td_fuzz_chance(50), out("out", sizeof(td_account_block)));
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
        p.devices = 0.5; /* 1 + a wrong number may be a right one */
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

#define COSTS "batch|m|n|k|a|b|c|heads|seq|seq_k|head_dim|count|q|scores|lse|p|elements|bytes"

API(td_gemm_cost)
{
    const int64_t batch = large_extent(COSTS), m = large_extent(COSTS), n = large_extent(COSTS),
                  k = large_extent(COSTS);
    const td_dtype type = dtype_any("dtype");

    return td_gemm_cost(batch, m, n, k, type, out("out", sizeof(td_cost)));
}

API(td_flash_cost)
{
    const int64_t batch = large_extent(COSTS), heads = large_extent(COSTS), seq = large_extent(COSTS),
                  seq_k = large_extent(COSTS), head_dim = large_extent(COSTS);
    const td_dtype type = dtype_any("dtype");

    return td_flash_cost(batch, heads, seq, seq_k, head_dim, type, td_fuzz_chance(50), td_fuzz_chance(50),
                         out("out", sizeof(td_cost)));
}

API(td_adamw_cost)
{
    const int64_t count = large_extent(COSTS);
    const td_dtype type = dtype_any("dtype");

    return td_adamw_cost(count, type, out("out", sizeof(td_cost)));
}

/* ---- precision ---- */

API(td_precision_sum)
{
    static const double values[] = {0.01, 0, -1, 1e308, NAN, INFINITY, 5e-324};
    const td_sum_case c = {.count = index_in("count", 300),
                           .value = TD_FUZZ_PICK(values),
                           .addend = dtype_any("addend"),
                           .accumulator = dtype_any("accumulator"),
                           .cast_first = td_fuzz_chance(50),
                           .method = (td_sum_method)choice("method", 3)};

    impossible_if(c.addend != c.accumulator && td_dtype_size(c.addend) >= td_dtype_size(c.accumulator),
                  "addend|accumulator");
    double *sum = out("sum", sizeof(double));
    return td_precision_sum(pointer("sum_case", &c), sum, out_or_null(sizeof(int64_t)));
}

API(td_precision_handout_case)
{
    static const int64_t bad[] = {-1, 4, INT64_MAX, INT64_MIN};
    int64_t index = td_fuzz_below(4);

    if (wrong()) {
        index = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "index");
    }
    return td_precision_handout_case(index, out("out", sizeof(td_sum_case)));
}

/* Any text is an operation; only NULL is none. */
static const char *draw_op(void)
{
    static const char *const ops[] = {"linear", "matmul", "layer_norm", "cross_entropy_loss",
                                      "",       "\xff",   "%n"};

    return pointer("op", TD_FUZZ_PICK(ops));
}

API(td_autocast_rule_find)
{
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    const char *op = draw_op();

    return td_autocast_rule_find(device, op, out("out", sizeof(td_autocast_rule)));
}

API(td_autocast_rule_name)
{
    const int value = any_enum(5);

    return check_name(td_autocast_rule_name((td_autocast_rule)value), value, 5);
}

API(td_autocast_list_size)
{
    const int value = any_enum(2);

    assert_int_equal(td_autocast_list_size((td_autocast_device)value) > 0, value == 0 || value == 1);
    return TD_OK;
}

API(td_autocast_list_entry)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 1000000};
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    int64_t index = td_fuzz_below(20);
    const char *op = NULL;

    if (wrong()) {
        index = TD_FUZZ_PICK(bad);
        impossible(TD_BAD_ARGUMENT, "index");
    }
    const char **to = td_fuzz_chance(95) ? &op : pointer("op", &op);
    return td_autocast_list_entry(device, index, to, out("rule", sizeof(td_autocast_rule)));
}

static td_dtype draw_low(void)
{
    const bool bad = wrong();

    if (bad)
        impossible(TD_BAD_ARGUMENT, "low");
    return bad ? (td_fuzz_chance(50) ? TD_F32 : (td_dtype)17) : td_fuzz_chance(50) ? TD_F16 : TD_BF16;
}

API(td_autocast_result)
{
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    const td_dtype low = draw_low();
    const char *op = draw_op();
    const int64_t count = draw_count();
    td_dtype types[20];

    for (int i = 0; i < 20; i++)
        types[i] = i < count ? dtype_any("input") : TD_F32;
    possible(TD_UNSUPPORTED, "op");
    const td_dtype *inputs = in_copy("inputs", types, (size_t)(count >= 1 ? count : 1) * sizeof *types);
    return td_autocast_result(device, low, op, count, inputs, out("out", sizeof(td_dtype)));
}

API(td_autocast_toy_model)
{
    static const char *const losses[] = {"cross_entropy_loss", "mse_loss", "mean"};
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    const td_dtype low = draw_low();
    const char *loss = text("loss", 3, losses);
    td_toy_component *components = out("components", 8 * sizeof(td_toy_component));

    possible(TD_UNSUPPORTED, "op");
    return td_autocast_toy_model(device, low, loss, components, out("count", sizeof(int64_t)));
}
