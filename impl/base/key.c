#include "base/key.h"

#include "base/check.h"

#include <stdio.h>
#include <sys/random.h>

static uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

static void mix(uint64_t v[4], int rounds)
{
    for (int i = 0; i < rounds; i++) {
        v[0] += v[1];
        v[1] = rotate(v[1], 13) ^ v[0];
        v[0] = rotate(v[0], 32);
        v[2] += v[3];
        v[3] = rotate(v[3], 16) ^ v[2];
        v[0] += v[3];
        v[3] = rotate(v[3], 21) ^ v[0];
        v[2] += v[1];
        v[1] = rotate(v[1], 17) ^ v[2];
        v[2] = rotate(v[2], 32);
    }
}

static void absorb(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    mix(v, 2);
    v[0] ^= word;
}

td_key td_key_hash(td_key key, const void *data, size_t bytes)
{
    uint64_t v[4] = {UINT64_C(0x736f6d6570736575) ^ key.word[0],
                     UINT64_C(0x646f72616e646f6d) ^ key.word[1] ^ 0xee,
                     UINT64_C(0x6c7967656e657261) ^ key.word[0], UINT64_C(0x7465646279746573) ^ key.word[1]};
    const unsigned char *at = data;
    uint64_t word = 0;
    td_key out;

    for (size_t i = 0; i < bytes; i++) {
        word |= (uint64_t)at[i] << 8 * (i % 8);
        if (i % 8 != 7)
            continue;
        absorb(v, word);
        word = 0;
    }
    absorb(v, word | (uint64_t)bytes << 56);
    for (int i = 0; i < 2; i++) {
        v[i == 0 ? 2 : 1] ^= i == 0 ? 0xee : 0xdd;
        mix(v, 4);
        out.word[i] = v[0] ^ v[1] ^ v[2] ^ v[3];
    }
    return out;
}

bool td_key_same(td_key a, td_key b)
{
    return ((a.word[0] ^ b.word[0]) | (a.word[1] ^ b.word[1])) == 0;
}

bool td_key_parse(const char *text, td_key *out)
{
    td_key key = {{0}};

    for (int i = 0; i < TD_KEY_DIGITS; i++) {
        const char digit = text[i];
        const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                          : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                          : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                         : -1;

        if (value < 0)
            return false;
        key.word[i / 16] = key.word[i / 16] << 4 | (uint64_t)value;
    }
    if (text[TD_KEY_DIGITS])
        return false;
    *out = key;
    return true;
}

void td_key_text(td_key key, char text[TD_KEY_DIGITS + 1])
{
    snprintf(text, TD_KEY_DIGITS + 1, "%016" PRIx64 "%016" PRIx64, key.word[0], key.word[1]);
}

td_status td_key_draw(td_key *out)
{
    if (getrandom(out, sizeof *out, 0) != (ssize_t)sizeof *out)
        return td_fail(TD_IO_ERROR, "the system has no random numbers");
    return TD_OK;
}
