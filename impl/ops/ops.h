/** The operations of a Transformer language model, forward and backward, on any device.
 *
 * All tensors are on dev. They are contiguous and row-major, unless a pitch or leading dimension says
 * otherwise. `dtype` is the storage type: TD_F32 or TD_BF16, on CUDA also TD_F16. Arithmetic and sums are f32
 * or, where a comment says so, float64. A result is rounded once, when it is stored.
 *
 * Mixed precision keeps weights and the residual stream in f32, and GEMMs read 16 bits. If tensors of one
 * operation have two types, the shape has a second dtype field. A second field that is 0 (TD_F64, which no
 * operation supports) means "the same as dtype", except td_gemm_shape.out_dtype.
 *
 * Every function queues its work on dev's current stream, allocates nothing, and may be captured in a graph.
 * The caller allocates scratch: if a function has an argument `work`, the function with the suffix
 * _work_bytes gives its size in bytes. `work` must be on dev, at a multiple of TD_ALIGNMENT. It may be NULL
 * if the size is 0.
 *
 * TD_BAD_ARGUMENT, for all functions: a NULL; an extent below 1; a product beyond 2^63 - 1; a pitch shorter
 * than a row; a scalar that is not finite; `work` that is not aligned. TD_UNSUPPORTED: the device has no
 * kernel for the dtype. After either error nothing was queued, and every output is unchanged.
 *
 * An output must not overlap another argument, unless the comment says "in place allowed". Repeated calls
 * with the same number of threads give the same bits. Operations on single elements or rows give the same
 * bits with any number of threads.
 *
 * NaN and infinity follow IEEE 754; nothing filters them out. */
#ifndef TD_OPS_OPS_H
#define TD_OPS_OPS_H

#include "base/dtype.h"
#include "device/device.h"

TD_BEGIN_DECLS

/* ---- GEMM ---- */

/** C[b] = alpha * op(A[b]) op(B[b]) + beta * C[b],  b in [0, batch)
 *
 *   a  [batch] matrices in  dtype      op(A) is [m, k]: A is [m, k], or [k, m] with trans_a
 *   b  [batch] matrices in  dtype      op(B) is [k, n]: B is [k, n], or [n, k] with trans_b
 *   c  [batch] matrices i/o out_dtype  [m, n]; not read if beta is 0
 *
 * Rows of A, B and C begin lda, ldb and ldc elements apart. A linear layer y = x W^T with W [d_out, d_in] has
 * trans_b = true. Sums are f32. 16-bit output is rounded once, after beta * C was added. Processors with bf16
 * instructions (AVX-512 BF16, AMX) use them; these treat subnormal inputs, products and sums as 0.
 *
 * td_gemm_work_bytes never falls if an extent grows: work for one shape is enough for all smaller shapes.
 *
 * TD_BAD_ARGUMENT also: an out_dtype other than dtype and TD_F32; tf32 with a dtype other than TD_F32; a
 * stride below 0. TD_UNSUPPORTED also: tf32 on the CPU. */
typedef struct td_gemm_shape {
    int64_t batch, m, n, k;
    int64_t lda, ldb, ldc; /* 0: the length of a row */
    /* Elements from one matrix to the next; 0: all batches use one matrix. If batch is above 1, stride_c must
     * be above 0. */
    int64_t stride_a, stride_b, stride_c;
    bool trans_a, trans_b;
    float alpha, beta;
    td_dtype dtype, out_dtype; /* out_dtype is always required: 0 is not accepted */
    /* f32 inputs are rounded to TF32, 10 bits of fraction, and multiplied by tensor cores. CUDA only */
    bool tf32;
} td_gemm_shape;

TD_API td_status td_gemm_work_bytes(td_device *dev, const td_gemm_shape *shape, size_t *out);
TD_API td_status td_gemm(td_device *dev, const td_gemm_shape *shape, const void *a, const void *b, void *c,
                         void *work);

/* ---- embedding ---- */

typedef struct td_embedding_shape {
    int64_t tokens, vocab, d_model;
    td_dtype dtype;
    td_dtype dweight_dtype; /* 0: dtype; or a 16-bit type if dtype is TD_F32 */
} td_embedding_shape;

/** y[t, :] = weight[ids[t], :]
 *
 *   ids     [tokens]          in   int64
 *   weight  [vocab, d_model]  in   dtype
 *   y       [tokens, d_model] out  dtype
 *
 * An id outside [0, vocab): on the CPU it is TD_BAD_ARGUMENT, and the message names its position, also in
 * backward. On CUDA it gives a row of NaN, and backward skips it. */
