/** The arithmetic that reports quote: parameters, FLOPs, bytes, and models of communication.
 *
 * Pure functions. The comment of each function has its formula. Bytes are exact counts; 1 MiB = 2^20 bytes.
 * FLOPs count a multiply-add as 2 and are doubles, exact up to 2^53.
 *
 * Letters: V vocab, d d_model, L layers, B batch, H heads, S context or seq, e element_bytes, N devices.
 *
 * TD_BAD_ARGUMENT, for all functions: a NULL; an extent below 1; a rate that is not finite or not above 0; a
 * count of elements or bytes beyond 2^63 - 1. The output is then unchanged. */
#ifndef TD_ACCOUNTING_ACCOUNTING_H
#define TD_ACCOUNTING_ACCOUNTING_H

#include "base/dtype.h"

TD_BEGIN_DECLS

/* ---- the model: parameters, FLOPs, memory (handout, sections 1 and 2) ---- */

typedef struct td_account_model {
    int64_t d_model, d_ff, layers, heads, vocab;
} td_account_model;

/** Elements of the model's parameters: 2 V d + L (4 d^2 + 3 d d_ff + 2 d) + d, in 9 L + 3 tensors. */
typedef struct td_account_parameters {
    int64_t embedding, attention, ffn, norms, head; /* elements, summed over the layers */
    int64_t total, tensors;
} td_account_parameters;

TD_API td_status td_account_model_parameters(const td_account_model *model, td_account_parameters *out);

/** FLOPs of one pass over `batch` sequences of `context` tokens, in all layers.
 *
 *   a linear      forward: 2 * tokens * weights
 *   QK^T and PV   forward: 2 B H S^2 (d / H) each, in each layer
 *   softmax       forward: 5 for each score; B H S^2 scores in each layer
 *   backward      2 times forward for linears, and for QK^T and PV of naive attention. With `flash` 2.5 times
 *                 forward for QK^T and PV, because flash attention computes QK^T again
 *
 * causal_half halves the FLOPs of QK^T, PV and softmax, for an implementation that skips the masked half.
 * TD_BAD_ARGUMENT also if heads does not divide d_model. */
typedef struct td_account_flops {
    double projections, attention_products, ffn, head; /* GEMMs of forward; attention_products: QK^T and PV */
    double softmax;                                    /* of forward */
    double forward_matmul;                             /* the sum of the four GEMM parts */
    double backward_matmul;
} td_account_flops;

TD_API td_status td_account_model_flops(const td_account_model *model, int64_t batch, int64_t context,
                                        bool causal_half, bool flash, td_account_flops *out);

/** *out = model FLOPs utilisation: flops / seconds / peak_flops_per_second. */
TD_API td_status td_account_mfu(double flops, double seconds, double peak_flops_per_second, double *out);

/** Bytes of the tensors in memory_profiling (d) and (e), with element_bytes for each element. */
typedef struct td_account_activations {
    int64_t residual; /* B S d        one tensor of the residual stream */
    int64_t scores;   /* B H S^2      one score matrix of a layer */
    int64_t ffn;      /* B S d_ff     one hidden tensor of the feed-forward */
    int64_t logits;   /* B S V */
} td_account_activations;

TD_API td_status td_account_model_activations(const td_account_model *model, int64_t batch, int64_t context,
                                              int64_t element_bytes, td_account_activations *out);

/** Bytes of activations that one block of the model keeps from forward for backward. Results of GEMMs have
 * element_bytes, and the residual stream has stream_bytes, for each element: 2 and 4 in mixed precision.
 *
 * saved_floats: f32 numbers that attention saves for each query and head (flash: 1, its logsumexp). 0: it
 * saves its probabilities, B H S^2 elements. */
typedef struct td_account_block {
    int64_t input; /* TD_KEEP_INPUTS: the block's input, B S d of the residual stream */
    /* TD_KEEP_MOST: input, the stream after attention (B S d), q, k, v, o (4 B S d), gate and up (2 B S
     * d_ff), and the tensor that attention saves */
    int64_t most;
    int64_t all; /* TD_KEEP_ALL: most, the outputs of both norms, their f32 rstd (B S each), silu(gate) up */
    int64_t final;     /* TD_KEEP_ALL, once for the model: input, output and rstd of ln_final */
    int64_t attention; /* TD_KEEP_ATTENTION: input, o (B S d), and the tensor that attention saves */
} td_account_block;

