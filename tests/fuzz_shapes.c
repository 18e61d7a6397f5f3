/* Operations and attention with random shapes, pitches, types and places in memory, each compared with
 * float64. support/fuzz.h says how to run one case again. */
#include "support/fuzz_kit.h"
#include "support/gpu.h"

#include <omp.h>

static int arguments;
static char **argument;

static const struct kind {
    const char *name;
    void (*run)(void);
    int weight;
} kinds[] = {
    {"gemm", fuzz_gemm, 4},
    {"embedding", fuzz_embedding, 1},
    {"rmsnorm", fuzz_rmsnorm, 2},
    {"heads", fuzz_heads, 2},
    {"rope_table", fuzz_rope_table, 1},
    {"silu_mul", fuzz_silu_mul, 1},
    {"round", fuzz_round, 1},
    {"residual", fuzz_residual, 1},
    {"softmax", fuzz_softmax, 2},
    {"cross_entropy", fuzz_cross_entropy, 2},
    {"adamw", fuzz_adamw, 1},
    {"sgd", fuzz_sgd, 1},
    {"norm", fuzz_norm, 1},
    {"naive", fuzz_naive, 3},
    {"flash", fuzz_flash, 5},
};

enum { KINDS = sizeof kinds / sizeof kinds[0] };

static int drawn_kind(void)
{
    int64_t total = 0;

    for (int i = 0; i < KINDS; i++)
        total += kinds[i].weight;
    int64_t at_weight = td_fuzz_below(total);
    for (int i = 0;; i++) {
        at_weight -= kinds[i].weight;
        if (at_weight < 0)
            return i;
    }
}

