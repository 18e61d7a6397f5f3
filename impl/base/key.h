/** Internal to impl/: secrets of 128 bits, and a hash under one (SipHash-2-4 of 128 bits, Aumasson and
 * Bernstein 2012). Who lacks the key can neither make nor guess the hash of anything. Under the key 0 it is a
 * plain hash, for names. */
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

/** In the same time wherever they differ. */
bool td_key_same(td_key a, td_key b);

/** False: the text is not 32 hexadecimal digits; *out is untouched. */
bool td_key_parse(const char *text, td_key *out);

void td_key_text(td_key key, char text[TD_KEY_DIGITS + 1]);

/** A random one of the system's. TD_IO_ERROR: it has none. */
td_status td_key_draw(td_key *out);

#endif