TD_API td_status td_account_block_activations(const td_account_model *model, int64_t batch, int64_t context,
                                              int64_t element_bytes, int64_t stream_bytes,
                                              int64_t saved_floats, td_account_block *out);

/** Bytes of training without activations: parameters, gradients, and AdamW's two moments, with the given
 * bytes for each element. 4, 4 and 4 for f32 give 16 bytes for each parameter. */
typedef struct td_account_training {
    int64_t parameters, gradients, optimizer_state, total;
} td_account_training;

TD_API td_status td_account_training_memory(int64_t parameters, int64_t parameter_bytes,
                                            int64_t gradient_bytes, int64_t moment_bytes,
                                            td_account_training *out);

/** Training memory of one rank if parameters, gradients and moments are fully sharded, without buffers. The
 * rank has all norms, and 1 / ranks of the embedding, of each block's matrices and of the head, each rounded
 * up to whole elements. */
typedef struct td_account_fsdp {
    int64_t elements;         /* of this rank */
    int64_t block;            /* elements of one block's matrices, which are gathered together */
    td_account_training rank; /* bytes */
    int64_t saved;            /* bytes: the total without sharding minus the rank's total */
    /* Bytes of the rank's gradients if each weight is updated as soon as its gradient is reduced: memory for
     * two blocks, for the larger of embedding and head, and for all norms. With one rank: all gradients. */
    int64_t shared;
} td_account_fsdp;

TD_API td_status td_account_fsdp_memory(const td_account_model *model, int64_t ranks, int64_t parameter_bytes,
                                        int64_t gradient_bytes, int64_t moment_bytes, td_account_fsdp *out);

/** *out = the bytes of the low-precision copies of weights that autocast keeps until its context ends: copies
 * of attention, ffn and head. The embedding has no copy, because no GEMM reads it. These copies are the
 * reason that bf16 autocast needs more memory for inference than f32 does. */
TD_API td_status td_account_autocast_copies(const td_account_model *model, int64_t low_bytes, int64_t *out);

/** *out = the bytes of activations at the peak of gradient checkpointing (2026 handout). `blocks` blocks are
 * cut into segments of `segment` blocks. Each segment keeps its input (boundary_bytes: td_account_block's
 * `input`), and one segment at a time is recomputed in full (block_bytes for each block: `all`):
 *   ceil(blocks / segment) boundary_bytes + segment block_bytes.
 * TD_BAD_ARGUMENT also if segment is larger than blocks. */
TD_API td_status td_account_checkpointing(int64_t blocks, int64_t segment, int64_t boundary_bytes,
                                          int64_t block_bytes, int64_t *out);

/* ---- attention (handout, section "pytorch_attention") ---- */

/** Bytes and FLOPs of attention; d is head_dim. */
typedef struct td_account_attention {
    int64_t matrix;              /* M = B S S_k e: one score matrix */
    int64_t mask;                /* causal: S S_k, the one-byte mask that the whole batch shares; else 0 */
    int64_t saved_naive;         /* matrices M, and q, k, v, o; without the mask */
    int64_t saved_flash;         /* q, k, v, o and the f32 logsumexp of each row */
    int64_t forward_peak;        /* 4 M: score matrices in memory at eager PyTorch's forward peak */
    int64_t backward_peak;       /* 8 M: at its backward peak */
    double forward_flops;        /* 4 B S S_k d, halved when causal */
    double backward_flops;       /* of flash attention: 2.5 forward_flops */
    double backward_flops_naive; /* 8 B S S_k d: two GEMMs for each GEMM of forward, the masked half too */
    double softmax_flops;        /* 5 for each score, halved when causal */
} td_account_attention;

/** `batch` is the product of batch and heads. `matrices` is the number of score matrices that an
 * implementation keeps for backward: 2 for the course's four-step softmax, 1 for a fused softmax. */
TD_API td_status td_account_attention_memory(int64_t batch, int64_t seq, int64_t seq_k, int64_t head_dim,
                                             int64_t element_bytes, int64_t matrices, bool causal,
                                             td_account_attention *out);

