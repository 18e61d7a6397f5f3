/** What the groups of test_ops and test_ops_gpu share: a device, the memory of a case, and the rule that
 * every call is repeated.
 *
 * A test is written once for every device. It keeps its tensors in host memory, where it makes and judges
 * them, and gives the operation on(tensor). On the CPU that is the tensor itself, elsewhere its mirror in the
 * device's memory: before a call every tensor of the case is uploaded, after it everything is read back. */
#ifndef TD_TESTS_OPS_KIT_H
#define TD_TESTS_OPS_KIT_H

#include "device/device.h"
#include "ops/ops.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <math.h>

/* The groups, one a file; each returns how many of its tests failed. */
int ops_exp_group(void);
int ops_gemm_group(void);
int ops_layout_group(void);
int ops_gate_group(void);
int ops_rmsnorm_group(void);
int ops_softmax_group(void);
int ops_cross_entropy_group(void);
int ops_optimizers_group(void);
int ops_refusals_group(void);

/* The device, open from the first test to the last, and the types that it has kernels for, f32 first. */
extern td_device *ops_dev;
extern int ops_dtype_count;
extern td_dtype ops_dtypes[3];

/* Opens "cpu", or a GPU: td_gpu_open says what happens where there is none. */
void ops_open(const char *name);
bool ops_on_gpu(void);

/* What a test takes is noted here and given back by ops_finish, which checks the fences. */
typedef struct ops_case {
    char name[128]; /* seeds the inputs */
    td_dtype dtype;
    uint64_t stream;
    void *plain[128];
    int plain_count;
} ops_case;

ops_case ops_begin(td_dtype dtype, const char *format, ...) __attribute__((format(printf, 2, 3)));
void ops_finish(ops_case *c);

/* `count` N(0, 1) numbers of the case's dtype, or of the one given. */
void *ops_draw(ops_case *c, int64_t count);
void *ops_draw_as(ops_case *c, td_dtype dtype, int64_t count);
int64_t *ops_draw_ids(ops_case *c, int64_t count, int64_t bound);

/* Poisoned room for `count` elements, or for the bytes of a work area. */
void *ops_room(ops_case *c, td_dtype dtype, int64_t count);
void *ops_bytes(ops_case *c, size_t bytes);

/* What an update reads beside its tensors: of the case like those, and given as on(...). */
td_adamw *ops_adamw(ops_case *c, td_adamw adamw);
td_sgd *ops_sgd(ops_case *c, double lr);
td_update_state *ops_state(ops_case *c, int64_t step, float gain);

/* A fenced copy of `count` elements; and of numbers that are rounded to dtype. */
void *ops_copy(ops_case *c, td_dtype dtype, const void *data, int64_t count);
void *ops_given(ops_case *c, td_dtype dtype, int64_t count, const float *values);

double *ops_f64(ops_case *c, td_dtype dtype, const void *data, int64_t count);
double *ops_zeros(ops_case *c, int64_t count); /* float64, for a truth */

/* Where the device finds a tensor of the case, or an element inside one. NULL stays NULL. */
void *on(const void *tensor);

/* f32: rel_l2 within `units` of 2^-23. bf16 and f16: within the rounding of the store. */
void ops_assert_close(const ops_case *c, const char *tensor, td_dtype dtype, const void *got,
                      const double *truth, int64_t count, double units);

/* Runs a call whose tensors are given as on(tensor). */
#define OPS_CALL(call)                                                                                       \
    do {                                                                                                     \
        ops_upload();                                                                                        \
        td_assert_ok(call);                                                                                  \
        ops_download();                                                                                      \
    } while (0)
void ops_upload(void);
void ops_download(void);

/* Runs `call` on one thread and twice on three, each time on `before` (NULL: poison), and fails unless `out`
 * has the same bits every time. */
#define OPS_RUN(c, dtype, out, count, before, call)                                                          \
    do {                                                                                                     \
        size_t ops_size = (size_t)(count)*td_dtype_size(dtype);                                              \
        const void *ops_before = (before);                                                                   \
        void *ops_first = NULL;                                                                              \
        for (int ops_round = 0; ops_round < 3; ops_round++) {                                                \
            td_assert_ok(td_cpu_set_threads(ops_round == 0 ? 1 : 3));                                        \
            td_fence_poison(out);                                                                            \
            if (ops_before)                                                                                  \
                memcpy(out, ops_before, ops_size);                                                           \
            OPS_CALL(call);                                                                                  \
            if (ops_round == 0)                                                                              \
                ops_first = ops_copy(c, dtype, out, count);                                                  \
            else                                                                                             \
                td_assert_identical((c)->name, dtype, ops_first, out, count);                                \
        }                                                                                                    \
    } while (0)

/* One AdamW step in float64 with gradients of state's gain times g, each variant as it was published. */
void ops_adamw_truth(const td_adamw *a, const td_update_state *state, int64_t count, double *p,
                     const double *g, double *m, double *v);

/* sum a[i] b[i] */
double ops_dot(const double *a, const double *b, int64_t count);

/* Runs a group whose tests are the cases [0, count), each `size` bytes and starting with its name. Where one
 * fails, what was running is named as ops_begin calls it. */
int ops_run_cases(const char *group, const void *cases, size_t count, size_t size, CMUnitTestFunction test);

#endif