TD_API td_status td_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                      const void *weight, void *y);

/** dweight[v, :] = the sum of dy[t, :] over all t with ids[t] = v. The order of the sum depends only on ids.
 * If `accumulate` is set, the sum is added to dweight. Otherwise it replaces dweight, and rows without a
 * token become 0.
 *
 *   ids      [tokens]           in   int64
 *   dy       [tokens, d_model]  in   dtype
 *   dweight  [vocab, d_model]   i/o  dweight_dtype */
TD_API td_status td_embedding_backward_work_bytes(td_device *dev, const td_embedding_shape *shape,
                                                  size_t *out);
TD_API td_status td_embedding_backward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                       const void *dy, bool accumulate, void *dweight, void *work);

/* ---- RMSNorm ---- */

typedef struct td_rmsnorm_shape {
    int64_t rows, cols;
    float eps;              /* above 0 */
    td_dtype dtype;         /* of y and dy */
    td_dtype x_dtype;       /* of x, dx and weight: dtype or TD_F32; 0: dtype */
    td_dtype dweight_dtype; /* of dweight: dtype or TD_F32; 0: dtype */
} td_rmsnorm_shape;

/** y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps)        (Zhang and Sennrich 2019, eq. 4, with eps)
 *
 *   x       [rows, cols]  in   x_dtype
 *   weight  [cols]        in   x_dtype
 *   y       [rows, cols]  out  dtype    in place of x allowed if both types are equal
 *   rstd    [rows]        out  f32      NULL: not wanted
 *
 * Both products are f32; y is rounded once. */
TD_API td_status td_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                    const void *weight, void *y, float *rstd);

/** The residual addition and the norm after it, in one pass: sum = a + b, and y = td_rmsnorm_forward of the
 * stored (rounded) sum.
 *
 *   a       [rows, cols]  in   x_dtype
 *   b       [rows, cols]  in   dtype
 *   weight  [cols]        in   x_dtype
 *   sum     [rows, cols]  out  x_dtype  in place of a allowed
 *   y       [rows, cols]  out  dtype
 *   rstd    [rows]        out  f32      NULL: not wanted */
TD_API td_status td_residual_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *a,
                                             const void *b, const void *weight, void *sum, void *y,
                                             float *rstd);

/** With g = dy * weight and n = x * rstd:
 *   dx = rstd * (g - n * mean(g * n)),  dweight = sum over rows of dy * n.
 *
 *   x           [rows, cols]  in   x_dtype  x, weight and rstd are the inputs and the output of forward
 *   weight      [cols]        in   x_dtype
 *   rstd        [rows]        in   f32
 *   dy          [rows, cols]  in   dtype
 *   dx          [rows, cols]  i/o  x_dtype  accumulate_dx: the result is added to dx. Otherwise it replaces
 *                                           dx; in place of dy is then allowed if both types are equal
 *   dx_rounded  [rows, cols]  out  dtype    the new dx, rounded to dtype; NULL: not wanted
 *   dweight     [cols]        i/o  dweight_dtype  accumulate_dweight: the result is added to dweight
 *
 * TD_BAD_ARGUMENT also: dx_rounded is given, but x_dtype equals dtype, so dx has these values already. */
TD_API td_status td_rmsnorm_backward_work_bytes(td_device *dev, const td_rmsnorm_shape *shape, size_t *out);
TD_API td_status td_rmsnorm_backward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                     const void *weight, const float *rstd, const void *dy,
                                     bool accumulate_dx, void *dx, void *dx_rounded, bool accumulate_dweight,
                                     void *dweight, void *work);

/* ---- heads and rotary position embedding ---- */

typedef struct td_heads_shape {
    int64_t batch, heads, seq, head_dim;
    int64_t pitch; /* elements between tokens of qkv, at least 3 * heads * head_dim; 0: exactly that */
    td_dtype dtype;
} td_heads_shape;

/** Tables of cos and sin of pos * theta^(-2i / head_dim), for pos in [0, positions) and i in
 * [0, head_dim / 2).
 *
 *   cos, sin  [positions, head_dim / 2]  out  f32; the angles are computed in float64
 *
 * TD_BAD_ARGUMENT also for an odd head_dim, theta not above 0. */
TD_API td_status td_rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos,
                               float *sin);

