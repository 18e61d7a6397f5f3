#include "base/utf8.h"

#include "base/check.h"

#include <stdio.h>

size_t td_utf8_bytes(const char *text)
{
    const unsigned char *byte = (const unsigned char *)text;
    size_t bytes = byte[0] < 0x80   ? 1
                   : byte[0] < 0xC2 ? 0
                   : byte[0] < 0xE0 ? 2
                   : byte[0] < 0xF0 ? 3
                   : byte[0] < 0xF5 ? 4
                                    : 0;
    unsigned char least = byte[0] == 0xE0 ? 0xA0 : byte[0] == 0xF0 ? 0x90 : 0x80;
    unsigned char most = byte[0] == 0xED ? 0x9F : byte[0] == 0xF4 ? 0x8F : 0xBF;

    for (size_t i = 1; i < bytes; i++) {
        if (byte[i] < least || byte[i] > most)
            return 0;
        least = 0x80;
        most = 0xBF;
    }
    return bytes;
}

td_status td_utf8_check(const char *name, const char *text)
{
    td_status status = TD_OK;

    for (size_t i = 0; text[i] != '\0';) {
        size_t bytes = td_utf8_bytes(text + i);

        TD_CHECK(bytes > 0, "%s is not UTF-8: byte %zu is 0x%02x", name, i, (unsigned)(unsigned char)text[i]);
        i += bytes;
    }
cleanup:
    return status;
}

const char *td_json_part(const char *text, char part[TD_JSON_PART])
{
    const size_t bytes = td_utf8_bytes(text);

    if (*text == '"' || *text == '\\' || (unsigned char)*text < 0x20)
        snprintf(part, TD_JSON_PART, "\\u%04x", (unsigned)(unsigned char)*text);
    else
        snprintf(part, TD_JSON_PART, "%.*s", bytes > 0 ? (int)bytes : 1, bytes > 0 ? text : "?");
    return text + (bytes > 0 ? bytes : 1);
}
