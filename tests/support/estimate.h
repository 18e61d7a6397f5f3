/** The rounding errors of a formula in plain f32 arithmetic: its value in float64, and the norm of the
 * errors.
 *
 * For a sum the norm is Gamma, the root of the sum of the squared partial sums. The error of an f32 sum is
 * within a few u Gamma (Hallman and Ipsen, arXiv 2107.01604; docs/parity.md, "The rule"). Gamma depends on
 * the order of the terms, and a library's order is unknown. Rarely the Gamma of one order is far below the
 * others. So Gamma^2 here is the larger of two values: its value for one term after the other, and twice its
 * mean over all orders. With S the sum of k terms and Q the sum of their squares, the sum of j terms in
 * random order has the mean square (j / k) Q + j (j - 1) / (k (k - 1)) (S^2 - Q). The mean of Gamma^2 is (k +
 * 1) (Q / 6 + S^2 / 3).
 *
 * In a formula of several operations each adds the square of its own rounding, and its operands' errors times
 * the derivatives. Errors are treated as independent. If many terms share an error, the formula adds it
 * itself. */
#ifndef TD_TESTS_ESTIMATE_H
#define TD_TESTS_ESTIMATE_H

#include "base/dtype.h"

#include <math.h>

/* Half an ulp of f32 at 1: the unit of the errors here. */
#define TD_ULP_HALF 0x1p-24

typedef struct td_estimate {
    double value;
    double square; /* the square of the error's norm, in units of u = 2^-24 */
} td_estimate;

/** A number without error. td_rounded: a number that was rounded `times` times. */
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

/** A sum of products. It begins as a struct of zeros. */
typedef struct td_sum {
    double value, squares;     /* S, Q */
    double partials, operands; /* sums of squares: of the partial sums, and of the errors of the terms */
    double sizes, terms;       /* sums of magnitudes: of the partial sums, and of the products */
    double count;
} td_sum;

/** sum += a b. Without a fused multiply-add the product is rounded too, by less than the sum. */
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

/** The error of a sum, in units of u, because a GPU's tensor cores truncate instead of rounding. They add
 * some 16 products at once. They truncate each product at two bits after the sum's last place, and then the
 * sum: on average 16 / 8 + 1 / 2 of the last place, or 4 u times the sum. All of these errors point towards
 * 0, so results of one sign share them. */
static inline double td_cut_off(td_sum sum)
{
    return sum.sizes * 4 / 16;
}

/** The result after a store in dtype. Below f16's smallest normal number the rounding error does not get
 * smaller. */
static inline td_estimate td_stored(td_estimate x, td_dtype dtype)
{
    const double least = dtype == TD_F16 ? 0x1p-25 : 0.0;
    const double units = fmax(td_dtype_eps(dtype) / 2 * fabs(x.value), least) / TD_ULP_HALF;

    return (td_estimate){x.value, x.square + units * units};
}

/** The allowed error of a result stored in dtype: 4 u Gamma, and the rounding of the store. (The errors of
 * random sums of 64 to 16,384 terms were at most 2.4 u Gamma, with a root mean square of 0.4.) Numbers below
 * dtype's smallest normal number may be flushed to 0; in f32 this may also happen inside a formula, whose
 * factors then multiply the error. */
static inline double td_allowance(td_estimate x, td_dtype dtype)
{
    const double smallest = dtype == TD_F16 ? 0x1p-25 : 0x1p-100;

    return 4.0 * TD_ULP_HALF * sqrt(x.square) + td_dtype_eps(dtype) / 2 * fabs(x.value) + smallest;
}

#endif