/** Splits the output of the fused projection of q, k and v into heads. q and k are rotated by rotary position
 * embedding on interleaved pairs (Su et al. 2021, eq. 34); v is copied. Token t of a sequence uses row t of
 * cos and sin:
 *   y[2i] = x[2i] cos[i] - x[2i+1] sin[i],  y[2i+1] = x[2i] sin[i] + x[2i+1] cos[i].
 *
 * The row of a token in qkv is q, then k, then v, each of heads * head_dim elements. Each head is a
 * contiguous slice of head_dim elements.
 *
 *   qkv      [batch, seq, pitch]            in   dtype
 *   cos, sin [at least seq, head_dim / 2]   in   f32
 *   q, k, v  [batch, heads, seq, head_dim]  out  dtype
 *
 * TD_BAD_ARGUMENT also for an odd head_dim. */
TD_API td_status td_qkv_split_forward(td_device *dev, const td_heads_shape *shape, const void *qkv,
                                      const float *cos, const float *sin, void *q, void *k, void *v);

/** The gradient of td_qkv_split_forward: dqkv from dq, dk and dv, with the same shapes and types. dq and dk
 * are rotated by the opposite angle, and each head is written to its slice of the token's row. Elements of a
 * row after 3 * heads * head_dim are not written. */
TD_API td_status td_qkv_split_backward(td_device *dev, const td_heads_shape *shape, const void *dq,
                                       const void *dk, const void *dv, const float *cos, const float *sin,
                                       void *dqkv);

/* ---- SiLU * mul (the gate of SwiGLU) ---- */

typedef struct td_rows_shape {
    int64_t rows, cols;
    int64_t pitch; /* elements between rows of gate, up, dgate and dup; 0: cols. y and dy are contiguous */
    td_dtype dtype;
} td_rows_shape;

/** y = silu(gate) * up,  silu(z) = z / (1 + exp(-z))        (SwiGLU: Shazeer 2020)
 *
 *   gate, up  [rows, cols], rows pitch apart  in   dtype
 *   y         [rows, cols]                    out  dtype */
TD_API td_status td_silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                     const void *up, void *y);

/** dgate = dy * up * s (1 + gate (1 - s)) with s = sigmoid(gate),  dup = dy * silu(gate).
 *
 *   gate, up  [rows, cols], rows pitch apart  in   dtype  as in forward
 *   dy        [rows, cols]                    in   dtype
 *   dgate     [rows, cols], rows pitch apart  out  dtype  in place of gate allowed
 *   dup       [rows, cols], rows pitch apart  out  dtype  in place of up allowed
 *   y         [rows, cols]                    out  dtype  the output of forward, computed again; in place of
 *                                                         dy allowed; NULL: not wanted */
TD_API td_status td_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                      const void *up, const void *dy, void *dgate, void *dup, void *y);

/* ---- rounding, planes, residual ---- */

/** dst[i] = src[i], rounded to nearest with ties to even.
 *
 *   src  [count]  in   src_dtype
 *   dst  [count]  out  dst_dtype */
TD_API td_status td_round(td_device *dev, int64_t count, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst);

/** Stores f32 numbers as two planes of 16 bits: the bits of the f32 = high * 2^16 + low, and low is signed.
 * GEMMs can then read the high plane as bf16 weights, without a copy of the f32 masters.
 *
 *   numbers  [count]  f32     in of td_split, out of td_join
 *   high     [count]  bf16    out of td_split, in of td_join: the nearest bf16, ties away from zero
 *   low      [count]  16 bits out of td_split, in of td_join
 *
 * td_join returns the bits that td_split got, but a NaN becomes a quiet NaN of the same sign. td_round and
 * PyTorch round ties to even. Their bf16 differs from `high` only if the f32 is exactly between two bf16
 * numbers, and the even one is nearer to zero. Two planes cannot store ties to even: the difference to `high`
 * would be +2^15 or -2^15, and 16 signed bits hold only one of them. */
TD_API td_status td_split(td_device *dev, int64_t count, const float *numbers, void *high, void *low);
TD_API td_status td_join(td_device *dev, int64_t count, const void *high, const void *low, float *numbers);

/** y[i] = a[i] + b[i]. The gradient of y is the gradient of both a and b.
 *
 *   a, b  [count]  in   dtype
 *   y     [count]  out  dtype  in place of a or b allowed */
TD_API td_status td_residual_add(td_device *dev, int64_t count, td_dtype dtype, const void *a, const void *b,
                                 void *y);

/* ---- softmax over rows ---- */

typedef struct td_softmax_shape {
    int64_t rows, cols;
    int64_t causal_seq; /* 0: no mask. n > 0: row r is query r mod n, and sees columns 0 to r mod n */
    td_dtype dtype;
} td_softmax_shape;

