#include "support/compare.h"
#include "support/file_kit.h"
#include "support/test.h"

#include <sys/stat.h>

char *file_read(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    struct stat info;

    assert_non_null(file);
    assert_int_equal(stat(path, &info), 0);
    char *data = malloc((size_t)info.st_size + 1);
    assert_non_null(data);
    *bytes = fread(data, 1, (size_t)info.st_size, file);
    assert_int_equal(*bytes, info.st_size);
    data[*bytes] = '\0';
    fclose(file);
    return data;
}

bool file_is(const char *path, const char *bytes, size_t count)
{
    size_t has;
    char *data = file_read(path, &has);
    const bool same = has == count && memcmp(data, bytes, count) == 0;

    free(data);
    return same;
}

void file_write(const char *path, const char *bytes, size_t count)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, count, file), count);
    assert_int_equal(fclose(file), 0);
}
