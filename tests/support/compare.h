/** Assertions that compare floating-point results with a float64 truth. Each fails on NaN, and prints name,
 * index, both values and the measure. */
#ifndef TD_TESTS_COMPARE_H
#define TD_TESTS_COMPARE_H

#include "base/dtype.h"

/** Reads element `index` of an array of `dtype`, exactly. */
double td_value_at(td_dtype dtype, const void *data, int64_t index);

typedef struct td_error {
    double max_abs, rel_l2;
    int64_t worst;       /* index of max_abs, or of the first non-finite mismatch */
    bool finite_matches; /* NaN and infinities are in the same places, with the same sign */
} td_error;

/** Errors of got relative to truth, over the elements whose truth is finite. */
td_error td_measure(td_dtype dtype, const void *got, const double *truth, int64_t count);

/** Fails unless finite_matches, rel_l2 <= tolerance and max_abs <= tolerance * max |truth| * 8 (written so
 * that NaN fails). */
#define td_assert_close(...) td_check_close(__VA_ARGS__, __FILE__, __LINE__)
void td_check_close(const char *name, td_dtype dtype, const void *got, const double *truth, int64_t count,
                    double tolerance, const char *file, int line);

/** Fails unless the bytes are equal, naming the first element that is not. */
#define td_assert_identical(...) td_check_identical(__VA_ARGS__, __FILE__, __LINE__)
void td_check_identical(const char *name, td_dtype dtype, const void *a, const void *b, int64_t count,
                        const char *file, int line);

/** Runs a call that must fail with `status` and a message that contains `words`, which are long enough not to
 * fit another message by chance. */
enum { TD_LEAST_WORDS = 8 };
#define td_assert_refused(call, status, words)                                                               \
    td_check_refused(#call, (td_forget_error(), (call)), (status), (words), __FILE__, __LINE__)
void td_check_refused(const char *text, td_status got, td_status want, const char *words, const char *file,
                      int line);

/** Sets td_last_error() to a message that no refusal contains, so that an old message cannot pass as a new
 * one. */
void td_forget_error(void);

/** Runs a call that must succeed; prints td_last_error() otherwise. */
#define td_assert_ok(call) td_check_ok(#call, (call), __FILE__, __LINE__)
void td_check_ok(const char *text, td_status got, const char *file, int line);

#endif