/** y = exp(x - max) / sum(exp(x - max)), with max and sum over the columns that the row sees. Masked columns
 * become 0. If all of these x are -inf, the row becomes NaN, as in PyTorch.
 *
 *   x  [rows, cols]  in   dtype
 *   y  [rows, cols]  out  dtype  in place of x allowed */
TD_API td_status td_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y);

/** dx = scale * y * (dy - sum(y * dy)), with the sum over a row. Masked columns of dx become 0.
 *
 *   y   [rows, cols]  in   dtype  the output of td_softmax_forward
 *   dy  [rows, cols]  in   dtype
 *   dx  [rows, cols]  out  dtype  in place of dy allowed */
TD_API td_status td_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale,
                                     const void *y, const void *dy, void *dx);

/* ---- cross entropy, mean over tokens ---- */

typedef struct td_cross_entropy_shape {
    int64_t rows, vocab;
    td_dtype dtype; /* of the logits */
} td_cross_entropy_shape;

/** loss = the mean over rows of lse[r] - logits[r, targets[r]], with lse[r] = log(sum(exp(logits[r, :]))).
 * The largest logit of the row is subtracted before exp. The mean is summed in float64.
 *
 *   logits   [rows, vocab]  in   dtype
 *   targets  [rows]         in   int64
 *   loss     [1]            out  f32
 *   lse      [rows]         out  f32
 *
 * A target outside [0, vocab): on the CPU it is TD_BAD_ARGUMENT, and the message names its row, also in
 * backward. On CUDA it makes the loss and its row of dlogits NaN. */
TD_API td_status td_cross_entropy_work_bytes(td_device *dev, const td_cross_entropy_shape *shape,
                                             size_t *out);
TD_API td_status td_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                          const void *logits, const int64_t *targets, float *loss, float *lse,
                                          void *work);

/** dlogits = scale / rows * (exp(logits - lse) - onehot(target)).
 *
 *   logits   [rows, vocab]  in   dtype  logits, targets and lse as in forward
 *   targets  [rows]         in   int64
 *   lse      [rows]         in   f32    a device may compute it again, because its rounding to f32 is the
 *                                       largest error of the result
 *   scale                               the gradient of the loss; 1 in training without a loss scale
 *   dlogits  [rows, vocab]  out  dtype  in place of logits allowed */
TD_API td_status td_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                           const void *logits, const int64_t *targets, const float *lse,
                                           float scale, void *dlogits);

/* ---- gradients and optimizers ---- */

/** norm = sqrt(sum of g[i]^2), summed in float64.
 *
 *   g     [count]  in   dtype
 *   norm  [1]      out  f32 */
TD_API td_status td_global_norm_work_bytes(td_device *dev, int64_t count, td_dtype dtype, size_t *out);
TD_API td_status td_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                                void *work);

/** The state of a step. Every update reads it, together with its hyperparameters. The caller allocates both
 * in dev's memory. An update reads them when it runs, so a replayed graph sees changes. */
typedef struct td_update_state {
    int64_t step; /* number of the current step, from 1; 0 before the first td_update_begin */
    float gain;   /* a factor for gradients, which averages, clips or unscales them; 1: unchanged */
} td_update_state;

/** Begins a step: state->step += 1, unless it is 2^63 - 1; state->gain = gain. state is in dev's memory.
 * TD_BAD_ARGUMENT: a NULL, a gain that is not finite. */
TD_API td_status td_update_begin(td_device *dev, td_update_state *state, float gain);

/** state->gain *= min(1, max_norm / (|state->gain| norm + 1e-6)): clips gradients as
 * torch.nn.utils.clip_grad_norm_ does.
 *
 *   norm   [1]  in   f32, on dev: the norm of the gradients (td_global_norm); NaN makes the gain NaN
 *   state  [1]  i/o  on dev
 *
 * TD_BAD_ARGUMENT: a NULL, a max_norm that is not finite or not above 0. */
TD_API td_status td_update_clip(td_device *dev, float max_norm, const float *norm, td_update_state *state);

/** Copies `bytes` bytes, 1 to TD_ASSIGN_MOST, from host memory to `to` on dev. The copy is queued and the
 * host does not wait. `from` may change when the call returns. It serves to change hyperparameters between
 * replays of a graph. TD_BAD_ARGUMENT: a NULL, bytes out of range. */
