/** Internal to jit/: compiled code of a device, found in memory, in the folder, or made. */
#ifndef TD_JIT_CODE_H
#define TD_JIT_CODE_H

#include "jit/jit.h"
#include "jit/store.h"

/** What makes code for a kind of device: a compiler, and a loader of what it makes. */
typedef struct td_maker {
    /* Finds the compiler, once a device: *state is its own from then on, *identity is a text, valid until
     * close, that tells it and the processor or GPU from all others, and description says for people what it
     * is. */
    td_status (*open)(td_device *dev, const td_jit_options *options, void **state, const char **identity,
                      char description[160]);
    void (*close)(void *state);
    td_status (*compile)(void *state, const char *source, td_code *out);
    td_status (*load)(td_device *dev, const td_code *code, bool backward, void **loaded);
    void (*unload)(td_device *dev, void *loaded);
} td_maker;

/** What the code of a pass is made from, in memory of malloc: the constants of the shape and the template. */
typedef char *(*td_write_source)(const td_attention_shape *shape, bool backward);

/** *loaded = the code of a pass of a resolved shape, batch and heads aside; it is valid until the device is
 * closed. */
td_status td_code_of(td_device *dev, const td_maker *maker, const td_attention_shape *shape, bool backward,
                     td_write_source write, void **loaded);

#endif
