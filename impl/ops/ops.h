/** The operations of a language model, forward and backward, on any device.
 *
 * All tensors are on dev, contiguous and row-major unless a pitch or leading dimension says otherwise.
 * `dtype` is the storage type: TD_F32 or TD_BF16, on CUDA also TD_F16. Arithmetic and reductions are in f32;
 * the loss and the sums of norms may be in f64. A result is rounded once, when it is stored.
 *
 * Mixed precision keeps weights and the residual stream in f32 and multiplies in 16 bits. If the tensors of
 * an operation may differ in type, the shape has a second dtype field; 0 in it (TD_F64, which no kernel
 * takes) means "as dtype".
 *
 * Every function is queued on dev's stream, allocates nothing, and may be captured in a graph. The caller
 * owns scratch: if a function takes `work`, its _work_bytes twin gives the size. `work` is 256-byte aligned,
 * and may be NULL if that size is 0.
 *
 * All of them return TD_BAD_ARGUMENT for a NULL, an extent below 1, a product beyond 2^63 - 1, a pitch below
 * the row or a non-finite scalar, and TD_UNSUPPORTED if the device has no kernel for the dtype. Nothing was
 * queued then, and every output is as it was. Unless "in place allowed" is said, an output overlaps no other
 * argument. With the same number of threads results have the same bits. Operations on single elements or rows
 * give the same bits with any number of threads.
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
 *   a  op(A) is [m, k]: A is [m, k] or, with trans_a, [k, m]; rows lda apart     in   dtype
 *   b  op(B) is [k, n]: B is [k, n] or, with trans_b, [n, k]; rows ldb apart     in   dtype
 *   c  [m, n], rows ldc apart; not read when beta is 0                           i/o  out_dtype
 *
 * A linear layer y = x W^T (W is [d_out, d_in]) is {trans_b = true}. Products are accumulated in f32, and
 * bf16 output is rounded once, after beta * C was added. out_dtype is dtype or TD_F32. Processors
 * with bf16 instructions (AVX-512 BF16, AMX) use them; these take subnormal inputs, products and sums as 0.
 *
 * td_gemm_work_bytes never falls if an extent grows: work for one shape is enough for all smaller ones.
 *
 * TD_BAD_ARGUMENT also for tf32 with a dtype other than TD_F32. TD_UNSUPPORTED also for tf32 on the CPU. */
typedef struct td_gemm_shape {
    int64_t batch, m, n, k;
    int64_t lda, ldb, ldc;                /* 0: the row's own length */
    int64_t stride_a, stride_b, stride_c; /* elements from one matrix of the batch to the next; 0: one matrix
                                           * for all, which is refused for c if batch > 1 */
    bool trans_a, trans_b;
    float alpha, beta;
    td_dtype dtype, out_dtype;
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
 * On the CPU TD_BAD_ARGUMENT also for an id outside [0, vocab), named with its position. On CUDA such an id
 * gives a row of NaN, and backward skips it. */
TD_API td_status td_embedding_forward(td_device *dev, const td_embedding_shape *shape, const int64_t *ids,
                                      const void *weight, void *y);

/** dweight[v, :] = sum over t with ids[t] = v of dy[t, :], in an order that depends on ids alone; with
 * `accumulate` the sum is added to dweight; else rows without a token become 0.
 *
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
    td_dtype x_dtype;       /* of x, dx and weight: dtype, or TD_F32 if dtype has 16 bits; 0: dtype */
    td_dtype dweight_dtype; /* of dweight: dtype, or TD_F32, to accumulate in; 0: dtype */
} td_rmsnorm_shape;

/** y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps)        (Zhang and Sennrich 2019, eq. 4, with eps)
 *
 *   x       [rows, cols]  in   x_dtype
 *   weight  [cols]        in   x_dtype
 *   y       [rows, cols]  out  dtype    in place of x allowed if both types are the same
 *   rstd    [rows]        out  f32      NULL: not wanted
 *
 * Both products are f32; y is rounded once. */
TD_API td_status td_rmsnorm_forward(td_device *dev, const td_rmsnorm_shape *shape, const void *x,
                                    const void *weight, void *y, float *rstd);

