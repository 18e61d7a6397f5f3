/** Internal to impl/: the table of operations that a device fills.
 *
 * The public functions of ops.h check the arguments once and call the entry of their device with every
 * default (leading dimensions, pitches) filled in. ops/cpu/ has every entry, in plain C that reads like the
 * formula. Another device's table may have NULL entries: they give TD_UNSUPPORTED, naming op and device. */
#ifndef TD_OPS_TABLE_H
#define TD_OPS_TABLE_H

#include "ops/list.h"
#include "ops/ops.h"

/** Sets of types, as bits 1 << dtype. */
enum { TD_CPU_DTYPES = 1 << TD_F32 | 1 << TD_BF16, TD_CUDA_DTYPES = TD_CPU_DTYPES | 1 << TD_F16 };

typedef struct td_ops {
    const char *device;
    unsigned dtypes; /* the types that it has kernels for */
#define ENTRY(op, ...)                 __typeof__(td_##op) *op;
#define WORK(op, cpu, cuda, arguments) size_t(*op) arguments;
    TD_EACH_OP(ENTRY, ENTRY)
    TD_EACH_WORK(WORK)
#undef ENTRY
#undef WORK
    bool (*update_has_sms)(td_device *); /* NULL: never */
} td_ops;

extern const td_ops td_ops_cpu;
extern const td_ops td_ops_cuda; /* if TANDEM_HAVE_CUDA is defined */

#endif