/* Shapes that run in each test before any random ones. The other properties of each are drawn, by `seeds`. */
static const struct named {
    const char *name;
    void (*run)(void);
    int seeds;
    int64_t extents[6];
} all_named[] = {
    {"gemm one", fuzz_gemm, 12, {1, 1, 1, 1}},
    {"gemm row", fuzz_gemm, 12, {2, 1, 130, 257}},
    {"gemm column", fuzz_gemm, 12, {2, 130, 1, 257}},
    {"gemm long sum", fuzz_gemm, 12, {1, 17, 19, 8191}},
    {"gemm head dim 80", fuzz_gemm, 12, {3, 37, 53, 80}},
    {"gemm panels", fuzz_gemm, 12, {1, 129, 193, 65}},
    {"embedding one", fuzz_embedding, 8, {1, 1, 1}},
    {"embedding ragged", fuzz_embedding, 8, {257, 53, 83}},
    {"embedding repeated tokens", fuzz_embedding, 8, {512, 7, 80}},
    {"embedding one token only", fuzz_embedding, 8, {301, 1, 24}},
    {"embedding mostly empty rows", fuzz_embedding, 8, {19, 701, 33}},
    {"embedding wider than a piece", fuzz_embedding, 8, {40, 31, 1025}},
    {"embedding in vectors", fuzz_embedding, 8, {300, 90, 776}},
    {"embedding large vocabulary", fuzz_embedding, 8, {600, 150001, 4}},
    {"embedding a chunk and one", fuzz_embedding, 8, {4097, 1500, 9}},
    {"embedding chunks", fuzz_embedding, 8, {9001, 301, 16}},
    {"embedding many chunks", fuzz_embedding, 8, {37001, 401, 4}},
    {"rmsnorm one", fuzz_rmsnorm, 16, {1, 1}},
    {"rmsnorm below a vector", fuzz_rmsnorm, 16, {5, 15}},
    {"rmsnorm a group", fuzz_rmsnorm, 16, {16, 16}},
    {"rmsnorm above a group", fuzz_rmsnorm, 16, {17, 33}},
    {"rmsnorm prime", fuzz_rmsnorm, 16, {127, 1009}},
    {"rmsnorm head dim", fuzz_rmsnorm, 16, {1100, 80}},
    {"rmsnorm small model", fuzz_rmsnorm, 16, {67, 768}},
    {"rmsnorm wide", fuzz_rmsnorm, 16, {3, 2570}},
    {"rmsnorm xl", fuzz_rmsnorm, 16, {21, 1600}},
    {"rmsnorm largest model", fuzz_rmsnorm, 16, {19, 2560}},
    {"rmsnorm beyond registers", fuzz_rmsnorm, 16, {2, 35000}},
    {"heads one", fuzz_heads, 8, {1, 1, 1, 1}},
    {"heads small model", fuzz_heads, 8, {2, 12, 16, 32}},
    {"heads ragged", fuzz_heads, 8, {3, 5, 37, 40}},
    {"heads with a gap behind v", fuzz_heads, 8, {2, 3, 19, 40, 727}},
    {"heads with a gap of whole vectors", fuzz_heads, 8, {2, 3, 21, 40, 736}},
    {"heads 25 of 64", fuzz_heads, 8, {1, 25, 70, 32}},
    {"heads of pairs alone, the pitch said", fuzz_heads, 8, {2, 4, 33, 15, 360}},
    {"angles one", fuzz_rope_table, 2, {1, 1}},
    {"angles of a small model", fuzz_rope_table, 2, {512, 32}},
    {"angles ragged", fuzz_rope_table, 2, {37, 40}},
    {"gate one", fuzz_silu_mul, 8, {1, 1}},
    {"gate below a vector", fuzz_silu_mul, 8, {3, 15}},
    {"gate a vector", fuzz_silu_mul, 8, {3, 16}},
    {"gate above a vector", fuzz_silu_mul, 8, {3, 17, 20}},
    {"gate fused", fuzz_silu_mul, 8, {33, 1009, 2018}},
    {"round 1", fuzz_round, 8, {1}},
    {"round 15", fuzz_round, 8, {15}},
    {"round 16", fuzz_round, 8, {16}},
    {"round 17", fuzz_round, 8, {17}},
    {"round 1009", fuzz_round, 8, {1009}},
    {"round 20011", fuzz_round, 8, {20011}},
    {"residual 1", fuzz_residual, 8, {1}},
    {"residual 15", fuzz_residual, 8, {15}},
    {"residual 16", fuzz_residual, 8, {16}},
    {"residual 17", fuzz_residual, 8, {17}},
    {"residual 1009", fuzz_residual, 8, {1009}},
    {"residual 4096", fuzz_residual, 8, {4096}},
    {"residual 20011", fuzz_residual, 8, {20011}},
    {"softmax one", fuzz_softmax, 8, {1, 1}},
    {"softmax below a vector", fuzz_softmax, 8, {19, 15}},
    {"softmax a vector", fuzz_softmax, 8, {8, 16}},
    {"softmax above a vector", fuzz_softmax, 8, {9, 17}},
    {"softmax prime", fuzz_softmax, 8, {33, 1009}},
    {"softmax two pieces", fuzz_softmax, 8, {3, 16411}},
    {"softmax causal", fuzz_softmax, 8, {111, 37, 37}},
    {"softmax causal, more keys", fuzz_softmax, 8, {66, 80, 33}},
    {"softmax causal, fewer keys", fuzz_softmax, 8, {256, 65, 128}},
    {"softmax short rows in vectors", fuzz_softmax, 8, {35, 120}},
    {"softmax causal, context 256", fuzz_softmax, 8, {134, 256, 67}},
    {"softmax causal, context 512", fuzz_softmax, 8, {131, 512, 512}},
    {"softmax causal, context 1024", fuzz_softmax, 8, {82, 1024, 41}},
    {"cross entropy one", fuzz_cross_entropy, 6, {1, 1}},
    {"cross entropy below a vector", fuzz_cross_entropy, 6, {5, 15}},
    {"cross entropy a vector", fuzz_cross_entropy, 6, {300, 16}},
    {"cross entropy above a vector", fuzz_cross_entropy, 6, {17, 17}},
    {"cross entropy prime", fuzz_cross_entropy, 6, {37, 1009}},
    {"cross entropy course", fuzz_cross_entropy, 6, {19, 10000}},
    {"cross entropy three pieces", fuzz_cross_entropy, 6, {3, 33001}},
    {"cross entropy in vectors", fuzz_cross_entropy, 6, {5, 33024}},
    {"cross entropy beyond registers", fuzz_cross_entropy, 6, {2, 150016}},
    {"adamw 1", fuzz_adamw, 8, {1}},
    {"adamw 15", fuzz_adamw, 8, {15}},
    {"adamw 16", fuzz_adamw, 8, {16}},
    {"adamw 17", fuzz_adamw, 8, {17}},
    {"adamw 4099", fuzz_adamw, 8, {4099}},
    {"adamw 20011", fuzz_adamw, 8, {20011}},
    {"sgd 1", fuzz_sgd, 8, {1}},
    {"sgd 15", fuzz_sgd, 8, {15}},
    {"sgd 16", fuzz_sgd, 8, {16}},
    {"sgd 17", fuzz_sgd, 8, {17}},
    {"sgd 1009", fuzz_sgd, 8, {1009}},
    {"sgd 20011", fuzz_sgd, 8, {20011}},
    {"norm 1", fuzz_norm, 4, {1}},
    {"norm 7", fuzz_norm, 4, {7}},
    {"norm 8", fuzz_norm, 4, {8}},
    {"norm 9", fuzz_norm, 4, {9}},
    {"norm 1009", fuzz_norm, 4, {1009}},
    {"norm 4096", fuzz_norm, 4, {4096}},
    {"norm 1100003", fuzz_norm, 4, {1100003}},
};