/** Adds to the residual stream and takes the next norm, in one pass: sum = a + b; y is the norm of the
 * stored, rounded sum.
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
 *   x, weight, rstd  of forward                                                              in
 *   dy          [rows, cols]  in   dtype
 *   dx          [rows, cols]  i/o  x_dtype  accumulate_dx: the result is added to dx; in place of dy allowed
 *                                           if it is not set and both types are the same
 *   dx_rounded  [rows, cols]  out  dtype    the new dx, rounded, for the next GEMM; NULL: not wanted
 *   dweight     [cols]        i/o  dweight_dtype  accumulate_dweight: the result is added to dweight
 *
 * TD_BAD_ARGUMENT also for dx_rounded if x_dtype is dtype, because it would equal dx. */
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

/** cos and sin of pos * theta^(-2i / head_dim), for pos in [0, positions) and i in [0, head_dim / 2).
 *
 *   cos, sin  [positions, head_dim / 2]  out  f32, from float64 angles
 *
 * TD_BAD_ARGUMENT also for an odd head_dim, theta not above 0. */
TD_API td_status td_rope_table(td_device *dev, int64_t positions, int64_t head_dim, double theta, float *cos,
                               float *sin);

/** Splits the rows of the fused projection of q, k and v into heads. Rotary position embedding turns q and k
 * on interleaved pairs (Su et al. 2021, eq. 34), by the token's position:
 *   y[2i] = x[2i] cos - x[2i+1] sin,  y[2i+1] = x[2i] sin + x[2i+1] cos;  v is copied.
 *
 * A token's row of qkv has q, then k, then v. Each has heads * head_dim elements, and a head is a contiguous
 * slice of them.
 *
 *   qkv      [batch, seq, pitch]            in   dtype
 *   cos, sin [at least seq, head_dim / 2]   in   f32
 *   q, k, v  [batch, heads, seq, head_dim]  out  dtype
 *
 * TD_BAD_ARGUMENT also for an odd head_dim. */
TD_API td_status td_qkv_split_forward(td_device *dev, const td_heads_shape *shape, const void *qkv,
                                      const float *cos, const float *sin, void *q, void *k, void *v);

/** The transpose: dq, dk and dv in, dqkv out. dq and dk are turned by the opposite angle, and every head goes
 * back to its slice of the token's row. Elements between 3 * heads * head_dim and pitch are not written. */
TD_API td_status td_qkv_split_backward(td_device *dev, const td_heads_shape *shape, const void *dq,
                                       const void *dk, const void *dv, const float *cos, const float *sin,
                                       void *dqkv);

/* ---- SiLU * mul (the gate of SwiGLU) ---- */

typedef struct td_rows_shape {
    int64_t rows, cols;
    int64_t pitch; /* elements between rows of gate, up, dgate and dup; 0: cols. y and dy are contiguous */
    td_dtype dtype;
} td_rows_shape;

/** y = silu(gate) * up,  silu(z) = z / (1 + exp(-z)).   gate, up [rows, pitch] in, y [rows, cols] out. */
TD_API td_status td_silu_mul_forward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                     const void *up, void *y);

/** dgate = dy * up * s (1 + gate (1 - s)) with s = sigmoid(gate),  dup = dy * silu(gate). dgate may be gate
 * and dup may be up (in place allowed).
 *
 *   y  [rows, cols]  out  dtype  forward's output again; in place of dy allowed; NULL: not wanted */
TD_API td_status td_silu_mul_backward(td_device *dev, const td_rows_shape *shape, const void *gate,
                                      const void *up, const void *dy, void *dgate, void *dup, void *y);

/* ---- rounding, planes, residual ---- */

/** dst = src, rounded to nearest, ties to even, [count].   src in, src_dtype; dst out, dst_dtype. */
TD_API td_status td_round(td_device *dev, int64_t count, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst);

/** Splits f32 numbers into two planes of 16 bits, so that GEMMs read bf16 weights from the masters' memory:
 * the bits of the f32 = high * 2^16 + low, with low a signed number.
 *
 *   numbers  [count]  f32   in of td_split, out of td_join
 *   high     [count]  bf16  out of td_split, in of td_join: the nearest bf16, ties away from zero
 *   low      [count]  16 bits  out of td_split, in of td_join
 *
 * td_join restores the bits that td_split got; a NaN becomes a quiet NaN of the same sign. PyTorch's copy and
 * td_round round ties to even. They differ from high only if the f32 lies in the middle between two bf16, and
 * the bf16 nearer to zero is even. Ties to even cannot be stored in 32 bits: a tie would need a low of 2^15
 * if high was rounded down, and a low of -2^15 if high was rounded up. TD_BAD_ARGUMENT: a NULL, a count
 * below 1. */
