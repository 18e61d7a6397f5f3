/** The arithmetic that reports quote: parameters, FLOPs, bytes, and models of communication.
 *
 * Pure functions; every formula stands beside its function. Bytes are exact counts; 1 MiB = 2^20. FLOPs count
 * a multiply-add as 2 and are doubles, exact up to 2^53. Counts of elements and bytes beyond 2^63 - 1 are
 * refused with TD_BAD_ARGUMENT, like every extent below 1, every non-finite or non-positive rate, and every
 * NULL; the output is then as it was. */
#ifndef TD_ACCOUNTING_ACCOUNTING_H
#define TD_ACCOUNTING_ACCOUNTING_H

#include "base/dtype.h"

TD_BEGIN_DECLS

/* ---- the model: parameters, FLOPs, memory (handout, sections 1 and 2) ---- */

typedef struct td_account_model {
    int64_t d_model, d_ff, layers, heads, vocab;
} td_account_model;

/** 2 V d + L (4 d^2 + 3 d d_ff + 2 d) + d, in 9 L + 3 tensors. */
typedef struct td_account_parameters {
    int64_t embedding, attention, ffn, norms, head; /* elements, summed over the layers */
    int64_t total, tensors;
} td_account_parameters;

TD_API td_status td_account_model_parameters(const td_account_model *model, td_account_parameters *out);

/** FLOPs of one forward pass over batch sequences of `context` tokens, by part: 2 tokens weights for a
 * linear, 2 B H S^2 d_head each for QK^T and PV, 5 an element of the scores for the softmax; the attention's
 * are halved when causal_half: what an implementation that skips the masked half does. Backward of the
 * linears and the naive products is 2x forward; flash attention's is 2.5x its products, because it computes
 * QK^T again. TD_BAD_ARGUMENT also for heads that do not divide d_model. */
typedef struct td_account_flops {
    double projections, attention_products, ffn, head; /* matrix products */
    double softmax;
    double forward_matmul; /* the sum of the first four */
    double backward_matmul;
} td_account_flops;

TD_API td_status td_account_model_flops(const td_account_model *model, int64_t batch, int64_t context,
                                        bool causal_half, bool flash, td_account_flops *out);

/** Model FLOPs utilisation: flops / seconds / peak, all above 0. */
TD_API td_status td_account_mfu(double flops, double seconds, double peak_flops_per_second, double *out);

/** Sizes of the tensors that memory_profiling (d) and (e) ask for, in bytes, elements of element_bytes. */
typedef struct td_account_activations {
    int64_t residual; /* B S d        one tensor of the residual stream */
    int64_t scores;   /* B H S^2      one score matrix of a layer */
    int64_t ffn;      /* B S d_ff     one hidden tensor of the feed-forward */
    int64_t logits;   /* B S V */
} td_account_activations;

TD_API td_status td_account_model_activations(const td_account_model *model, int64_t batch, int64_t context,
                                              int64_t element_bytes, td_account_activations *out);

/** Bytes of activations that one block of the model keeps from forward for backward. Products have elements
 * of element_bytes, the residual stream of stream_bytes: 4 beside 2 in mixed precision. */
typedef struct td_account_block {
    int64_t input; /* B S d   of the residual stream: what a checkpoint keeps */
    int64_t most;  /* input, the stream between both halves, q, k, v, o, gate and up (2 B S d_ff), and what
                    * attention saves: saved_floats of f32 a query, B H S each (flash: 1, its logsumexp);
                    * with 0 its probabilities, B H S^2 */
    int64_t all;   /* beside these the output of both norms, their f32 rstd (B S each) and silu(gate) up */
    int64_t final; /* once, behind the last block: ln_final's input, and for `all` its output and rstd */
    int64_t
        attention; /* input, o and what attention saves: of a checkpoint whose attention does not run again */
} td_account_block;

TD_API td_status td_account_block_activations(const td_account_model *model, int64_t batch, int64_t context,
                                              int64_t element_bytes, int64_t stream_bytes,
                                              int64_t saved_floats, td_account_block *out);

/** Training memory without activations: parameters, gradients, and AdamW's two moments, elements of the given
 * bytes (4, 4, 4 for f32: 16 bytes a parameter). */
typedef struct td_account_training {
    int64_t parameters, gradients, optimizer_state, total;
} td_account_training;

TD_API td_status td_account_training_memory(int64_t parameters, int64_t parameter_bytes,
                                            int64_t gradient_bytes, int64_t moment_bytes,
                                            td_account_training *out);

/** The same of one rank if all three are fully sharded, without buffers. The rank has all norms, and
 * 1 / ranks of the embedding, of each block's matrices and of the head, rounded up to whole elements. */
