/** Compares the arithmetic with numbers computed by hand, and tests every refusal of accounting.h.
 *
 * Expected values are literals that a reader of the handout can compute on paper. None comes from the
 * formula under test. */
#include "accounting/accounting.h"

#include "support/compare.h"
#include "support/test.h"

#include <math.h>

static const double mib = 1024.0 * 1024.0;
static const double gib = 1024.0 * 1024.0 * 1024.0;

/** Fails unless |got - want| <= within; NaN fails. */
static void assert_near(const char *name, double got, double want, double within)
{
    if (!(fabs(got - want) <= within))
        fail_msg("%s is %.17g, needs %.17g within %g", name, got, want, within);
}

static const td_account_model small = {768, 3072, 12, 12, 10000};
static const td_account_model xl = {1600, 6400, 48, 25, 10000};
static const td_account_model two7 = {2560, 10240, 32, 32, 10000};
static const td_account_model eight = {4096, 11008, 34, 32, 151936};

TD_TEST(sizes_of_the_handout)
{
    static const struct {
        const char *name;
        td_account_model model;
        int64_t parameters, tensors;
        double mib, tflop; /* f32; one forward pass of batch 4, context 512 */
    } rows[] = {
        {"small", {768, 3072, 12, 12, 10000}, 128625408, 111, 490.67, 0.534},
        {"medium", {1024, 4096, 24, 16, 10000}, 423183360, 219, 1614.32, 1.794},
        {"large", {1280, 5120, 36, 20, 10000}, 969411840, 327, 3698.01, 4.111},
        {"xl", {1600, 6400, 48, 25, 10000}, 1998235200, 435, 7622.66, 8.441},
        {"2.7B", {2560, 10240, 32, 32, 10000}, 3406809600, 291, 12995.95, 14.192},
        {"10B", {4608, 12288, 50, 36, 10000}, 12832823808, 453, 48953.34, 53.339},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        td_account_parameters p;
        td_account_flops f;

        memset(&p, 0xFF, sizeof p);
        memset(&f, 0xFF, sizeof f);
        td_assert_ok(td_account_model_parameters(&rows[i].model, &p));
        assert_int_equal(p.total, rows[i].parameters);
        assert_int_equal(p.tensors, rows[i].tensors);
        assert_int_equal(p.embedding + p.attention + p.ffn + p.norms + p.head, p.total);
        assert_near(rows[i].name, (double)p.total * 4.0 / mib, rows[i].mib, 0.005);
        td_assert_ok(td_account_model_flops(&rows[i].model, 4, 512, false, false, &f));
        assert_near(rows[i].name, f.forward_matmul / 1e12, rows[i].tflop, 0.0005);
        assert_near(rows[i].name, f.backward_matmul, 2.0 * f.forward_matmul, 1.0);
    }
}

TD_TEST(parts_of_a_tiny_model)
{
    static const td_account_model tiny = {4, 6, 2, 2, 10};
    td_account_parameters p;
    td_account_flops f;

    td_assert_ok(td_account_model_parameters(&tiny, &p));
    assert_int_equal(p.embedding, 40);
    assert_int_equal(p.attention, 128);
    assert_int_equal(p.ffn, 144);
    assert_int_equal(p.norms, 20);
    assert_int_equal(p.head, 40);
    assert_int_equal(p.total, 372);
    assert_int_equal(p.tensors, 21);

    /* Batch 3, context 5: 15 tokens; 2 layers x 2 heads x 3 x 25 = 300 scores of head size 2. */
    td_assert_ok(td_account_model_flops(&tiny, 3, 5, false, false, &f));
    assert_near("projections", f.projections, 3840, 0);
    assert_near("products", f.attention_products, 2400, 0);
    assert_near("ffn", f.ffn, 4320, 0);
    assert_near("head", f.head, 1200, 0);
    assert_near("softmax", f.softmax, 1500, 0);
    assert_near("forward", f.forward_matmul, 11760, 0);
    assert_near("backward", f.backward_matmul, 23520, 0);

    td_assert_ok(td_account_model_flops(&tiny, 3, 5, true, true, &f));
    assert_near("halved products", f.attention_products, 1200, 0);
    assert_near("halved softmax", f.softmax, 750, 0);
    assert_near("flash backward", f.backward_matmul, 18720 + 3000, 0);
}