TD_API td_status td_split(td_device *dev, int64_t count, const float *numbers, void *high, void *low);
TD_API td_status td_join(td_device *dev, int64_t count, const void *high, const void *low, float *numbers);

/** y = a + b, [count], dtype; in place of a or b allowed. Its gradient is the identity for both. */
TD_API td_status td_residual_add(td_device *dev, int64_t count, td_dtype dtype, const void *a, const void *b,
                                 void *y);

/* ---- softmax over rows ---- */

typedef struct td_softmax_shape {
    int64_t rows, cols;
    int64_t causal_seq; /* 0: no mask. n > 0: row r is query r mod n, and sees columns 0 .. r mod n */
    td_dtype dtype;
} td_softmax_shape;

/** y = exp(x - max) / sum(exp(x - max)) over the columns that the row sees; masked columns become 0.
 * x, y [rows, cols], in place allowed. A row of -inf only becomes NaN, as in PyTorch. */
TD_API td_status td_softmax_forward(td_device *dev, const td_softmax_shape *shape, const void *x, void *y);

/** dx = scale * y * (dy - sum(y * dy)), masked columns 0; in place of dy allowed. */
TD_API td_status td_softmax_backward(td_device *dev, const td_softmax_shape *shape, float scale,
                                     const void *y, const void *dy, void *dx);

/* ---- cross entropy, mean over tokens ---- */

typedef struct td_cross_entropy_shape {
    int64_t rows, vocab;
    td_dtype dtype; /* of the logits */
} td_cross_entropy_shape;

/** loss = mean over rows of  lse[r] - logits[r, targets[r]],  lse[r] = log(sum(exp(logits[r, :]))) by max
 * subtraction; the mean is summed in float64.
 *
 *   logits   [rows, vocab]  in   dtype
 *   targets  [rows]         in   int64
 *   loss     [1]            out  f32
 *   lse      [rows]         out  f32
 *
 * On the CPU TD_BAD_ARGUMENT also for a target outside [0, vocab), named with its row. On CUDA such a target
 * makes the loss and its row of dlogits NaN. */
TD_API td_status td_cross_entropy_work_bytes(td_device *dev, const td_cross_entropy_shape *shape,
                                             size_t *out);
TD_API td_status td_cross_entropy_forward(td_device *dev, const td_cross_entropy_shape *shape,
                                          const void *logits, const int64_t *targets, float *loss, float *lse,
                                          void *work);

/** dlogits = scale / rows * (exp(logits - lse) - onehot(target)); in place of logits allowed. scale is the
 * gradient of the loss, 1 for plain training. lse is from forward with the same logits. A device may sum the
 * row again instead, because the rounding of lse to f32 is the largest error here. */
TD_API td_status td_cross_entropy_backward(td_device *dev, const td_cross_entropy_shape *shape,
                                           const void *logits, const int64_t *targets, const float *lse,
                                           float scale, void *dlogits);

/* ---- gradients and optimizers ---- */

/** norm = sqrt(sum of g^2), summed in float64.   g [count] in, dtype; norm [1] out, f32. */
TD_API td_status td_global_norm_work_bytes(td_device *dev, int64_t count, td_dtype dtype, size_t *out);
TD_API td_status td_global_norm(td_device *dev, int64_t count, td_dtype dtype, const void *g, float *norm,
                                void *work);

/** Numbers that every update reads, next to its hyperparameters. Both structs are in dev's memory and are
 * read when the update runs, so that a replayed graph sees changes. */
typedef struct td_update_state {
    int64_t step; /* the number of the current step, from 1 */
    float gain;   /* a factor for gradients, which averages, clips or unscales them */
} td_update_state;

/** Begins a step: state->step += 1, but never above 2^63 - 1; state->gain = gain.
 * TD_BAD_ARGUMENT: a NULL, a gain that is not finite. */
TD_API td_status td_update_begin(td_device *dev, td_update_state *state, float gain);

/** state->gain *= min(1, max_norm / (|state->gain| norm + 1e-6)): clips gradients of that norm as
 * torch.nn.utils.clip_grad_norm_ does. norm [1] is f32 in dev's memory. A norm that is NaN makes the gain
 * NaN. TD_BAD_ARGUMENT: a NULL, a max_norm that is not finite or not above 0. */
TD_API td_status td_update_clip(td_device *dev, float max_norm, const float *norm, td_update_state *state);

/** Copies at most TD_ASSIGN_MOST bytes from the host's memory at `from` to dev's memory at `to`. Queued;
 * waits for nothing; `from` may change once it returns. So hyperparameters can change between the replays of
 * a graph. TD_BAD_ARGUMENT: a NULL, more bytes, or no bytes. */
