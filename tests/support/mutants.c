#include "mutants.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_mutant(td_status status, const char *file, int line)
{
    const char *off = secure_getenv("TANDEM_MUTANT"), *seen = secure_getenv("TANDEM_MUTANTS_SEEN");
    const char *const path = strstr(file, "impl/") ? strstr(file, "impl/") : file;
    char here[256];
    const int length = snprintf(here, sizeof here, "%s:%d\n", path, line);

    if (off)
        return strncmp(off, here, (size_t)length - 1) == 0 && strlen(off) == (size_t)length - 1 ? TD_OK
                                                                                                : status;
    FILE *const to = seen ? fopen(seen, "a") : NULL; /* tests have doubles of getenv, open, write */
    if (to) {
        fputs(here, to);
        fclose(to);
    }
    return status;
}
