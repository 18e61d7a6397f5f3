/** Internal to impl/: text that programs read (pictures, traces, files). Numbers have a '.' as
 * decimal point in every locale of the process. */
#ifndef TD_BASE_FORMAT_H
#define TD_BASE_FORMAT_H

#include <stdarg.h>
#include <stddef.h>

/** vsnprintf in the C locale. */
int td_vformat(char *text, size_t room, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/** snprintf in the C locale. */
int td_format(char *text, size_t room, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
