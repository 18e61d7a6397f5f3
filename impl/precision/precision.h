/** Effects of low precision: the results of accumulation loops, and the dtype of each operation under
 * autocast. */
#ifndef TD_PRECISION_PRECISION_H
#define TD_PRECISION_PRECISION_H

#include "base/dtype.h"

TD_BEGIN_DECLS

typedef enum td_sum_method {
    TD_SUM_SEQUENTIAL = 0, /* s = round(s + x), one addition after the other */
    TD_SUM_KAHAN,          /* compensated: the rounding error of each addition is carried to the next */
    TD_SUM_PAIRWISE        /* recursive halves */
} td_sum_method;

typedef struct td_sum_case {
    int64_t count;
    double value;         /* rounded to `addend` before the first addition */
    td_dtype addend;      /* dtype of the numbers that are added */
    td_dtype accumulator; /* dtype of the sum, rounded to after every operation */
    bool cast_first;      /* the addend is converted to the accumulator's dtype by an explicit cast before the
                             addition, instead of by the promotion inside it; the same arithmetic */
    td_sum_method method;
} td_sum_case;

/** Adds `value` count times, with every operation correctly rounded to the accumulator's dtype.
 *
 *   sum       out  the exact value of the accumulator
 *   stalled   out  TD_SUM_SEQUENTIAL: the number of the last addition that changed the sum, or 0. Other
 *                  methods: count. NULL: not wanted
 *
 * TD_BAD_ARGUMENT: a NULL, count below 0, an unknown dtype or method, an addend that the accumulator's dtype
 * cannot hold: a wider one, or one of f16 and bf16 with the other (PyTorch would promote both to f32). */
TD_API td_status td_precision_sum(const td_sum_case *sum_case, double *sum, int64_t *stalled);

/** *out = loop `index`, 0 to 3, of the handout's mixed_precision_accumulation: 1000 additions of 0.01.
 * TD_BAD_ARGUMENT: a NULL, an index out of range. */
TD_API td_status td_precision_handout_case(int64_t index, td_sum_case *out);

/* ---- autocast ---- */

typedef enum td_autocast_device { TD_AUTOCAST_CPU = 0, TD_AUTOCAST_CUDA } td_autocast_device;

typedef enum td_autocast_rule {
    TD_AUTOCAST_LOWER = 0,      /* runs in the low precision */
    TD_AUTOCAST_F32,            /* runs in f32 */
    TD_AUTOCAST_WIDEST,         /* casts all inputs to the widest dtype among them */
    TD_AUTOCAST_TYPE_PROMOTION, /* not in autocast's lists: runs in the dtype that its inputs promote to */
    TD_AUTOCAST_BANNED          /* autocast refuses to run it */
} td_autocast_rule;

/** *out = the rule of an operation, by PyTorch's name ("linear", "matmul", "layer_norm",
 * "cross_entropy_loss", ...).
 *
 * Source: the operator lists of torch.autocast that PyTorch 2.13 registers (documented under "Automatic Mixed
 * Precision package"). _cudnn_rnn is left out, because it always runs in f16. Some operations are not listed
 * and run as several listed operations, for example "cross_entropy_loss" on CUDA. They have the rule of the
 * last of these operations. Any other unlisted operation is TD_AUTOCAST_TYPE_PROMOTION. TD_BAD_ARGUMENT: a
 * NULL, an unknown device. */
TD_API td_status td_autocast_rule_find(td_autocast_device device, const char *op, td_autocast_rule *out);

/** "lower", "f32", "widest", "type promotion", "banned"; "unknown rule" for any other value. Never NULL. */
TD_API const char *td_autocast_rule_name(td_autocast_rule rule);

/** The number of listed operations; 0 for an unknown device. */
TD_API int64_t td_autocast_list_size(td_autocast_device device);

/** *op, *rule = listed operation `index`, from 0, and its rule. *op is a constant string. TD_BAD_ARGUMENT: a
 * NULL, an unknown device, an index out of range. */
TD_API td_status td_autocast_list_entry(td_autocast_device device, int64_t index, const char **op,
                                        td_autocast_rule *rule);

/** *out = the dtype that `op` produces from inputs of these dtypes under autocast to `low` (TD_F16 or
 * TD_BF16).
 *
 *   inputs  [count]  in  dtypes of the floating-point inputs that take part in type promotion: tensors with
 *                        dimensions, not scalars, and not the affine weights of a norm
 *
 * No rule casts an f64 input. TD_BAD_ARGUMENT: a NULL, count below 1, an unknown device or dtype, a `low`
 * other than f16 and bf16. TD_UNSUPPORTED: an operation that autocast bans, or the other low precision among
 * the inputs of a TD_AUTOCAST_WIDEST operation before any f32 input. */
TD_API td_status td_autocast_result(td_autocast_device device, td_dtype low, const char *op, int64_t count,
                                    const td_dtype *inputs, td_dtype *out);

/** One line of the answer to benchmarking_mixed_precision (a): the dtype of a component of the ToyModel
 * (Linear(in, 10), ReLU, LayerNorm(10), Linear(10, out), no biases but the norm's) under autocast. */
typedef struct td_toy_component {
    const char *name; /* "parameters", "fc1", "relu", "ln", "logits", "loss", "gradients" */
    td_dtype dtype;
} td_toy_component;

/** The dtypes of the ToyModel's components, derived from the rules above. Parameters, inputs and targets are
 * f32. `loss` is "cross_entropy_loss", "mse_loss" or "mean" (a plain mean of the logits).
 *
 *   components  [8]  out  the first *count are written, in the order of the forward pass
 *
 * The devices differ in one rule. CUDA's list has layer_norm in f32. The CPU's list does not name it, so the
 * norm keeps the low precision of its input. TD_BAD_ARGUMENT: a NULL, an unknown device or loss, a `low`
 * other than f16 and bf16. */
TD_API td_status td_autocast_toy_model(td_autocast_device device, td_dtype low, const char *loss,
                                       td_toy_component components[8], int64_t *count);

TD_END_DECLS

#endif