TD_TEST(the_8b_model_of_2026)
{
    td_account_parameters p;
    td_account_flops f;
    td_account_activations a;
    double mfu = 0;

    td_assert_ok(td_account_model_parameters(&eight, &p));
    assert_int_equal(p.total, 8125698048);
    assert_int_equal(p.tensors, 309);
    assert_near("16 bytes a parameter", (double)p.total * 16.0 / gib, 121.1, 0.05);
    td_assert_ok(td_account_model_activations(&eight, 1, 32768, 2, &a));
    assert_near("bf16 logits", (double)a.logits / gib, 9.27, 0.005);
    td_assert_ok(td_account_model_flops(&eight, 2, 32768, true, true, &f));
    double step = f.forward_matmul + f.backward_matmul;
    assert_near("PFLOP a step", step / 1e15, 5.0, 0.05);
    /* 3837 ms over two GPUs is 657 TFLOP/s each; of a peak of 2250 that is 29.2 %. */
    td_assert_ok(td_account_mfu(step / 2, 3.837, 2250e12, &mfu));
    assert_near("MFU", mfu, 0.292, 0.0005);
}

TD_TEST(activations_and_training_memory)
{
    static const int64_t contexts[] = {128, 256, 512};
    static const double residual[] = {5, 10, 20}, scores[] = {8, 32, 128}, ffn[] = {20, 40, 80},
                        logits[] = {19.53, 39.06, 78.13};
    td_account_fsdp f;
    td_account_training t;
    int64_t copies = 0, bytes = 0;

    for (int i = 0; i < 3; i++) {
        td_account_activations a;
        td_assert_ok(td_account_model_activations(&two7, 4, contexts[i], 4, &a));
        assert_near("residual MiB", (double)a.residual / mib, residual[i], 0);
        assert_near("scores MiB", (double)a.scores / mib, scores[i], 0);
        assert_near("ffn MiB", (double)a.ffn / mib, ffn[i], 0);
        assert_near("logits MiB", (double)a.logits / mib, logits[i], 0.005);
    }

    td_assert_ok(td_account_training_memory(3406809600, 4, 4, 4, &t));
    assert_near("2.7B parameters GiB", (double)t.parameters / gib, 12.69, 0.005);
    assert_int_equal(t.gradients, t.parameters);
    assert_int_equal(t.optimizer_state, 2 * t.parameters);
    assert_near("2.7B training GiB", (double)t.total / gib, 50.8, 0.05);
    td_assert_ok(td_account_training_memory(1998235200, 4, 4, 4, &t));
    assert_near("xl parameters GiB", (double)t.parameters / gib, 7.44, 0.005);
    assert_near("xl state GiB", (double)t.optimizer_state / gib, 14.89, 0.005);
    assert_near("xl sum GiB", (double)t.total / gib, 29.78, 0.005);
    td_assert_ok(td_account_training_memory(10, 2, 2, 4, &t)); /* bf16 weights, f32 moments */
    assert_int_equal(t.parameters, 20);
    assert_int_equal(t.gradients, 20);
    assert_int_equal(t.optimizer_state, 80);
    assert_int_equal(t.total, 120);

    /* xl on 2 ranks: 1,998,235,200 elements with 16 bytes each. 155,200 of them are in norms. */
    td_assert_ok(td_account_fsdp_memory(&xl, 2, 4, 4, 4, &f));
    assert_int_equal(f.block, 4 * 1600 * 1600 + 3 * 1600 * 6400);
    assert_int_equal(f.elements, (1998235200 - 155200) / 2 + 155200);
    assert_int_equal(f.rank.total, 16 * f.elements);
    assert_int_equal(f.saved, 8 * (INT64_C(1998235200) - 155200));
    assert_int_equal(f.shared, 4 * (2 * f.block / 2 + 16000000 / 2 + 155200));
    /* Embedding, three blocks and head of 7 elements each on 5 ranks, and 7 norms. */
    td_assert_ok(td_account_fsdp_memory(&(td_account_model){1, 1, 3, 1, 7}, 5, 4, 2, 4, &f));
    assert_int_equal(f.block, 7);
    assert_int_equal(f.elements, 2 + 3 * 2 + 2 + 7);
    assert_int_equal(f.rank.parameters, 4 * f.elements);
    assert_int_equal(f.rank.gradients, 2 * f.elements);
    assert_int_equal(f.shared, 2 * (2 * 2 + 2 + 7));
    assert_int_equal(f.rank.optimizer_state, 8 * f.elements);
    assert_int_equal(f.saved, 14 * (7 + 3 * 7 + 7 + 7) - f.rank.total);
    td_assert_ok(td_account_fsdp_memory(&(td_account_model){1, 1, 1, 1, 7}, 5, 4, 2, 4, &f));
    assert_int_equal(f.shared, 2 * (2 + 2 + 3)); /* one layer needs one place */
    td_assert_ok(td_account_fsdp_memory(&xl, 1, 4, 4, 4, &f));
    assert_int_equal(f.shared, f.rank.gradients); /* one rank reduces nothing */

    /* small: (128,625,408 - 7,680,000 - 19,200) x 2 bytes. */
    td_assert_ok(td_account_autocast_copies(&small, 2, &copies));
    assert_int_equal(copies, 241852416);
    /* 2.7B: the f32 weights and the copies have 19 GiB. bf16 inference was measured to need as much. */
    td_assert_ok(td_account_autocast_copies(&two7, 2, &copies));
    assert_near("2.7B bf16 inference GiB", (double)(3406809600 * 4 + copies) / gib, 18.99, 0.005);

    /* 2026 xl at 4 x 2048: a boundary has 80 MiB, a block 3686 MiB. */
    static const int64_t segments[] = {1, 2, 4, 5, 32};
    static const int64_t peaks[] = {32 * 80 + 3686, 16 * 80 + 2 * 3686, 8 * 80 + 4 * 3686, 7 * 80 + 5 * 3686,
                                    80 + 32 * 3686};
    for (int i = 0; i < 5; i++) {
        td_assert_ok(td_account_checkpointing(32, segments[i], 80, 3686, &bytes));
        assert_int_equal(bytes, peaks[i]);
    }
}