typedef struct td_account_fsdp {
    int64_t elements;         /* that the rank has */
    int64_t block;            /* elements of a block's matrices, which are gathered together */
    td_account_training rank; /* bytes */
    int64_t saved;            /* bytes: the total without sharding less the rank's */
    int64_t shared; /* bytes of the rank's gradients if an update reads each part at once: two places for
                     * blocks, one for embedding and head, and norms */
} td_account_fsdp;

TD_API td_status td_account_fsdp_memory(const td_account_model *model, int64_t ranks, int64_t parameter_bytes,
                                        int64_t gradient_bytes, int64_t moment_bytes, td_account_fsdp *out);

/** Bytes of the low-precision copies that autocast keeps of every linear's weight until its context ends: the
 * weights of attention, ffn and head (the embedding is looked up, not multiplied). Why bf16 autocast needs
 * more memory for inference than f32 does. */
TD_API td_status td_account_autocast_copies(const td_account_model *model, int64_t low_bytes, int64_t *out);

/** Activations that gradient checkpointing keeps at its peak (2026 handout): `blocks` blocks in segments of
 * `segment`, of which only the inputs are kept (td_account_block: input), and one segment recomputed in full
 * (all):
 *   ceil(blocks / segment) boundary_bytes + segment block_bytes.
 * TD_BAD_ARGUMENT also for a segment longer than the model. */
TD_API td_status td_account_checkpointing(int64_t blocks, int64_t segment, int64_t boundary_bytes,
                                          int64_t block_bytes, int64_t *out);

/* ---- attention (handout, section "pytorch_attention") ---- */

typedef struct td_account_attention {
    int64_t matrix;        /* M = B S S_k e: one score matrix */
    int64_t mask;          /* S S_k when causal: the one-byte mask that the whole batch shares; else 0 */
    int64_t saved_naive;   /* matrices M + q, k, v, o; without the mask */
    int64_t saved_flash;   /* q, k, v, o and the f32 logsumexp of each row */
    int64_t forward_peak;  /* 4 M: what eager PyTorch holds at its forward peak */
    int64_t backward_peak; /* 8 M: at its backward peak */
    double forward_flops;  /* 4 B S S_k d, halved when causal */
    double backward_flops; /* of flash attention: 2.5 forward_flops */
    double
        backward_flops_naive; /* 8 B S S_k d: two products for each of forward's, the masked half included */
    double softmax_flops;     /* 5 an element of the scores, halved when causal */
} td_account_attention;

/** batch is batch times heads. `matrices` is how many score-sized matrices an implementation keeps for
 * backward: 2 for the course's four-step softmax, 1 for a fused one. */
TD_API td_status td_account_attention_memory(int64_t batch, int64_t seq, int64_t seq_k, int64_t head_dim,
                                             int64_t element_bytes, int64_t matrices, bool causal,
                                             td_account_attention *out);

/** The smallest power-of-two sequence length at which naive attention's backward peak no longer fits in
 * `memory_bytes`: 8 M + 8 B S d e, the second term being q, k, v, o and their gradients. */
TD_API td_status td_account_attention_oom(int64_t batch, int64_t head_dim, int64_t element_bytes,
                                          int64_t memory_bytes, int64_t *out);

/* ---- distributed data parallel: the overhead model (ddp_bucketed_benchmarking b) ---- */

/** With s bytes of gradients, w bytes/s, o seconds a call, n_b equal buckets whose compute takes as long as
 * their transfer:  overhead = s / (n_b w) + n_b o;   optimum n_b = sqrt(s / (o w)), bucket sqrt(s o w),
 * overhead 2 sqrt(s o / w). */
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
    int64_t state_bytes;                /* 16 a parameter: f32 weights, gradients, two moments */
    double devices_80gb, devices_80gib; /* state_bytes / 80e9 and / (80 2^30), not rounded */
    int64_t saved_bytes_per_token;      /* bf16: the inputs of both linears of every block */
} td_account_xxl_memory;

TD_API td_status td_account_xxl_memory_of(const td_account_xxl *model, td_account_xxl_memory *out);

/** Bytes a device under FSDP over `devices` with half of the saved activations sharded:
 * (16 P + A / 2) / N + A / 2, A = tokens * saved_bytes_per_token. */
TD_API td_status td_account_xxl_fsdp_bytes(const td_account_xxl *model, int64_t tokens, int64_t devices,
                                           double *out);

/** Smallest N for which that is at most device_bytes when A -> 0. */
TD_API td_status td_account_xxl_devices(const td_account_xxl *model, double device_bytes, int64_t *out);

/** When a two-dimensional mesh, X ways FSDP and Y ways tensor parallel, is bound by compute. alpha = C /
 * W. */
