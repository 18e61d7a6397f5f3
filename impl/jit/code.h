/** Internal to jit/: gets compiled code of a device: from memory, from the cache folder, or from the
 * compiler. */
#ifndef TD_JIT_CODE_H
#define TD_JIT_CODE_H

#include "jit/jit.h"
#include "jit/store.h"

/** The compiler and the loader of a kind of device. */
typedef struct td_toolchain {
    /* Finds the compiler; called once for each device. *state belongs to the compiler until close. *identity
     * is a text that differs for every other compiler, processor or GPU; it is valid until close. description
     * is a text for people. */
    td_status (*open)(td_device *dev, const td_jit_options *options, void **state, const char **identity,
                      char description[160]);
    void (*close)(void *state);
    /* Returns the source of a pass: the constants of the shape and the template. The caller frees it with
     * free(); NULL: no memory. */
    char *(*write)(const td_attention_shape *shape, bool backward);
    td_status (*compile)(void *state, const char *source, td_code *out);
    td_status (*load)(td_device *dev, const td_code *code, bool backward, void **loaded);
    void (*unload)(td_device *dev, void *loaded);
} td_toolchain;

/** *loaded = the code of a pass for a resolved shape, valid until the device is closed. Shapes that differ
 * only in batch or heads share their code. Errors of the td_toolchain; TD_NO_MEMORY. */
td_status td_code_of(td_device *dev, const td_toolchain *toolchain, const td_attention_shape *shape,
                     bool backward, void **loaded);

#endif
