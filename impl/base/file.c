#include "base/file.h"

#include "base/check.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

td_status td_file_error(const char *verb, const char *path, int error)
{
    char buffer[128];

    return td_fail(TD_IO_ERROR, "cannot %s '%s': %s", verb, path, strerror_r(error, buffer, sizeof buffer));
}

int td_file_write(int file, const char *data, size_t bytes)
{
    while (bytes > 0) {
        const ssize_t written = write(file, data, bytes);

        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return errno;
        data += written;
        bytes -= (size_t)written;
    }
    return 0;
}