#define TD_ASSIGN_MOST 64
TD_API td_status td_assign(td_device *dev, void *to, const void *from, size_t bytes);

/** The tensors of an update; all are on dev. */
typedef struct td_update_tensors {
    int64_t count;       /* elements of each tensor */
    td_dtype dtype;      /* of p */
    td_dtype grad_dtype; /* of g: dtype, or a 16-bit type if dtype is TD_F32; 0: dtype */
    void *p;             /* [count] i/o: the weights; if low is not NULL, their high planes (td_split) */
    void *low;           /* [count] i/o: the low planes; only if dtype is TD_F32. NULL: p has the numbers */
    const void *g;       /* [count] in: the gradients */
    float *m, *v;        /* [count] i/o: moments, which are 0 before the first step; only AdamW uses them */
    /* The number of SMs of a GPU that run the update, so that other work can run on the other SMs; 0: all.
     * The result has the same bits. The update runs on all SMs if the device has no kernel for `sms`, or if
     * an address is not a multiple of 16 bytes. */
    int32_t sms;
    /* If sms is above 0: TD_UPDATE_WORK_BYTES bytes on dev, which are 0 before the first update. Updates that
     * may run at the same time need different `work`. */
    void *work;
} td_update_tensors;

#define TD_UPDATE_WORK_BYTES 16

/** Three published orders of an AdamW step (Loshchilov and Hutter 2019, algorithm 2), with
 * g = gain * gradient:
 *
 *   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
 *   c1 = 1 - beta1^step,           c2 = 1 - beta2^step
 *
 * On CUDA the change of a weight has a relative error of at most 2^-21. A v below 2^-126 counts as 0 in it.
 * If its denominator is above 2^126, the change is 0. */
typedef enum td_adamw_variant {
    TD_ADAMW_COURSE2025 = 0, /* p -= lr sqrt(c2) / c1 * m / (sqrt(v) + eps);  then p -= lr wd p */
    TD_ADAMW_COURSE2026,     /* p -= lr wd p;  then p -= lr sqrt(c2) / c1 * m / (sqrt(v) + eps) */
    TD_ADAMW_TORCH           /* p -= lr wd p;  then p -= lr / c1 * m / (sqrt(v / c2) + eps) */
} td_adamw_variant;

typedef struct td_adamw {
    td_adamw_variant variant;
    /* float64, as in PyTorch: in f32, 1 - 0.999f has a relative error of 1e-5, and so would v. */
    double lr, beta1, beta2, eps, weight_decay;
} td_adamw;

/** The defaults of the course and of torch.optim.AdamW, which are equal: lr 1e-3, betas 0.9 and 0.999, eps
 * 1e-8, weight_decay 0.01. */
TD_API td_adamw td_adamw_defaults(td_adamw_variant variant);

/** Checks hyperparameters in host memory. td_adamw_update cannot check them in a GPU's memory, so call this
 * before td_assign.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown variant, a beta outside [0, 1), eps or lr below 0. Also a scalar that
 * f32 cannot hold, or a product of scalars, needed by a step, that f32 cannot hold. Also if eps and beta2 are
 * both 0, as in a struct of zeros: a gradient of 0 would make the weight NaN. If eps is 0 and beta2 is above
 * 0, a weight becomes NaN if all of its gradients so far were 0; PyTorch does the same. A weight_decay
 * below 0 is accepted. */
TD_API td_status td_adamw_check(const td_adamw *adamw);

/** One AdamW step. adamw and state are in dev's memory; *tensors is in host memory.
 *
 * TD_BAD_ARGUMENT: a NULL (also work with sms above 0), a grad_dtype that dtype does not allow, low with a
 * dtype other than TD_F32, sms below 0. On the CPU also: state->step below 1, and the errors of
 * td_adamw_check. */
TD_API td_status td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);

/** Whether dev has kernels for updates on a part of its SMs (td_update_tensors.sms). False for NULL. */
TD_API bool td_update_has_sms(td_device *dev);

typedef struct td_sgd {
    double lr;
} td_sgd;

/** Checks hyperparameters in host memory. TD_BAD_ARGUMENT: a NULL, an lr that f32 cannot hold. An lr below 0
 * is accepted. */
TD_API td_status td_sgd_check(const td_sgd *sgd);

/** One SGD step: p -= lr gain g. sgd and state are in dev's memory; *tensors is in host memory, and its m and
 * v are ignored. TD_BAD_ARGUMENT: as td_adamw_update, with td_sgd_check. */
TD_API td_status td_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors);

TD_END_DECLS

#endif