TD_TEST(what_a_block_keeps)
{
    const td_account_model model = {.d_model = 16, .d_ff = 24, .layers = 3, .heads = 4, .vocab = 7};
    const int64_t tokens = 5 * 6, stream = tokens * 16 * 4, wide = tokens * 16 * 2, ffn = tokens * 24 * 2;
    td_account_block block;

    td_assert_ok(td_account_block_activations(&model, 5, 6, 2, 4, 1, &block));
    assert_int_equal(block.input, stream);
    assert_int_equal(block.most, 2 * stream + 4 * wide + 2 * ffn + tokens * 4 * 4);
    assert_int_equal(block.all, block.most + 2 * wide + 2 * tokens * 4 + ffn);
    assert_int_equal(block.final, stream + wide + tokens * 4);
    assert_int_equal(block.attention, stream + wide + tokens * 4 * 4);
    td_assert_ok(td_account_block_activations(&model, 5, 6, 2, 4, 0, &block));
    assert_int_equal(block.most, 2 * stream + 4 * wide + 2 * ffn + tokens * 6 * 4 * 2);
    td_assert_ok(td_account_block_activations(&model, 5, 6, 2, 4, 2, &block));
    assert_int_equal(block.most, 2 * stream + 4 * wide + 2 * ffn + tokens * 4 * 2 * 4);
}

