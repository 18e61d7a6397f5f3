/** Internal to impl/: whether text is UTF-8. */
#ifndef TD_BASE_UTF8_H
#define TD_BASE_UTF8_H

#include "base/status.h"

/** The length in bytes of the first character of `text`; 0 if it is not UTF-8 (RFC 3629: only the shortest
 * form, no surrogate, nothing above U+10FFFF). The terminating 0 counts as a character of one byte. */
size_t td_utf8_bytes(const char *text);

/** TD_BAD_ARGUMENT: text is not UTF-8; the message calls it `name`. */
td_status td_utf8_check(const char *name, const char *text);

#endif
