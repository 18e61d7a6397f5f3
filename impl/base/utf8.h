/** Internal to impl/: whether text is UTF-8, and text in JSON. */
#ifndef TD_BASE_UTF8_H
#define TD_BASE_UTF8_H

#include "base/status.h"

/** The length in bytes of the first character of `text`; 0 if it is not UTF-8 (RFC 3629: only the shortest
 * form, no surrogate, nothing above U+10FFFF). The terminating 0 counts as a character of one byte. */
size_t td_utf8_bytes(const char *text);

/** TD_BAD_ARGUMENT: text is not UTF-8; the message calls it `name`. */
td_status td_utf8_check(const char *name, const char *text);

/** part = the first character of `text` as a part of a JSON string; '?' for a byte that is not UTF-8. Returns
 * the text after it. */
enum { TD_JSON_PART = 8 };
const char *td_json_part(const char *text, char part[TD_JSON_PART]);

#endif