TD_TEST(attention_of_the_handout)
{
    static const int64_t seqs[] = {256, 1024, 4096, 8192, 16384};
    static const double m[] = {2, 32, 512, 2048, 8192};
    td_account_attention a;

    for (int i = 0; i < 5; i++) {
        td_assert_ok(td_account_attention_memory(8, seqs[i], seqs[i], 64, 4, 2, false, &a));
        assert_near("M MiB", (double)a.matrix / mib, m[i], 0);
        assert_near("forward peak MiB", (double)a.forward_peak / mib, 4 * m[i], 0);
        assert_near("backward peak MiB", (double)a.backward_peak / mib, 8 * m[i], 0);
        /* 4 B S d e = 4 x 8 x S x 64 x 4 = 8192 S bytes, and L = 32 S bytes. */
        assert_int_equal(a.saved_naive, 2 * a.matrix + 8192 * seqs[i]);
        assert_int_equal(a.saved_flash, (8192 + 32) * seqs[i]);
        assert_int_equal(a.mask, 0);
    }
    assert_near("64 GiB at 16384", (double)a.backward_peak / gib, 64, 0);
    assert_near("products to softmax", a.forward_flops / a.softmax_flops, 51.2, 0);

    /* By hand, batch 2, 3 queries, 5 keys, head size 7, bf16, one matrix kept, causal. */
    td_assert_ok(td_account_attention_memory(2, 3, 5, 7, 2, 1, true, &a));
    assert_int_equal(a.matrix, 60);
    assert_int_equal(a.mask, 15);
    assert_int_equal(a.saved_naive, 60 + 448);
    assert_int_equal(a.saved_flash, 448 + 24);
    assert_near("forward", a.forward_flops, 420, 0);
    assert_near("flash backward", a.backward_flops, 1050, 0);
    assert_near("naive backward", a.backward_flops_naive, 1680, 0);
    assert_near("softmax", a.softmax_flops, 75, 0);

    /* The leaderboard of 2025: 16 heads, 16384, 64, causal. */
    td_assert_ok(td_account_attention_memory(16, 16384, 16384, 64, 2, 1, true, &a));
    assert_near("TFLOP forward", a.forward_flops / 1e12, 0.5498, 5e-5);
    assert_near("TFLOP in all", (a.forward_flops + a.backward_flops) / 1e12, 1.924, 5e-4);
}

TD_TEST(attention_lengths_that_do_not_fit)
{
    static const struct {
        int64_t batch, head_dim, element_bytes, memory_bytes, seq;
    } rows[] = {
        {8, 64, 4, 80LL << 30, 32768},                   /* 64 GiB at 16384 and 256 at 32768 */
        {8, 64, 4, 24LL << 30, 16384},                   /* 16 GiB at 8192 */
        {8, 64, 4, 12LL << 30, 8192},                    /* 4 GiB at 4096 */
        {8, 64, 2, 80LL << 30, 32768},                   /* 128 GiB at 32768 in bf16 */
        {1, 16, 4, 8LL * 4 * 64 * (64 + 16), 128},       /* exactly full at 64 still fits */
        {1, 16, 4, 8LL * 4 * 64 * (64 + 16) - 1, 64},    /* one byte less does not */
        {1, 1, 1, 1, 1},                                 /* nothing fits */
        {1, 1, 1, INT64_MAX, 1 << 30},                   /* 8 x 2^60 is above 2^63 - 1 */
        {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX, 1}, /* products far beyond 2^64 */
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t seq = -1;
        td_assert_ok(td_account_attention_oom(rows[i].batch, rows[i].head_dim, rows[i].element_bytes,
                                              rows[i].memory_bytes, &seq));
        assert_int_equal(seq, rows[i].seq);
    }
}

TD_TEST(ddp_overhead_model)
{
    td_account_ddp_optimum best;
    double seconds = 0, fewer = 0, more = 0;

    td_assert_ok(td_account_ddp_optimum_find(7.993e9, 20e9, 50e-6, &best));
    assert_near("buckets", best.buckets, 89, 0.5);
    assert_near("MB a bucket", best.bucket_bytes / 1e6, 89, 0.5);
    assert_near("ms", best.seconds * 1e3, 8.9, 0.05);
    td_assert_ok(td_account_ddp_optimum_find(7.993e9, 230e9, 30e-6, &best));
    assert_near("buckets", best.buckets, 34, 0.5);
    assert_near("MB a bucket", best.bucket_bytes / 1e6, 235, 0.5);
    assert_near("ms", best.seconds * 1e3, 2.0, 0.05);

    /* 100 bytes, 10 bytes/s, 2 s a call: 5 buckets take 2 + 10 s. */
    td_assert_ok(td_account_ddp_overhead(100, 10, 2, 5, &seconds));
    assert_near("seconds", seconds, 12, 1e-12);
    td_assert_ok(td_account_ddp_optimum_find(100, 10, 2, &best));
    td_assert_ok(td_account_ddp_overhead(100, 10, 2, best.buckets, &seconds));
    td_assert_ok(td_account_ddp_overhead(100, 10, 2, best.buckets * 0.9, &fewer));
    td_assert_ok(td_account_ddp_overhead(100, 10, 2, best.buckets * 1.1, &more));
    assert_near("the optimum's overhead", best.seconds, seconds, 1e-12);
    assert_true(fewer > seconds && more > seconds);
}

static const td_account_xxl xxl = {16384, 53248, 126};