#define TD_ASSIGN_MOST 64
TD_API td_status td_assign(td_device *dev, void *to, const void *from, size_t bytes);

/** The arrays of an update. */
typedef struct td_update_tensors {
    int64_t count;
    td_dtype dtype;      /* of p */
    td_dtype grad_dtype; /* of g: dtype, or a 16-bit type if dtype is TD_F32; 0: dtype */
    void *p;             /* [count] i/o weights; if low is given, their upper planes (td_split) */
    void *low;           /* [count] i/o lower planes, if dtype is TD_F32; NULL: p has the numbers */
    const void *g;       /* [count] in: gradients */
    float *m, *v;        /* [count] i/o moments, zero before the first step; only AdamW reads them */
    /* How many SMs of a GPU run the update, so that it overlaps with work on the others; 0: all. The bits
     * are the same. If the device has no such kernel, or an address is no multiple of 16 bytes, the update
     * takes all SMs. */
    int32_t sms;
    /* With sms above 0: TD_UPDATE_WORK_BYTES on dev, zeros before the first update. Updates that may run at
     * the same time need different ones. */
    void *work;
} td_update_tensors;

#define TD_UPDATE_WORK_BYTES 16

/** Three published orders of an AdamW step (Loshchilov and Hutter 2019, algorithm 2),
 * with g = gain * gradient:
 *   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  c1 = 1 - beta1^step,  c2 = 1 - beta2^step
 * On CUDA the step has a relative error of at most 2^-21. A v below 2^-126 counts as 0 in it, and a step
 * whose denominator is above 2^126 is 0. */
typedef enum td_adamw_variant {
    TD_ADAMW_COURSE2025 = 0, /* p -= lr sqrt(c2) / c1 * m / (sqrt(v) + eps);  then p -= lr wd p */
    TD_ADAMW_COURSE2026,     /* p -= lr wd p;  then as course2025's first line */
    TD_ADAMW_TORCH           /* p -= lr wd p;  then p -= lr / c1 * m / (sqrt(v / c2) + eps) */
} td_adamw_variant;

typedef struct td_adamw {
    td_adamw_variant variant;
    /* float64, as in PyTorch: 1 - 0.999f has a relative error of 1e-5, and v would have it too. */
    double lr, beta1, beta2, eps, weight_decay;
} td_adamw;

/** The defaults of the course and of torch.optim.AdamW, which are the same: lr 1e-3, betas 0.9 and 0.999, eps
 * 1e-8, weight_decay 0.01. */
TD_API td_adamw td_adamw_defaults(td_adamw_variant variant);

/** Checks hyperparameters of AdamW. A step cannot check them in a GPU's memory: call this before td_assign.
 *
 * TD_BAD_ARGUMENT: a NULL, an unknown variant, a beta outside [0, 1), eps or lr below 0. Also a
 * scalar, or a product of scalars in the step, that f32 cannot hold. Also if eps and beta2 are both
 * 0, as in a struct of zeros: a gradient of 0 would make the weight NaN. (With a beta2 above 0 an eps of 0 is
 * accepted. As in PyTorch a weight then becomes NaN if all its gradients so far were 0.) */
TD_API td_status td_adamw_check(const td_adamw *adamw);

/** One AdamW step. adamw and state are in dev's memory; on the CPU they are checked.
 *
 * TD_BAD_ARGUMENT: a NULL, types that do not go together, planes of another type than f32; on the CPU as
 * td_adamw_check, a step below 1. */
TD_API td_status td_adamw_update(td_device *dev, const td_adamw *adamw, const td_update_state *state,
                                 const td_update_tensors *tensors);

/** Whether dev has kernels for updates on some of its SMs (td_update_tensors.sms). False for NULL. */
TD_API bool td_update_has_sms(td_device *dev);

typedef struct td_sgd {
    double lr;
} td_sgd;

/** TD_BAD_ARGUMENT: a NULL, an lr that f32 cannot hold. */
TD_API td_status td_sgd_check(const td_sgd *sgd);

/** One SGD step, p -= lr gain g. sgd and state are in dev's memory; tensors->m and v are ignored.
 * TD_BAD_ARGUMENT as td_adamw_update. */
TD_API td_status td_sgd_update(td_device *dev, const td_sgd *sgd, const td_update_state *state,
                               const td_update_tensors *tensors);

TD_END_DECLS

#endif
