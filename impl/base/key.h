/** Internal to impl/: secret keys of 128 bits, and a keyed hash of 128 bits (SipHash-2-4, Aumasson and
 * Bernstein 2012). Without the key nobody can compute or guess the hash of any data. With the key 0 it is a
 * plain hash, used for names. */
#ifndef TD_BASE_KEY_H
#define TD_BASE_KEY_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TD_KEY_DIGITS = 32 };

typedef struct td_key {
    uint64_t word[2];
} td_key;

td_key td_key_hash(td_key key, const void *data, size_t bytes);

/** Compares in constant time: the time does not tell where the keys differ. */
bool td_key_same(td_key a, td_key b);

/** Reads a key from 32 hexadecimal digits. False: the text is something else; *out is then unchanged. */
bool td_key_parse(const char *text, td_key *out);

void td_key_text(td_key key, char text[TD_KEY_DIGITS + 1]);

/** *out = a random key from the operating system. TD_IO_ERROR: the system gives no random numbers. */
td_status td_key_draw(td_key *out);

#endif