TD_TEST(communication_accounting)
{
    td_account_xxl_memory m;
    td_account_mesh_batch b;
    int64_t devices = 0;
    double bytes = 0;

    td_assert_ok(td_account_xxl_memory_of(&xxl, &m));
    assert_int_equal(m.parameters, 219848638464);
    assert_near("TB", (double)m.state_bytes / 1e12, 3.518, 0.0005);
    assert_near("GiB", (double)m.state_bytes / gib, 3276, 0);
    assert_near("H100 of 80 GB", ceil(m.devices_80gb), 44, 0);
    assert_near("H100 of 80 GiB", ceil(m.devices_80gib), 41, 0);
    assert_int_equal(m.saved_bytes_per_token, 17547264);

    td_assert_ok(td_account_xxl_devices(&xxl, 95e9, &devices));
    assert_int_equal(devices, 38);
    /* The number that divides the state without a rest, and one more device if each has a byte less. */
    assert_int_equal(m.state_bytes % 8, 0);
    td_assert_ok(td_account_xxl_devices(&xxl, (double)m.state_bytes / 8, &devices));
    assert_int_equal(devices, 8);
    td_assert_ok(td_account_xxl_devices(&xxl, (double)m.state_bytes / 8 - 1, &devices));
    assert_int_equal(devices, 9);
    td_assert_ok(td_account_xxl_devices(&xxl, 1e30, &devices));
    assert_int_equal(devices, 1);
    /* One block of 2 x 3: 12 parameters, 192 bytes of state, 10 bytes a token. 4 tokens on 2 devices:
     * (192 + 20) / 2 + 20. */
    td_assert_ok(td_account_xxl_fsdp_bytes(&(td_account_xxl){2, 3, 1}, 4, 2, &bytes));
    assert_near("bytes a device", bytes, 126, 0);

    /* alpha 2556 is C = 4.6e14 FLOP/s over W = 2 x 9e10 bytes/s: both directions of a link. */
    td_account_mesh mesh = {.flops_per_second = 4.6e14,
                            .bytes_per_second = 1.8e11,
                            .fsdp = 16,
                            .tensor = 4,
                            .fsdp_axes = 2,
                            .tensor_axes = 1};
    td_assert_ok(td_account_mesh_batch_of(&xxl, &mesh, &b));
    assert_near("alpha", b.alpha, 2556, 0.5);
    assert_near("FSDP tokens", b.fsdp_tokens, 20444, 0.5);
    assert_near("FSDP tokens a device", b.fsdp_tokens_per_device, 319, 0.5);
    assert_near("TP d_ff", b.tensor_d_ff, 10222, 0.5);
    assert_true(b.tensor_met);
    assert_near("shared wire tokens", b.shared_wire_tokens, 25302, 0.5);
    assert_near("shared wire tokens a device", b.shared_wire_tokens_per_device, 395, 0.5);
    assert_near("optimum tokens a device", b.optimum_tokens_per_device, 61, 0.5);

    mesh.tensor = 32; /* needs d_ff 81,778: tensor parallelism alone needs all of the wire's time */
    td_assert_ok(td_account_mesh_batch_of(&xxl, &mesh, &b));
    assert_false(b.tensor_met);
    assert_true(isinf(b.shared_wire_tokens) && b.shared_wire_tokens > 0);
    assert_true(isinf(b.shared_wire_tokens_per_device));
}