/** *out = the smallest power-of-two sequence length at which naive attention's backward peak does not fit in
 * `memory_bytes`. The peak is 8 M + 8 B S d e; the second term is q, k, v, o and their gradients. */
TD_API td_status td_account_attention_oom(int64_t batch, int64_t head_dim, int64_t element_bytes,
                                          int64_t memory_bytes, int64_t *out);

/* ---- distributed data parallel: the overhead model (ddp_bucketed_benchmarking b) ---- */

/** The model: s = bytes of gradients, w = bytes_per_second, o = seconds_per_call, n = buckets. Buckets are
 * equal, and the compute of a bucket takes as long as its transfer.
 *
 *   *seconds = the time that communication adds to a step = s / (n w) + n o
 *   optimum    n = sqrt(s / (o w)), buckets of sqrt(s o w) bytes, 2 sqrt(s o / w) seconds */
TD_API td_status td_account_ddp_overhead(double bytes, double bytes_per_second, double seconds_per_call,
                                         double buckets, double *seconds);

typedef struct td_account_ddp_optimum {
    double buckets; /* real-valued optimum */
    double bucket_bytes;
    double seconds;
} td_account_ddp_optimum;

TD_API td_status td_account_ddp_optimum_find(double bytes, double bytes_per_second, double seconds_per_call,
                                             td_account_ddp_optimum *out);

/* ---- communication_accounting: XXL, blocks of two linears ---- */

typedef struct td_account_xxl {
    int64_t d_model, d_ff, blocks; /* 16384, 53248, 126 in the handout */
} td_account_xxl;

typedef struct td_account_xxl_memory {
    int64_t parameters;                 /* 2 d d_ff blocks */
    int64_t state_bytes;                /* 16 for each parameter: f32 weight, gradient, two moments */
    double devices_80gb, devices_80gib; /* state_bytes / 80e9 and state_bytes / (80 2^30), not rounded */
    int64_t saved_bytes_per_token;      /* bf16: the inputs of both linears of every block */
} td_account_xxl_memory;

TD_API td_status td_account_xxl_memory_of(const td_account_xxl *model, td_account_xxl_memory *out);

/** *out = bytes on each device under FSDP over N = `devices`, if half of the saved activations are sharded:
 * (16 P + A / 2) / N + A / 2, with P parameters and A = tokens * saved_bytes_per_token. */
TD_API td_status td_account_xxl_fsdp_bytes(const td_account_xxl *model, int64_t tokens, int64_t devices,
                                           double *out);

/** *out = the smallest number of devices on which the state alone fits: 16 P / N <= device_bytes. */
TD_API td_status td_account_xxl_devices(const td_account_xxl *model, double device_bytes, int64_t *out);

/** A two-dimensional mesh of devices: X ways FSDP and Y ways tensor parallel. */
typedef struct td_account_mesh {
    double flops_per_second;        /* C of one device; the handout uses 4.6e14 */
    double bytes_per_second;        /* W of one axis, both directions; the handout uses 2 x 9e10 */
    int64_t fsdp, tensor;           /* X, Y */
    int64_t fsdp_axes, tensor_axes; /* M_X, M_Y: axes of the mesh that carry each */
} td_account_mesh;

/** The least batch, in tokens, for which compute hides communication on the mesh. */
typedef struct td_account_mesh_batch {
    double alpha;       /* C / W */
    double fsdp_tokens; /* for FSDP alone: X alpha / M_X */
    double fsdp_tokens_per_device;
    double tensor_d_ff; /* the least d_ff that hides tensor parallelism: Y alpha / M_Y */
    bool tensor_met;    /* the model's d_ff is at least tensor_d_ff */
    /* If both use the same wire: fsdp_tokens / (1 - tensor_d_ff / d_ff); infinite if tensor parallelism alone
     * needs all of the wire's time. */
    double shared_wire_tokens;
    double shared_wire_tokens_per_device;
    double optimum_tokens_per_device; /* with the best X and Y: alpha^2 / (M_X M_Y d_ff) */
} td_account_mesh_batch;

TD_API td_status td_account_mesh_batch_of(const td_account_xxl *model, const td_account_mesh *mesh,
                                          td_account_mesh_batch *out);

/* ---- the 2026 handout's parallelism calculations: one feed-forward of three d_model x d_ff matrices ---- */

