#include "support/file_kit.h"

#include "support/compare.h"
#include "support/fault.h"
#include "support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

bool file_calls_fail;
int file_interruptions, file_small_steps;
char file_calls[2048];
void (*file_at_rename)(void);

/* ---- calls that fail ---- */

static bool fails(const char *name)
{
    const size_t used = strlen(file_calls);

    if (!file_calls_fail)
        return false;
    snprintf(file_calls + used, sizeof file_calls - used, " %s", name);
    return td_fault(name);
}

#define ALLOCATION(name, parameters, arguments)                                                              \
    void *__real_##name parameters;                                                                          \
    void *__wrap_##name parameters;                                                                          \
    void *__wrap_##name parameters                                                                           \
    {                                                                                                        \
        return fails(#name) ? NULL : __real_##name arguments;                                                \
    }

ALLOCATION(malloc, (size_t bytes), (bytes))
ALLOCATION(calloc, (size_t count, size_t bytes), (count, bytes))
ALLOCATION(realloc, (void *block, size_t bytes), (block, bytes))

char *__real_strdup(const char *text);
int __real_open(const char *path, int flags, mode_t mode);
ssize_t __real_write(int file, const void *data, size_t bytes);
ssize_t __real_pread(int file, void *data, size_t bytes, off_t at);
int __real_fstat(int file, struct stat *info);
int __real_fsync(int file);
int __real_close(int file);
int __real_openat(int folder, const char *path, int flags, mode_t mode);
int __real_renameat(int from_folder, const char *from, int to_folder, const char *to);

char *__wrap_strdup(const char *text)
{
    return fails("strdup") ? NULL : __real_strdup(text);
}

static int refuse(int error)
{
    errno = error;
    return -1;
}

static bool interrupted(void)
{
    return file_interruptions > 0 && file_interruptions-- > 0;
}

static size_t small(size_t bytes)
{
    return bytes > 1 && file_small_steps > 0 && file_small_steps-- > 0 ? 1 : bytes;
}

int __wrap_open(const char *path, int flags, mode_t mode)
{
    return fails("open") ? refuse(EACCES) : __real_open(path, flags, mode);
}

ssize_t __wrap_write(int file, const void *data, size_t bytes)
{
    if (interrupted())
        return refuse(EINTR);
    return fails("write") ? refuse(ENOSPC) : __real_write(file, data, small(bytes));
}

ssize_t __wrap_pread(int file, void *data, size_t bytes, off_t at)
{
    if (interrupted())
        return refuse(EINTR);
    return fails("pread") ? refuse(EIO) : __real_pread(file, data, small(bytes), at);
}

int __wrap_fstat(int file, struct stat *info)
{
    return fails("fstat") ? refuse(EIO) : __real_fstat(file, info);
}

int __wrap_fsync(int file)
{
    return fails("fsync") ? refuse(EIO) : __real_fsync(file);
}

int __wrap_close(int file)
{
    const int result = __real_close(file);

    return fails("close") ? refuse(EDQUOT) : result;
}

int __wrap_openat(int from, const char *path, int flags, mode_t mode)
{
    return fails("openat") ? refuse(EACCES) : __real_openat(from, path, flags, mode);
}

int __wrap_renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    if (file_at_rename)
        file_at_rename();
    return fails("renameat") ? refuse(EACCES) : __real_renameat(from_folder, from, to_folder, to);
}

/* Whether the injected fault is one of these calls; the list ends with NULL. */
static bool fault_is(const char *const *names)
{
    while (td_fault_name() && *names && strcmp(td_fault_name(), *names) != 0)
        names++;
    return td_fault_name() && *names;
}

bool file_fault_is_memory(void)
{
    return fault_is((const char *const[]){"malloc", "calloc", "realloc", "strdup", NULL});
}

/* The folder's fsync, the close of an abandoned or read-only file, and the search for files of dead
 * writers. */
bool file_fault_is_harmless(void)
{
    return fault_is((const char *const[]){"openat", "fstat", "fsync", "close", NULL});
}

/* ---- the folder ---- */

static char folder[] = "tandem-files-XXXXXX"; /* in the current folder */
char file_path[64];

int file_folder_make(void **unused)
{
    (void)unused;
    file_calls_fail = false;
    file_interruptions = file_small_steps = 0;
    file_calls[0] = '\0';
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(file_path, sizeof file_path, "%s/w.safetensors", folder);
    return 0;
}

int file_folder_remove(void **unused)
{
    (void)unused;
    file_calls_fail = false;
    unlink(file_path);
    return rmdir(folder);
}

int file_count(void)
{
    DIR *all = opendir(folder);
    int count = 0;

    assert_non_null(all);
    for (const struct dirent *entry; (entry = readdir(all));)
        count += entry->d_name[0] != '.';
    closedir(all);
    return count;
}

void file_write_tensors(const char *path, const char *header, size_t data)
{
    const size_t length = strlen(header);
    char *bytes = malloc(8 + length + data + 1);

    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (char)((uint64_t)length >> 8 * i);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data; i++)
        bytes[8 + length + i] = (char)i;
    file_write(path, bytes, 8 + length + data);
    free(bytes);
}

int64_t file_check_faults(td_status (*write)(const char *path), td_status (*read)(void))
{
    int64_t nth, harmless = 0;

    for (nth = 1;; nth++) {
        file_write(file_path, "old", 3);
        file_calls_fail = true;
        td_fault_at(nth);
        const td_status status = write(file_path);
        file_calls_fail = false;
        assert_int_equal(file_count(), 1);
        if (!td_fault_name()) {
            td_assert_ok(status);
            break;
        }
        if (status == TD_OK) {
            assert_true(file_fault_is_harmless());
            if (read)
                td_assert_ok(read());
            harmless++;
            continue;
        }
        assert_int_equal(status, file_fault_is_memory() ? TD_NO_MEMORY : TD_IO_ERROR);
        assert_true(file_is(file_path, "old", 3));
    }
    assert_true(nth > 7);
    return harmless;
}

void file_check_kinds(int count, const file_kind *kinds)
{
    for (const file_kind *kind = kinds; kind < kinds + count; kind++) {
        const size_t begin = strlen(kind->begin), end = strlen(kind->end);
        size_t bytes;

        (void)file_check_faults(kind->write, NULL);
        char *once = file_read(file_path, &bytes);
        assert_true((int64_t)bytes > kind->least);
        assert_memory_equal(once, kind->begin, begin);
        assert_memory_equal(once + bytes - end, kind->end, end);
        file_interruptions = file_small_steps = 20;
        td_assert_ok(kind->write(file_path));
        assert_true(file_is(file_path, once, bytes));
        free(once);
        td_assert_refused(kind->write("nowhere/at/all"), TD_IO_ERROR, "nowhere/at/all");
        td_assert_refused(kind->write("/dev/null"), TD_IO_ERROR, "not a regular file");
    }
}