TD_TEST(parallelism_calculations)
{
    /* B 100, D 10, F 20, N 4, C 1000, W 50: W / C = 0.05, B D F = 20,000, (N - 1) / (N W) = 0.015. */
    static const td_account_parallel p = {100, 10, 20, 4, 1000, 50};
    td_account_parallel_times t;
    double overlapped = 0, shared = 0;

    td_assert_ok(td_account_parallel_times_of(TD_ACCOUNT_DATA, &p, &t));
    assert_near("forward compute", t.forward_compute, 30, 1e-12);
    assert_near("backward compute", t.backward_compute, 60, 1e-12);
    assert_near("data forward", t.forward_comm, 0, 0);
    assert_near("data backward", t.backward_comm, 36, 1e-12);
    assert_true(isinf(t.forward_devices));
    assert_near("data devices", t.backward_devices, 6, 1e-12);

    td_assert_ok(td_account_parallel_times_of(TD_ACCOUNT_FSDP, &p, &t));
    assert_near("FSDP forward", t.forward_comm, 18, 1e-12);
    assert_near("FSDP backward", t.backward_comm, 36, 1e-12);
    assert_near("FSDP devices", t.forward_devices, 6, 1e-12);
    assert_near("FSDP devices, backward", t.backward_devices, 6, 1e-12);

    td_assert_ok(td_account_parallel_times_of(TD_ACCOUNT_TENSOR, &p, &t));
    assert_near("TP compute", t.backward_compute, 60, 1e-12);
    assert_near("TP forward", t.forward_comm, 60, 1e-12);
    assert_near("TP backward", t.backward_comm, 60, 1e-12);
    assert_near("TP devices", t.forward_devices, 2.5, 1e-12);
    assert_near("TP devices, backward", t.backward_devices, 4, 1e-12);

    td_assert_ok(td_account_fsdp_tensor_devices(&p, &overlapped, &shared));
    assert_near("overlapped", overlapped, 15, 1e-12);                  /* (1 + 5)(1 + 1.5) */
    assert_near("shared wire", shared, 1120.0 * 1120 / 192000, 1e-12); /* (600 + 120 + 400)^2 / (96 B F) */
}

/** At the largest N, compute and communication take the same time. */
TD_TEST(largest_devices_balance_the_times)
{
    static const td_account_strategy strategies[] = {TD_ACCOUNT_DATA, TD_ACCOUNT_FSDP, TD_ACCOUNT_TENSOR};

    for (int i = 0; i < 3; i++) {
        td_account_parallel p = {65536, 4096, 11008, 1, 9.9e14, 4.5e11};
        td_account_parallel_times at_one, t;
        td_assert_ok(td_account_parallel_times_of(strategies[i], &p, &at_one));
        assert_near("communication of one device", at_one.backward_comm, 0, 0);
        p.devices = at_one.backward_devices;
        td_assert_ok(td_account_parallel_times_of(strategies[i], &p, &t));
        assert_near("backward", t.backward_comm, t.backward_compute, 1e-9 * t.backward_compute);
        if (strategies[i] != TD_ACCOUNT_DATA) {
            p.devices = at_one.forward_devices;
            td_assert_ok(td_account_parallel_times_of(strategies[i], &p, &t));
            assert_near("forward", t.forward_comm, t.forward_compute, 1e-9 * t.forward_compute);
        }
    }
}

TD_TEST(ring_all_reduce)
{
    double ring = -1, alternate = -1;

    td_assert_ok(td_account_ring_all_reduce(1000, 4, 10, &ring, &alternate));
    assert_near("ring", ring, 150, 1e-12);
    assert_near("alternate", alternate, 300, 1e-12);
    td_assert_ok(td_account_ring_all_reduce(1000, 2, 10, &ring, &alternate));
    assert_near("ring of two", ring, 100, 1e-12);
    assert_near("alternate of two", alternate, 100, 1e-12);
    td_assert_ok(td_account_ring_all_reduce(1000, 1, 10, &ring, &alternate));
    assert_near("ring of one", ring, 0, 0);
    assert_near("alternate of one", alternate, 0, 0);
}

/* 134,217,728 bytes among 8 ranks in 963.1 us. all_reduce_perf of nccl-tests prints 139.36 and 243.88 for
 * them. */
TD_TEST(bandwidths_agree_with_nccl_tests)
{
    double algorithm = -1, bus = -1;
    char line[64];

    td_assert_ok(td_account_all_reduce_bandwidth(134217728, 8, 963.1e-6, &algorithm, &bus));
    snprintf(line, sizeof line, "%.2f %.2f", algorithm / 1e9, bus / 1e9);
    assert_string_equal(line, "139.36 243.88");
    td_assert_ok(td_account_all_reduce_bandwidth(1000, 2, 10, &algorithm, &bus));
    assert_true(algorithm == 100 && bus == 100);
    td_assert_ok(td_account_all_reduce_bandwidth(1000, 1, 10, &algorithm, &bus));
    assert_true(algorithm == 100 && bus == 0);
}