typedef struct td_account_parallel {
    double tokens;           /* B, of the global batch */
    double d_model, d_ff;    /* D, F */
    double devices;          /* N, at least 1 */
    double flops_per_second; /* C */
    double bytes_per_second; /* W */
} td_account_parallel;

typedef struct td_account_parallel_times {
    double forward_compute, backward_compute; /* seconds: 6 B D F / (N C), 12 B D F / (N C) */
    double forward_comm, backward_comm;       /* seconds: see td_account_strategy */
    double forward_devices;                   /* the largest N bound by compute; may be infinite */
    double backward_devices;                  /* the same for backward */
} td_account_parallel_times;

typedef enum td_account_strategy {
    TD_ACCOUNT_DATA = 0, /* comm 0 and 12 D F (N - 1) / (N W);  backward N <= 1 + B W / C */
    TD_ACCOUNT_FSDP,     /* comm 6 and 12 D F (N - 1) / (N W);  N <= 1 + B W / C both */
    TD_ACCOUNT_TENSOR    /* comm 4 B D (N - 1) / (N W) each;    N <= 1 + 1.5 F W / C and 1 + 3 F W / C */
} td_account_strategy;

TD_API td_status td_account_parallel_times_of(td_account_strategy strategy,
                                              const td_account_parallel *parallel,
                                              td_account_parallel_times *out);

/** The largest N bound by compute with FSDP and tensor parallelism together: (1 + B W / C)(1 + 1.5 F W / C)
 * if their communication overlaps, and (6 B F W / C + 6 F + 4 B)^2 / (96 B F) if they share the wire. */
TD_API td_status td_account_fsdp_tensor_devices(const td_account_parallel *parallel, double *overlapped,
                                                double *shared_wire);

/** Seconds of one all-reduce of S = `bytes` bytes over N = `ranks` at W = bytes_per_second. *ring =
 * 2 (N - 1) / N S / W. *alternate = (N - 1) S / W: the handout's alternate, in which each rank forwards whole
 * buffers. */
TD_API td_status td_account_ring_all_reduce(double bytes, int64_t ranks, double bytes_per_second,
                                            double *ring, double *alternate);

/** Bandwidths in bytes/s of an all-reduce of `bytes` over N = `ranks` that took `seconds`. Definitions of
 * nccl-tests (doc/PERFORMANCE.md): *algorithm = bytes / seconds; *bus = algorithm 2 (N - 1) / N, the traffic
 * of each link, which does not depend on N. */
TD_API td_status td_account_all_reduce_bandwidth(double bytes, int64_t ranks, double seconds,
                                                 double *algorithm, double *bus);

/* ---- operations: the least FLOPs and bytes of a kernel ---- */

typedef struct td_cost {
    double flops;
    double bytes; /* each operand read or written once, in the storage dtype */
} td_cost;

/** `batch` GEMMs of [m, k] and [k, n]: 2 m n k FLOPs each. */
TD_API td_status td_gemm_cost(int64_t batch, int64_t m, int64_t n, int64_t k, td_dtype dtype, td_cost *out);

/** Softmax over rows of `cols` elements: 5 cols - 2 FLOPs for each row (cols - 1 for the maximum, cols to
 * subtract it, cols exponentials, cols - 1 for their sum, cols to divide). x is read, y is written. Masked
 * elements are counted too. */
TD_API td_status td_softmax_cost(int64_t rows, int64_t cols, td_dtype dtype, td_cost *out);

/** Flash attention; d is head_dim. Forward: 4 B H S S_k d FLOPs, halved when causal; q, k, v are read, o and
 * the f32 logsumexp are written. Backward: 2.5 times the FLOPs; q, k, v, o, dO and the logsumexp are read,
 * dQ, dK, dV are written. */
TD_API td_status td_flash_cost(int64_t batch, int64_t heads, int64_t seq, int64_t seq_k, int64_t head_dim,
                               td_dtype dtype, bool causal, bool backward, td_cost *out);

/** AdamW on `count` parameters: 14 FLOPs each (3 for m, 4 for v, 5 for the step, 2 for the decay). p, m and v
 * are read and written, g is read. m and v are f32; p and g have dtype. */
TD_API td_status td_adamw_cost(int64_t count, td_dtype dtype, td_cost *out);

TD_END_DECLS

#endif
