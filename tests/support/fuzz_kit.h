/** What the files of test_fuzz_shapes share: the tensors of a random case, and the judge of its results.
 *
 * A case draws its tensors, says with fuzz_expect what must become of each element, and makes its call with
 * FUZZ_CALL. On the CPU every tensor lies between inaccessible pages, on a GPU between fences. fuzz_finish
 * then judges: expected elements against their truth, and every other byte of every tensor, inputs and the
 * gaps of outputs, against what it was. */
#ifndef TD_TESTS_FUZZ_KIT_H
#define TD_TESTS_FUZZ_KIT_H

#include "device/device.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/estimate.h"
#include "support/fuzz.h"
#include "support/test.h"

#include <inttypes.h>
#include <math.h>

extern td_device *fuzz_dev;

/* Opens "cpu" or "cuda"; support/gpu.h says what happens where there is no GPU. */
void fuzz_open(const char *name);
bool fuzz_on_gpu(void);

typedef struct fuzz_tensor {
    const char *name;
    td_dtype dtype;
    int64_t count;
    double *x;           /* the elements as they are before the call */
    td_estimate *expect; /* after it; square is below 0 for an element that keeps its bits */
    double *lean;        /* how far all of them may be off beside that in one direction, in u; or NULL */
    bool shared;         /* its elements have errors in common, as those of attention's rows */
    bool scratch;        /* contents do not matter */
    void *before, *after;
    unsigned char *block; /* where it lies: `lead` bytes, the tensor */
    size_t lead, bytes;
} fuzz_tensor;

/* A type that the device has kernels for, f32 every second time. */
td_dtype fuzz_dtype(void);
td_dtype fuzz_16bit(void);

/* An extent in [1, most]: small, next to the edge of a tile, a prime, or any. */
int64_t fuzz_extent(int64_t most);

/* 0 half of the time, else a pitch that leaves a gap or none. */
int64_t fuzz_pitch(int64_t row);

/* Tensors: drawn (of one of several distributions), poisoned with 0xFF, indices in [0, bound), given numbers,
 * and scratch. */
fuzz_tensor *fuzz_draw(const char *name, td_dtype dtype, int64_t count);
fuzz_tensor *fuzz_room(const char *name, td_dtype dtype, int64_t count);
fuzz_tensor *fuzz_given(const char *name, td_dtype dtype, int64_t count, const double *values);
fuzz_tensor *fuzz_ids(const char *name, int64_t count, int64_t bound);
fuzz_tensor *fuzz_scratch(size_t bytes);
int64_t fuzz_id(const fuzz_tensor *ids, int64_t index);

/* Its address on the device; NULL stays NULL. */
void *at(const fuzz_tensor *tensor);

/* What an element becomes: a value within its allowance, or with fuzz_expect_exact that value. */
void fuzz_expect(fuzz_tensor *tensor, int64_t index, td_estimate value);
void fuzz_expect_exact(fuzz_tensor *tensor, int64_t index, double value);

/* The sum behind it is formed by a GPU's matrix units, which may take `units` of u away from every element
 * alike. */
void fuzz_lean(fuzz_tensor *tensor, int64_t index, double units);

/* Makes the call twice from the same state; the second time must give the same bits. */
#define FUZZ_CALL(call)                                                                                      \
    do {                                                                                                     \
        for (int fuzz_round = 0; fuzz_round < 2; fuzz_round++) {                                             \
            fuzz_upload();                                                                                   \
            td_assert_ok(call);                                                                              \
            fuzz_download(fuzz_round, true);                                                                 \
        }                                                                                                    \
    } while (0)

/* The same for a call whose sums may come in another order each time. */
#define FUZZ_CALL_ONCE(call)                                                                                 \
    do {                                                                                                     \
        fuzz_upload();                                                                                       \
        td_assert_ok(call);                                                                                  \
        fuzz_download(0, false);                                                                             \
    } while (0)
void fuzz_upload(void);
void fuzz_download(int round, bool compare);

/* The result becomes what the next call of the case is given, no longer judged. */
void fuzz_accept(fuzz_tensor *tensor);

/* Whether `after` is as expected; if not, `text` says where it is not. */
bool fuzz_judge(const fuzz_tensor *tensor, char *text, size_t room);

/* Judges every tensor of the case and gives them back. */
void fuzz_finish(void);

/* The largest share of 4 u Gamma that a result took since this was asked last, beyond the rounding of its
 * store. */
double fuzz_worst(void);

/* One random case each. */
void fuzz_gemm(void);
void fuzz_embedding(void);
void fuzz_rmsnorm(void);
void fuzz_heads(void);
void fuzz_rope_table(void);
void fuzz_silu_mul(void);
void fuzz_round(void);
void fuzz_residual(void);
void fuzz_softmax(void);
void fuzz_cross_entropy(void);
void fuzz_adamw(void);
void fuzz_sgd(void);
void fuzz_norm(void);
void fuzz_naive(void);
void fuzz_flash(void);

/* The judge's own test: plain f32 evaluations must pass, wrong ones must not. */
void fuzz_judge_accepts_f32_and_refuses_mistakes(void **state);

#endif
