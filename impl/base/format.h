/** Internal to impl/: text for machines. Its numbers have a '.', whatever the process's locale is: sources of
 * the JIT, pictures, records, traces and what caches are keyed by. */
#ifndef TD_BASE_FORMAT_H
#define TD_BASE_FORMAT_H

#include <stdarg.h>
#include <stddef.h>

/** As vsnprintf. */
int td_vformat(char *text, size_t room, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/** The text, for free(); NULL: no memory. */
char *td_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
