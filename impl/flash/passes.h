/** Internal to flash/: the passes of a device. flash.c has checked the arguments and resolved the shape. */
#ifndef TD_FLASH_PASSES_H
#define TD_FLASH_PASSES_H

#include "attention/attention.h"

typedef struct td_flash_passes {
    const char *device, *dtypes; /* for messages */
    unsigned has_dtype;          /* bits 1 << dtype */
    bool has_tf32;
    td_status (*sizes)(td_device *dev, const td_attention_shape *shape, bool backward,
                       td_attention_sizes *out); /* fills the fields of that pass */
    td_status (*forward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                         const void *v, void *o, float *lse, void *work);
    td_status (*backward)(td_device *dev, const td_attention_shape *shape, const void *q, const void *k,
                          const void *v, const void *o, const void *dout, const float *lse, void *dq,
                          void *dk, void *dv, void *work);
} td_flash_passes;

extern const td_flash_passes td_flash_cuda; /* where TANDEM_HAVE_CUDA is defined */

#endif