/* Shapes of attention around the sizes of tiles (64 x 64), groups of 16 columns, and 6 rows in registers: one
 * of everything, two tiles and a tail, primes, and fewer or more keys than queries. */
static const int64_t attention_extents[][6] = {
    {1, 1, 1, 64},        {1, 2, 1, 16, 37},    {1, 1, 1, 3, 200},  {2, 1, 37, 3, 1},   {1, 1, 2, 1},
    {1, 2, 15, 7},        {1, 2, 16, 16},       {2, 3, 17, 6},      {1, 1, 63, 64},     {1, 3, 64, 64},
    {1, 1, 65, 64},       {1, 1, 127, 1},       {1, 1, 128, 80},    {1, 2, 129, 96},    {1, 5, 131, 17},
    {1, 1, 100, 20, 259}, {1, 1, 259, 20, 100}, {1, 1, 64, 16, 65}, {1, 1, 65, 16, 64}, {1, 1, 48, 128, 40},
    {1, 1, 66, 200},      {1, 1, 67, 256, 129}, {2, 2, 81, 24, 70},
};

static void run_named(void (*run)(void), int seeds, const int64_t *extents)
{
    for (int seed = 1; seed <= seeds && !(td_gpu_small() && extents[0] > 5000); seed++) {
        td_fuzz_seed((uint64_t)seed);
        fuzz_name_extents(extents);
        run();
        fuzz_name_extents(NULL);
        fuzz_finish();
    }
}

TD_BODY(named_shapes_match_float64_and_stay_in_bounds)
{
    for (size_t i = 0; i < sizeof all_named / sizeof *all_named; i++)
        run_named(all_named[i].run, all_named[i].seeds, all_named[i].extents);
    for (size_t i = 0; i < sizeof attention_extents / sizeof *attention_extents; i++) {
        run_named(fuzz_naive, 8, attention_extents[i]);
        run_named(fuzz_flash, 8, attention_extents[i]);
    }
}

/* After a failure. */
static int say_which_shape(void **state)
{
    (void)state;
    print_message("    the last shape was %s\n", td_fuzz_description());
    return 0;
}

TD_BODY(random_shapes_match_float64_and_stay_in_bounds)
{
    int64_t counts[KINDS] = {0};
    double worst[KINDS] = {0};

    fuzz_worst(); /* drops the errors of the judge's test */
    td_fuzz_begin(arguments, argument);
    while (td_fuzz_next()) {
        const int kind = drawn_kind();

        kinds[kind].run();
        fuzz_finish();
        counts[kind]++;
        worst[kind] = fmax(worst[kind], fuzz_worst());
    }
    for (int i = 0; i < KINDS; i++)
        print_message("    %-14s %6" PRId64 " cases, at worst %.2f of the allowance\n", kinds[i].name,
                      counts[i], worst[i]);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fuzz_judge_accepts_f32_and_refuses_mistakes),
        cmocka_unit_test_teardown(named_shapes_match_float64_and_stay_in_bounds, say_which_shape),
        cmocka_unit_test_teardown(random_shapes_match_float64_and_stay_in_bounds, td_fuzz_teardown),
    };

    arguments = argc;
    argument = argv;
    fuzz_open(FUZZ_DEVICE);
    return cmocka_run_group_tests_name("fuzz_shapes " FUZZ_DEVICE, tests, NULL, NULL);
}
