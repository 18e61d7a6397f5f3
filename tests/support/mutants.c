#include "support/mutants.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

td_status td_mutant(td_status status, const char *file, int line)
{
    const char *off = getenv("TANDEM_MUTANT"), *seen = getenv("TANDEM_MUTANTS_SEEN");
    const char *const path = strstr(file, "impl/") ? strstr(file, "impl/") : file;
    char here[256];
    const int length = snprintf(here, sizeof here, "%s:%d\n", path, line);

    if (off)
        return strncmp(off, here, (size_t)length - 1) == 0 && strlen(off) == (size_t)length - 1 ? TD_OK
                                                                                                : status;
    const int to = seen ? open(seen, O_WRONLY | O_APPEND) : -1;
    if (to >= 0 && write(to, here, (size_t)length) == length)
        close(to);
    return status;
}
