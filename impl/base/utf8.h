/** Internal to impl/: whether text is UTF-8. */
#ifndef TD_BASE_UTF8_H
#define TD_BASE_UTF8_H

#include "base/base.h"

/** The bytes of the character that text begins with, 0 if it is not UTF-8 (RFC 3629: the shortest form alone,
 * no surrogate, nothing above U+10FFFF). The end of the text, its 0, counts as a character. */
size_t td_utf8_bytes(const char *text);

#endif
