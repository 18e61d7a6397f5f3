/** Shared by the groups of test_ops and test_ops_gpu: a device, the memory of a case, and the rule that every
 * call is repeated.
 *
 * A test is written once for every device. Its tensors are in host memory, where the test fills and judges
 * them. It passes on(tensor) to the operation. On the CPU that is the tensor itself, on a GPU its mirror in
 * device memory. Before a call every tensor of the case is uploaded, after the call every tensor is
 * downloaded. */
#ifndef TD_TESTS_OPS_KIT_H
#define TD_TESTS_OPS_KIT_H

#include "device/device.h"
#include "ops/ops.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <math.h>

/* The groups, one in each file. Each returns the number of failed tests. */
int ops_exp_group(void);
int ops_gemm_group(void);
int ops_layout_group(void);
int ops_gate_group(void);
int ops_rmsnorm_group(void);
int ops_softmax_group(void);
int ops_cross_entropy_group(void);
int ops_optimizers_group(void);

/* The device, open from the first test to the last, and the types for which it has kernels, f32 first. */
extern td_device *ops_dev;
extern int ops_dtype_count;
extern td_dtype ops_dtypes[3];

/* Opens "cpu" or a GPU; see td_gpu_open for a machine without a GPU. */
void ops_open(const char *name);
bool ops_on_gpu(void);

/* ops_finish frees all memory of a case and checks the fences. */
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

/* Poisoned memory for `count` elements, or for the bytes of a work area. */
void *ops_room(ops_case *c, td_dtype dtype, int64_t count);
void *ops_bytes(ops_case *c, size_t bytes);

/* Inputs of an update other than tensors. They belong to the case, and are passed as on(...). */
td_adamw *ops_adamw(ops_case *c, td_adamw adamw);
td_sgd *ops_sgd(ops_case *c, double lr);
td_update_state *ops_state(ops_case *c, int64_t step, float gain);

/* A fenced copy of `count` elements; and a copy of numbers, rounded to dtype. */
void *ops_copy(ops_case *c, td_dtype dtype, const void *data, int64_t count);
void *ops_given(ops_case *c, td_dtype dtype, int64_t count, const float *values);

double *ops_f64(ops_case *c, td_dtype dtype, const void *data, int64_t count);
double *ops_zeros(ops_case *c, int64_t count); /* float64, for a truth */

/* The device's address of a tensor of the case, or of an element in one. NULL stays NULL. */
void *on(const void *tensor);

/* f32: rel_l2 within `units` of 2^-23. bf16 and f16: within the rounding of the store. */
void ops_assert_close(const ops_case *c, const char *tensor, td_dtype dtype, const void *got,
                      const double *truth, int64_t count, double units);

/* Runs a call whose tensors are passed as on(tensor). */
#define OPS_CALL(call)                                                                                       \
    do {                                                                                                     \
        ops_upload();                                                                                        \
        td_assert_ok(call);                                                                                  \
        ops_download();                                                                                      \
    } while (0)
void ops_upload(void);
void ops_download(void);

/* Runs `call` once on one thread and twice on three, each time from `before` (NULL: poison). Fails unless
 * `out` always has the same bits. */
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

/* One AdamW step in float64, with g times the state's gain as gradients, for each variant as published. */
void ops_adamw_truth(const td_adamw *a, const td_update_state *state, int64_t count, double *p,
                     const double *g, double *m, double *v);

/* sum a[i] b[i] */
double ops_dot(const double *a, const double *b, int64_t count);

/* Runs a group whose tests are the cases [0, count). Each case has `size` bytes and starts with its name. A
 * failure prints the name that ops_begin got. */
int ops_run_cases(const char *group, const void *cases, size_t count, size_t size, CMUnitTestFunction test);

#endif
