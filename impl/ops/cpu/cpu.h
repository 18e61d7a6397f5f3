/** Internal to ops/cpu/: the entries of td_ops_cpu. ops.h has their formulas. ops.c has checked the arguments
 * and filled in defaults. */
#ifndef TD_OPS_CPU_CPU_H
#define TD_OPS_CPU_CPU_H

#include "ops/list.h"
#include "ops/ops.h"

/** TD_BAD_ARGUMENT naming the first of ids[0 .. count) that is outside [0, bound). */
td_status td_cpu_check_ids(const char *name, const int64_t *ids, int64_t count, int64_t bound);

#define ENTRY(op, class, cpu, ...)     __typeof__(td_##op) cpu;
#define WORK(op, cpu, cuda, arguments) size_t cpu arguments;
TD_EACH_OP(ENTRY, ENTRY)
TD_EACH_WORK(WORK)
#undef ENTRY
#undef WORK

#endif
