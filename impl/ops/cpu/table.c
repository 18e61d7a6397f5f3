#include "ops/table.h"

#include "ops/cpu/cpu.h"

const td_ops td_ops_cpu = {.device = "cpu",
                           .dtypes = TD_CPU_DTYPES,
#define ENTRY(op, class, cpu, ...)     .op = cpu,
#define WORK(op, cpu, cuda, arguments) .op = cpu,
                           TD_EACH_OP(ENTRY, ENTRY) TD_EACH_WORK(WORK)};