typedef struct td_account_mesh {
    double flops_per_second;        /* C of one device; the handout's figures take 4.6e14 */
    double bytes_per_second;        /* W of one axis, both directions; the handout's figures take 2 x 9e10 */
    int64_t fsdp, tensor;           /* X, Y */
    int64_t fsdp_axes, tensor_axes; /* M_X, M_Y: axes of the mesh that carry each */
} td_account_mesh;

typedef struct td_account_mesh_batch {
    double alpha;       /* C / W */
    double fsdp_tokens; /* batch that hides FSDP: X alpha / M_X */
    double fsdp_tokens_per_device;
    double tensor_d_ff;        /* d_ff that hides tensor parallelism: Y alpha / M_Y */
    bool tensor_met;           /* the model's d_ff is at least that */
    double shared_wire_tokens; /* batch when both share the wire: fsdp_tokens / (1 - tensor_d_ff / d_ff);
                                  infinite where tensor parallelism alone fills it */
    double shared_wire_tokens_per_device;
    double optimum_tokens_per_device; /* the best mesh of any shape: alpha^2 / (M_X M_Y d_ff) */
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
    double forward_comm, backward_comm;       /* seconds, by strategy */
    double forward_devices,
        backward_devices; /* largest N that stays bound by compute; infinite: no communication */
} td_account_parallel_times;

typedef enum td_account_strategy {
    TD_ACCOUNT_DATA = 0, /* comm 0 and 12 D F (N - 1) / (N W);  backward N <= 1 + B W / C */
    TD_ACCOUNT_FSDP,     /* comm 6 and 12 D F (N - 1) / (N W);  N <= 1 + B W / C both */
    TD_ACCOUNT_TENSOR    /* comm 4 B D (N - 1) / (N W) each;    N <= 1 + 1.5 F W / C and 1 + 3 F W / C */
} td_account_strategy;

TD_API td_status td_account_parallel_times_of(td_account_strategy strategy,
                                              const td_account_parallel *parallel,
                                              td_account_parallel_times *out);

/** FSDP and tensor parallelism together: N <= (1 + B W / C)(1 + 1.5 F W / C) when they overlap, and about
 * (3 / 8) B F (W / C)^2 when they share the wire. */
TD_API td_status td_account_fsdp_tensor_devices(const td_account_parallel *parallel, double *overlapped,
                                                double *shared_wire);

/** Seconds of one all-reduce of `bytes` over `ranks`: ring 2 (N - 1) / N S / W; the handout's alternate,
 * where each rank passes whole buffers on, (N - 1) S / W. */
TD_API td_status td_account_ring_all_reduce(double bytes, int64_t ranks, double bytes_per_second,
                                            double *ring, double *alternate);

/** Bytes a second of an all-reduce of `bytes` on each of `ranks` that took so long, as nccl-tests defines
 * them (its doc/PERFORMANCE.md): algorithm = bytes / seconds; bus = algorithm 2 (N - 1) / N, which is what
 * each link carries however many ranks there are. */
TD_API td_status td_account_all_reduce_bandwidth(double bytes, int64_t ranks, double seconds,
                                                 double *algorithm, double *bus);

/* ---- operations: what a kernel must do and move ---- */

typedef struct td_cost {
    double flops;
    double bytes; /* read and written once, at the storage dtype: the least a kernel can move */
} td_cost;

/** batch products of [m, k] and [k, n]: 2 m n k FLOPs each. */
TD_API td_status td_gemm_cost(int64_t batch, int64_t m, int64_t n, int64_t k, td_dtype dtype, td_cost *out);

/** Softmax over rows of `cols`: 5 cols - 2 FLOPs a row (cols - 1 for the largest, cols to take it off, cols
 * exponentials, cols - 1 for their sum, cols to divide); x read, y written. Where keys are masked these are
 * counted too. */
TD_API td_status td_softmax_cost(int64_t rows, int64_t cols, td_dtype dtype, td_cost *out);

/** Forward: 4 B H S S_k d FLOPs, halved when causal; q, k, v read, o and the f32 logsumexp written. Backward:
 * 2.5 times the FLOPs; q, k, v, o, dO and the logsumexp read, dQ, dK, dV written. */
TD_API td_status td_flash_cost(int64_t batch, int64_t heads, int64_t seq, int64_t seq_k, int64_t head_dim,
                               td_dtype dtype, bool causal, bool backward, td_cost *out);

/** 14 FLOPs a parameter (3 for m, 4 for v, 5 for the step, 2 for the decay); p, m, v read and written, g
 * read; m and v are f32. */
TD_API td_status td_adamw_cost(int64_t count, td_dtype dtype, td_cost *out);

TD_END_DECLS

#endif
