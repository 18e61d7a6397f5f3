/* A device without kernels refuses each operation and names it, and changes no output. tests/fuzz_api_ops.c
 * and tests/fuzz_api_updates.c test refusals on the CPU. */
#include "support/ops_kit.h"

/* If a test asks for it, this program gives ops.c a device of another kind. A build with CUDA has all
 * kernels. */
static bool pretend_cuda;

td_device_kind __real_td_device_kind_of(const td_device *dev);
td_device_kind __wrap_td_device_kind_of(const td_device *dev)
{
    return pretend_cuda ? TD_DEVICE_CUDA : __real_td_device_kind_of(dev);
}

TD_TEST(gaps_are_named)
{
    static _Alignas(16) float in[64], out[64];
    static int64_t ids[8];
    td_gemm_shape gemm_shape = {
        .batch = 1, .m = 1, .n = 1, .k = 1, .alpha = 1, .dtype = TD_F32, .out_dtype = TD_F32};
    td_embedding_shape embedding_shape = {1, 1, 1, TD_F32, 0};
    td_rmsnorm_shape rmsnorm_shape = {.rows = 1, .cols = 1, .eps = 1e-5f, .dtype = TD_F32};
    td_heads_shape heads_shape = {1, 1, 1, 2, 0, TD_F32};
    td_rows_shape rows_shape = {1, 1, 0, TD_F32};
    td_softmax_shape softmax_shape = {1, 1, 0, TD_F32};
    td_cross_entropy_shape cross_entropy_shape = {1, 1, TD_F32};
    td_update_tensors tensors = {.count = 1, .dtype = TD_F16, .p = out, .g = in, .m = out, .v = out};
    void *const there = (void *)(uintptr_t)256; /* an address that the host must not read */
    td_device *d = ops_dev;
    size_t bytes;

    memset(out, 0xFF, sizeof out);
    pretend_cuda = true;
#define GAP(call, op) td_assert_refused(call, TD_UNSUPPORTED, op ": this build has no kernel for it on cuda")
    GAP(td_gemm_work_bytes(d, &gemm_shape, &bytes), "gemm");
    GAP(td_gemm(d, &gemm_shape, in, in, out, in), "gemm");
    GAP(td_embedding_forward(d, &embedding_shape, ids, in, out), "embedding_forward");
    GAP(td_embedding_backward_work_bytes(d, &embedding_shape, &bytes), "embedding_backward");
    GAP(td_embedding_backward(d, &embedding_shape, ids, in, false, out, in), "embedding_backward");
    GAP(td_rmsnorm_forward(d, &rmsnorm_shape, in, in, out, out), "rmsnorm_forward");
    GAP(td_residual_rmsnorm_forward(d, &rmsnorm_shape, in, in, in, out, out, out),
        "residual_rmsnorm_forward");
    GAP(td_rmsnorm_backward_work_bytes(d, &rmsnorm_shape, &bytes), "rmsnorm_backward");
    GAP(td_rmsnorm_backward(d, &rmsnorm_shape, in, in, in, in, false, out, NULL, false, out, in),
        "rmsnorm_backward");
    GAP(td_rope_table(d, 1, 2, 1e4, out, out), "rope_table");
    GAP(td_qkv_split_forward(d, &heads_shape, in, in, in, out, out, out), "qkv_split_forward");
    GAP(td_qkv_split_backward(d, &heads_shape, in, in, in, in, in, out), "qkv_split_backward");
    GAP(td_silu_mul_forward(d, &rows_shape, in, in, out), "silu_mul_forward");
    GAP(td_silu_mul_backward(d, &rows_shape, in, in, in, out, out, NULL), "silu_mul_backward");
    GAP(td_round(d, 1, TD_F32, in, TD_F16, out), "round");
    GAP(td_split(d, 1, in, out, out), "split");
    GAP(td_join(d, 1, in, in, out), "join");
    GAP(td_residual_add(d, 1, TD_F32, in, in, out), "residual_add");
    GAP(td_softmax_forward(d, &softmax_shape, in, out), "softmax_forward");
    GAP(td_softmax_backward(d, &softmax_shape, 1.0f, in, in, out), "softmax_backward");
    GAP(td_cross_entropy_work_bytes(d, &cross_entropy_shape, &bytes), "cross_entropy");
    GAP(td_cross_entropy_forward(d, &cross_entropy_shape, in, ids, out, out, in), "cross_entropy");
    GAP(td_cross_entropy_backward(d, &cross_entropy_shape, in, ids, in, 1.0f, out), "cross_entropy_backward");
    GAP(td_global_norm_work_bytes(d, 1, TD_F32, &bytes), "global_norm");
    GAP(td_global_norm(d, 1, TD_F32, in, out, in), "global_norm");
    GAP(td_update_begin(d, (td_update_state *)out, 1), "update_begin");
    GAP(td_update_clip(d, 1, in, (td_update_state *)out), "update_clip");
    GAP(td_assign(d, out, in, 8), "assign");
    GAP(td_adamw_update(d, there, there, &tensors), "adamw_update");
    GAP(td_sgd_update(d, there, there, &tensors), "sgd_update");
#undef GAP
    pretend_cuda = false;
    for (size_t i = 0; i < sizeof out; i++)
        assert_int_equal(((unsigned char *)out)[i], 0xFF);
}

int ops_refusals_group(void)
{
    return td_run_tests("refusals", NULL, NULL);
}