TD_TEST(costs_of_operations)
{
    td_cost cost;

    td_assert_ok(td_gemm_cost(2, 3, 5, 7, TD_BF16, &cost));
    assert_near("gemm flops", cost.flops, 420, 0);
    assert_near("gemm bytes", cost.bytes, 2 * 2 * (21 + 35 + 15), 0);
    td_assert_ok(td_gemm_cost(1, 512, 3072, 768, TD_F32, &cost));
    assert_near("GFLOP of 512 x 3072 x 768", cost.flops / 1e9, 2.416, 0.0005);

    td_assert_ok(td_softmax_cost(4 * 32 * 512, 512, TD_F32, &cost)); /* the handout's 0.168 GFLOP */
    assert_true(cost.flops == 65536.0 * 2558 && cost.bytes == 2.0 * 65536 * 512 * 4);
    td_assert_ok(td_flash_cost(1, 16, 16384, 16384, 64, TD_BF16, true, false, &cost));
    assert_near("flash TFLOP", cost.flops / 1e12, 0.5498, 5e-5);
    /* Four tensors of 32 MiB and a logsumexp of 1 MiB. */
    assert_near("flash MiB", cost.bytes / mib, 129, 0);
    td_assert_ok(td_flash_cost(1, 16, 16384, 16384, 64, TD_BF16, true, true, &cost));
    assert_near("flash backward TFLOP", cost.flops / 1e12, 1.3744, 5e-5);
    assert_near("flash backward MiB", cost.bytes / mib, 257, 0);
    td_assert_ok(td_flash_cost(2, 3, 4, 5, 6, TD_F32, false, false, &cost));
    assert_near("ragged flops", cost.flops, 2880, 0);
    assert_near("ragged bytes", cost.bytes, 4 * (2 * 144 + 2 * 180 + 24), 0);

    td_assert_ok(td_adamw_cost(10, TD_F32, &cost));
    assert_near("adamw flops", cost.flops, 140, 0);
    assert_near("adamw bytes f32", cost.bytes, 280, 0);
    td_assert_ok(td_adamw_cost(10, TD_BF16, &cost));
    assert_near("adamw bytes bf16", cost.bytes, 220, 0);
}

/* ---- refusals ---- */

#define BAD(call, words) td_assert_refused(call, TD_BAD_ARGUMENT, words)

/** A sum that may be above 2^63 - 1 is refused by name, and the output does not change. */
TD_TEST(refused_overflow)
{
    const int64_t half = INT64_MAX / 2;
    td_account_parameters p, p_before;
    td_account_fsdp fsdp;
    td_account_training t;
    td_account_attention at;
    td_cost cost;
    int64_t bytes = 42;

    memset(&p, 0x5A, sizeof p);
    p_before = p;
    BAD(td_account_model_parameters(&(td_account_model){1, 1, INT64_MAX / 8, 1, 1}, &p),
        "parameters: the sum");
    BAD(td_account_model_parameters(&(td_account_model){1, 1, 1, 1, half + 1}, &p), "parameters: the sum");
    BAD(td_account_model_parameters(&(td_account_model){1, INT64_MAX / 3, 1, 1, half}, &p),
        "parameters: the sum");
    assert_memory_equal(&p, &p_before, sizeof p);

    BAD(td_account_training_memory(half, 1, 1, 1, &t), "training bytes: the sum");
    BAD(td_account_fsdp_memory(&small, 2, INT64_MAX, 1, 1, &fsdp), "parameter bytes");
    BAD(td_account_checkpointing(1, 1, INT64_MAX, 1, &bytes), "activation bytes: the sum");
    BAD(td_account_attention_memory(1, 1, 1, half / 2 + 1, 1, 1, false, &at),
        "bytes of q, k, v and o: the sum");
    BAD(td_account_attention_memory(1, 1, 1, 1, 1, INT64_MAX, false, &at), "saved bytes: the sum");
    BAD(td_account_attention_memory(INT64_MAX / 4, 1, 1, 1, 1, 1, false, &at), "saved bytes: the sum");
    BAD(td_account_xxl_devices(&xxl, 1e-300, &bytes), "device_bytes is 1e-300");
    BAD(td_gemm_cost(half / 4, 1, 1, 1, TD_F32, &cost), "bytes moved: the sum");
    BAD(td_flash_cost(1, 1, 1, 1, half / 8 + 1, TD_F32, false, false, &cost), "bytes moved: the sum");
    assert_int_equal(bytes, 42);
}

TD_MAIN("accounting", NULL, NULL)
