/** Shared by the random cases of test_fuzz_shapes: the tensors of a case, and the judge of its results.
 *
 * A case draws its tensors, sets the expected elements with fuzz_expect, and makes its call with FUZZ_CALL.
 * On the CPU every tensor lies between inaccessible pages, on a GPU between fences. fuzz_finish then compares
 * expected elements with their truth. Every other byte of every tensor, of inputs and of gaps, must be
 * unchanged. */
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

/* Opens "cpu" or "cuda"; see support/gpu.h for a machine without a GPU. */
void fuzz_open(const char *name);
bool fuzz_on_gpu(void);

typedef struct fuzz_tensor {
    const char *name;
    td_dtype dtype;
    int64_t count;
    double *x;           /* the elements before the call */
    td_estimate *expect; /* elements after the call; square < 0: the element keeps its bits */
    double *lean;        /* the largest further error of all elements in one direction, in u; NULL: none */
    bool shared;         /* elements share errors, as in rows of attention */
    bool scratch;        /* contents do not matter */
    void *before, *after;
    unsigned char *block; /* memory: `lead` bytes, then the tensor */
    size_t lead, bytes;
} fuzz_tensor;

/* A type for which the device has kernels, f32 half of the time. */
td_dtype fuzz_dtype(void);
td_dtype fuzz_16bit(void);

/* The next calls of fuzz_named_or, fuzz_extent and fuzz_pitch return these numbers, up to the first 0. */
void fuzz_name_extents(const int64_t *extents);
int64_t fuzz_named_or(int64_t drawn);

/* An extent in [1, most]: small, next to the edge of a tile, a prime, or any. */
int64_t fuzz_extent(int64_t most);

/* 0 half of the time, else a pitch with or without a gap. */
int64_t fuzz_pitch(int64_t row);

/* Tensors: drawn (of one of several distributions), poisoned with 0xFF, indices in [0, bound), given numbers,
 * and scratch. */
fuzz_tensor *fuzz_draw(const char *name, td_dtype dtype, int64_t count);
fuzz_tensor *fuzz_room(const char *name, td_dtype dtype, int64_t count);
fuzz_tensor *fuzz_given(const char *name, td_dtype dtype, int64_t count, const double *values);
fuzz_tensor *fuzz_ids(const char *name, int64_t count, int64_t bound);
fuzz_tensor *fuzz_scratch(size_t bytes);
int64_t fuzz_id(const fuzz_tensor *ids, int64_t index);

/* The tensor's address on the device; NULL stays NULL. */
void *at(const fuzz_tensor *tensor);

/* The result of an element: a value within its allowance, or with fuzz_expect_exact exactly that value. */
void fuzz_expect(fuzz_tensor *tensor, int64_t index, td_estimate value);
void fuzz_expect_exact(fuzz_tensor *tensor, int64_t index, double value);

/* A GPU's tensor cores compute the sum, which may reduce every element by `units` of u. */
void fuzz_lean(fuzz_tensor *tensor, int64_t index, double units);

/* Makes the call from the same state on one thread and on three. Both must give the same bits. */
#define FUZZ_CALL(call) FUZZ_CALL_ON(1, call)

/* The first call is on `first` threads. */
#define FUZZ_CALL_ON(first, call)                                                                            \
    do {                                                                                                     \
        for (int fuzz_round = 0; fuzz_round < 2; fuzz_round++) {                                             \
            td_assert_ok(td_cpu_set_threads(fuzz_round == 0 ? (first) : 3));                                 \
            fuzz_upload();                                                                                   \
            td_assert_ok(call);                                                                              \
            fuzz_download(fuzz_round, true);                                                                 \
        }                                                                                                    \
    } while (0)

/* The same for a call whose sums may have another order each time. */
#define FUZZ_CALL_ONCE(call)                                                                                 \
    do {                                                                                                     \
        fuzz_upload();                                                                                       \
        td_assert_ok(call);                                                                                  \
        fuzz_download(0, false);                                                                             \
    } while (0)
void fuzz_upload(void);
void fuzz_download(int round, bool compare);

/* A drawn element as an estimate without error; scratch of `bytes`; the name, if it is set. */
td_estimate given(const fuzz_tensor *t, int64_t index);
fuzz_tensor *work_of(td_status status, const size_t *bytes);
const char *flag(bool set, const char *name);

/* Expects the values, or a + b, rounded. */
void expect_rounded(fuzz_tensor *rounded, const double *values);
void expect_added(fuzz_tensor *sum, const fuzz_tensor *a, const fuzz_tensor *b);

/* The result becomes an input of the case's next call, and is not judged again. */
void fuzz_accept(fuzz_tensor *tensor);

/* Whether `after` is as expected. If not, `text` names the place. */
bool fuzz_judge(const fuzz_tensor *tensor, char *text, size_t room);

/* Judges every tensor of the case and frees them. */
void fuzz_finish(void);

/* The largest share of 4 u Gamma in a result since the last call of this function, without the rounding of
 * its store. */
double fuzz_worst(void);

/* The extents that a case of a kind gets instead of drawn ones. */
typedef struct fuzz_shape {
    int64_t extents[6];
    const char *name;
} fuzz_shape;

/* FUZZ(kind, weight, seeds, shapes...) { ... } is a function that runs one case. Random cases are drawn by
 * the weights of their kinds. Before them each shape runs with seeds 1, 2, ..., which draw all but the
 * extents. */
typedef struct fuzz_kind {
    const char *name;
    void (*run)(void);
    int weight, seeds, shape_count;
    const fuzz_shape *shapes;
} fuzz_kind;

enum { FUZZ_MOST_KINDS = 64 };
extern fuzz_kind fuzz_kinds[FUZZ_MOST_KINDS];
extern int fuzz_kind_count;
void fuzz_add(fuzz_kind kind);

#define FUZZ(kind, weight, seeds, ...)                                                                       \
    static void run_##kind(void);                                                                            \
    __attribute__((constructor)) static void add_##kind(void)                                                \
    {                                                                                                        \
        static const fuzz_shape shapes[] = {__VA_ARGS__};                                                    \
                                                                                                             \
        fuzz_add((fuzz_kind){#kind, run_##kind, weight, seeds, sizeof shapes / sizeof *shapes, shapes});     \
    }                                                                                                        \
    static void run_##kind(void)

/* The test of the judge: plain f32 evaluations must pass, wrong ones must fail. */
void fuzz_judge_accepts_f32_and_refuses_mistakes(void **state);

#endif
