/** Internal to jit/: SHA-256 (FIPS 180-4), by which code is found and checked. */
#ifndef TD_JIT_SHA256_H
#define TD_JIT_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { TD_SHA256_TEXT = 65 }; /* 64 hexadecimal digits and the end */

typedef struct td_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
} td_sha256;

void td_sha256_begin(td_sha256 *hash);
void td_sha256_add(td_sha256 *hash, const void *data, size_t bytes);
void td_sha256_end(td_sha256 *hash, char out[TD_SHA256_TEXT]);

#endif
