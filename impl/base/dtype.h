/** Element types: names, sizes, correctly rounded conversion. */
#ifndef TD_BASE_DTYPE_H
#define TD_BASE_DTYPE_H

#include "base/status.h"

TD_BEGIN_DECLS

typedef enum td_dtype {
    TD_F64 = 0,
    TD_F32, /* IEEE 754 binary32 */
    TD_F16, /* IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits; largest finite value 65504 */
    TD_BF16 /* the upper half of a binary32: 1 sign, 8 exponent, 7 fraction bits */
} td_dtype;

/** "f64", "f32", "f16", "bf16"; "unknown dtype" for any other value. Never NULL. */
TD_API const char *td_dtype_name(td_dtype dtype);

/** Bytes of one element; 0 for a value that is not a td_dtype. */
TD_API size_t td_dtype_size(td_dtype dtype);

/** Machine epsilon, the distance from 1 to the next larger value: 2^-52, 2^-23, 2^-10, 2^-7. NaN for a value
 * that is not a td_dtype. */
TD_API double td_dtype_eps(td_dtype dtype);

/** *out = the dtype with this name. TD_BAD_ARGUMENT: out or name is NULL, or td_dtype_name never returns the
 * name; *out is then unchanged. */
TD_API td_status td_dtype_parse(const char *name, td_dtype *out);

/** How a model computes.
 *
 * bf16_mixed is PyTorch's autocast: weights, the residual stream and every reduction are f32; GEMMs read and
 * write bf16. (Mixed precision in f16 would need a loss scale, which tandem does not have.) tf32: all tensors
 * are f32, but GEMMs round their inputs to TF32 (CUDA only). */
typedef enum td_precision {
    TD_PRECISION_F32 = 0,
    TD_PRECISION_TF32,
    TD_PRECISION_BF16,
    TD_PRECISION_F16,
    TD_PRECISION_BF16_MIXED
} td_precision;

/** "f32", "tf32", "bf16", "f16", "bf16_mixed"; NULL for any other value. */
TD_API const char *td_precision_name(td_precision precision);

/** *out = the precision with this name. TD_BAD_ARGUMENT: out or name is NULL, or the name is unknown; *out is
 * then unchanged. */
TD_API td_status td_precision_parse(const char *name, td_precision *out);

/** The dtype of GEMM inputs and outputs: TD_F32 for f32 and tf32, TD_BF16 for bf16 and bf16_mixed, TD_F16 for
 * f16. TD_F32 for any other value. */
TD_API td_dtype td_precision_dtype(td_precision precision);

/** The dtype of the weights: as td_precision_dtype, but TD_F32 for bf16_mixed. */
TD_API td_dtype td_precision_weights(td_precision precision);

/** dst[i] = src[i] for i in [0, count). Each value is rounded once, from the source type to the target type,
 * to nearest with ties to even. NaN stays NaN (quiet, same sign), infinities stay, values beyond the largest
 * finite value become infinite, and subnormals are exact. If both types are equal, the bits are copied. The
 * calling thread may flush subnormals to zero or round in another direction: the result does not depend on
 * it.
 *
 *   src  [count]  in   src_dtype  contiguous, host memory
 *   dst  [count]  out  dst_dtype  contiguous, host memory; no overlap, or equal to src if sizes are equal
 *
 * TD_BAD_ARGUMENT: a NULL with count > 0, count below 0, an unknown dtype. */
TD_API td_status td_convert(int64_t count, td_dtype src_dtype, const void *src, td_dtype dst_dtype,
                            void *dst);

TD_END_DECLS

#endif
