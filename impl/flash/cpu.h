/** Internal to flash/: the passes on the CPU. Arguments were checked and the shape resolved by flash.c. */
#ifndef TD_FLASH_CPU_H
#define TD_FLASH_CPU_H

#include "attention/attention.h"

/** Bytes of scratch, for as many threads as the machine has processors. No call uses more threads, so a
 * size also holds after td_cpu_set_threads. TD_BAD_ARGUMENT: beyond 2^63 - 1. */
td_status td_flash_cpu_forward_bytes(const td_attention_shape *shape, size_t *out);
td_status td_flash_cpu_backward_bytes(const td_attention_shape *shape, size_t *out);

void td_flash_cpu_forward(const td_attention_shape *shape, const void *q, const void *k, const void *v,
                          void *o, float *lse, void *work);
td_status td_flash_cpu_backward(const td_attention_shape *shape, const void *q, const void *k, const void *v,
                                const void *o, const void *dout, const float *lse, void *dq, void *dk,
                                void *dv, void *work);

/** The most threads that `tasks` can occupy on this machine. */
int64_t td_flash_cpu_slots(int64_t tasks);

#endif
