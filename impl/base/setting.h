/** Internal to impl/: values that ranks compare by name. */
#ifndef TD_BASE_SETTING_H
#define TD_BASE_SETTING_H

#include <stddef.h>
#include <stdint.h>

/** A choice, size or hyperparameter; enums are their numbers. */
typedef struct td_setting {
    const char *name; /* the caller's, for as long as the setting */
    double value;
} td_setting;

#define TD_HASH_BEGIN UINT64_C(14695981039346656037)

/** FNV-1a of `bytes` bytes, behind what `hash` is of. Never 0 in practice: 0 stands for no hash. */
uint64_t td_hash(uint64_t hash, const void *data, size_t bytes);

#endif
