/** Internal to jit/: the functions of a kind of device. jit.c has checked the arguments and resolved the
 * shape. */
#ifndef TD_JIT_PASSES_H
#define TD_JIT_PASSES_H

#include "jit/code.h"

typedef struct td_jit_passes {
    td_attention_traits traits;
    const char *device, *dtypes; /* for messages */
    td_status (*sizes)(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out);
    const td_toolchain *toolchain;

    /* `code` is the pass's code by td_code_of. */
    td_status (*forward)(td_device *dev, const td_attention_shape *shape, void *code, const void *q,
                         const void *k, const void *v, void *o, void *saved, void *work);
    td_status (*backward)(td_device *dev, const td_attention_shape *shape, void *code, const void *q,
                          const void *k, const void *v, const void *o, const void *dout, const void *saved,
                          void *dq, void *dk, void *dv, void *work);
} td_jit_passes;

extern const td_jit_passes td_jit_cpu;
extern const td_jit_passes td_jit_cuda; /* only if TANDEM_HAVE_CUDA is defined */

#endif
