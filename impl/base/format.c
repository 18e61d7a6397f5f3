#include "base/format.h"

#include <locale.h>
#include <stdio.h>

int td_vformat(char *text, size_t room, const char *format, va_list args)
{
    /* In glibc the C locale needs no memory, so newlocale cannot fail. This thread uses it until the text is
     * complete. */
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0), before = uselocale(c);
    const int length = vsnprintf(text, room, format, args);

    uselocale(before);
    freelocale(c);
    return length;
}

int td_format(char *text, size_t room, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    const int length = td_vformat(text, room, format, args);
    va_end(args);
    return length;
}
