/** Internal to impl/: named values that must be equal on all ranks. */
#ifndef TD_BASE_SETTING_H
#define TD_BASE_SETTING_H

#include <stddef.h>
#include <stdint.h>

/** A choice, size or hyperparameter; an enum is stored as its number. */
typedef struct td_setting {
    const char *name; /* borrowed: must outlive the setting */
    double value;
} td_setting;

#define TD_HASH_BEGIN UINT64_C(14695981039346656037)

/** FNV-1a: continues `hash` (TD_HASH_BEGIN at first) with `bytes` bytes. The value 0 means "no hash"; a
 * result of 0 is improbable (2^-64). */
uint64_t td_hash(uint64_t hash, const void *data, size_t bytes);

#endif
