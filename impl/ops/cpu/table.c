#include "ops/table.h"

#include "ops/cpu/cpu.h"

const td_ops td_ops_cpu = {
    .device = "cpu",
    .gemm_work_bytes = td_cpu_gemm_work_bytes,
    .gemm = td_cpu_gemm,
    .embedding_forward = td_cpu_embedding_forward,
    .embedding_backward_work_bytes = td_cpu_embedding_backward_work_bytes,
    .embedding_backward = td_cpu_embedding_backward,
    .rmsnorm_forward = td_cpu_rmsnorm_forward,
    .rmsnorm_backward_work_bytes = td_cpu_rmsnorm_backward_work_bytes,
    .rmsnorm_backward = td_cpu_rmsnorm_backward,
    .heads_split = td_cpu_heads_split,
    .heads_merge = td_cpu_heads_merge,
    .rope_table = td_cpu_rope_table,
    .rope_forward = td_cpu_rope_forward,
    .rope_backward = td_cpu_rope_backward,
    .silu_mul_forward = td_cpu_silu_mul_forward,
    .silu_mul_backward = td_cpu_silu_mul_backward,
    .residual_add = td_cpu_residual_add,
    .softmax_forward = td_cpu_softmax_forward,
    .softmax_backward = td_cpu_softmax_backward,
    .cross_entropy_forward = td_cpu_cross_entropy_forward,
    .cross_entropy_backward = td_cpu_cross_entropy_backward,
    .adamw_step = td_cpu_adamw_step,
    .sgd_step = td_cpu_sgd_step,
};
