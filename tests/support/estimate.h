/** What plain f32 arithmetic may make of a formula: a value in float64 beside the norm of its rounding
 * errors.
 *
 * For a sum that norm is Gamma, the root of the sum of the squared partial sums: the error of an f32 sum is
 * within a few u Gamma (Hallman and Ipsen, arXiv 2107.01604; docs/parity.md, "The rule"). Gamma belongs to
 * an order of the terms, and now and then one order's is far below another's, so that here it is that of one
 * term after the other or, if that is larger, twice the mean of Gamma^2 over all orders: how a library adds
 * is not known. With S the sum of k terms and Q that of their squares, j terms in random order have the mean
 * square
 * (j / k) Q + j (j - 1) / (k (k - 1)) (S^2 - Q), and these come to Gamma^2 = (k + 1) (Q / 6 + S^2 / 3).
 *
 * The same is carried through a formula of several operations: each adds the square of its own result, and
 * the errors of its operands times the derivatives. Errors are taken as independent; where one is common to
 * many terms, the formula that uses these functions adds it by hand. */
#ifndef TD_TESTS_ESTIMATE_H
#define TD_TESTS_ESTIMATE_H

#include "base/dtype.h"

#include <math.h>

/* Half an ulp of f32 at 1: the unit of the errors here. */
#define TD_ULP_HALF 0x1p-24

typedef struct td_estimate {
    double value;
    double square; /* of the error's norm, in units of u = 2^-24 */
} td_estimate;

/** A number without error, and a result of value's size that was rounded `times` times. */
static inline td_estimate td_exact(double value)
{
    return (td_estimate){.value = value};
}

static inline td_estimate td_rounded(double value, double times)
{
    return (td_estimate){.value = value, .square = times * value * value};
}

static inline td_estimate td_plus(td_estimate a, td_estimate b)
{
    const double value = a.value + b.value;

    return (td_estimate){value, a.square + b.square + value * value};
}

static inline td_estimate td_minus(td_estimate a, td_estimate b)
{
    return td_plus(a, (td_estimate){-b.value, b.square});
}

static inline td_estimate td_times(td_estimate a, td_estimate b)
{
    const double value = a.value * b.value;

    return (td_estimate){value, a.square * b.value * b.value + b.square * a.value * a.value + value * value};
}

static inline td_estimate td_over(td_estimate a, td_estimate b)
{
    const double value = a.value / b.value, inverse = 1.0 / (b.value * b.value);

    return (td_estimate){value, a.square * inverse + b.square * value * value * inverse + value * value};
}

/** exp within `2 + |x|` roundings: the argument may be scaled to base 2 first. */
static inline td_estimate td_exp_of(td_estimate x)
{
    const double value = exp(x.value), scaled = value * x.value;

    return (td_estimate){value, value * value * (x.square + 4.0) + scaled * scaled};
}

static inline td_estimate td_sqrt_of(td_estimate x)
{
    const double value = sqrt(x.value);

    return (td_estimate){value, value > 0.0 ? x.square / (4.0 * x.value) + value * value : x.square};
}

/** A sum of products: all begins at 0. */
typedef struct td_sum {
    double value, squares;     /* S, Q */
    double partials, operands; /* the squares of the partial sums, and of the errors of what was added */
    double sizes, terms;       /* the partial sums without their signs, added up, and the products */
    double count;
} td_sum;

/** sum += a b. The rounding of the product, where an evaluation has no fused multiply-add, is less than that
 * of the sum. */
static inline void td_accumulate(td_sum *sum, td_estimate a, td_estimate b)
{
    const double product = a.value * b.value;

    sum->value += product;
    sum->squares += product * product;
    sum->partials += sum->value * sum->value;
    sum->sizes += fabs(sum->value);
    sum->terms += fabs(product);
    sum->operands += a.square * b.value * b.value + b.square * a.value * a.value;
    sum->count++;
}

static inline td_estimate td_summed(td_sum sum)
{
    const double mean = (sum.count + 1) * (sum.squares / 6 + sum.value * sum.value / 3);

    return (td_estimate){sum.value, sum.operands + fmax(sum.partials, 2 * mean)};
}

/** How much of a sum, in units of u, a GPU's matrix units take away by cutting off where others round. They
 * add some 16 products at once, each cut off at two bits behind the sum's last place, and then cut off the
 * sum: on average 16 / 8 + 1 / 2 of that place, or 4 u times the sum. All of it is towards 0, so that results
 * of one sign have it in common. */
static inline double td_cut_off(td_sum sum)
{
    return sum.sizes * 4 / 16;
}

/** The result as it is stored in a type before it is read again; below f16's smallest normal number the
 * roundings no longer shrink with it. */
static inline td_estimate td_stored(td_estimate x, td_dtype dtype)
{
    const double least = dtype == TD_F16 ? 0x1p-25 : 0.0;
    const double units = fmax(td_dtype_eps(dtype) / 2 * fabs(x.value), least) / TD_ULP_HALF;

    return (td_estimate){x.value, x.square + units * units};
}

/** How far from the value a result may be that is stored in dtype: 4 u Gamma, and the rounding of the store.
 * (Random sums of 64 to 16,384 terms were at most 2.4 u Gamma off, 0.4 at the root mean square.) What is
 * below dtype's smallest normal number may be flushed to 0: in f32 also inside a formula, which multiplies
 * what is lost by its factors. */
static inline double td_allowance(td_estimate x, td_dtype dtype)
{
    const double smallest = dtype == TD_F16 ? 0x1p-25 : 0x1p-100;

    return 4.0 * TD_ULP_HALF * sqrt(x.square) + td_dtype_eps(dtype) / 2 * fabs(x.value) + smallest;
}

#endif
