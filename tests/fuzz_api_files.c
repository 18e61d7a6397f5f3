/* The functions of safetensors.h. tests/fuzz_safetensors.c tests invalid files. */
#include "support/fuzz_api_kit.h"

#include "base/safetensors.h"

#include <limits.h>

static const td_stored good[] = {{.name = "a", .dtype = "I64"},
                                 {.name = "b", .dtype = "F32", .rank = 2, .shape = {2, 3}},
                                 {.name = "c", .dtype = "U8", .rank = 1, .shape = {5}}};
enum { GOOD = sizeof good / sizeof *good, GOOD_BYTES = 8 + 24 + 5 };

static const td_stored_text good_texts[] = {{"format", "pt"}, {"key", "value"}};

static const char *path;
static td_safetensors_writer *writer;
static td_safetensors *file;

/* ---- writing ---- */

static td_status end(td_status status)
{
    td_safetensors_writer_destroy(writer);
    writer = NULL;
    return path_done(status);
}

/* Opens a writer at the path of the case. */
static void open_writer(void)
{
    path = path_own(false);
    td_assert_ok(td_safetensors_writer_create(path, GOOD, good, 2, good_texts, &writer));
    td_forget_error();
}

API(td_stored_dtype)
{
    static const td_dtype dtypes[] = {TD_F64, TD_F32, TD_F16, TD_BF16};
    static const int bad[] = {-1, 4, INT_MAX, INT_MIN};

    assert_non_null(td_stored_dtype(TD_FUZZ_PICK(dtypes)));
    assert_null(td_stored_dtype((td_dtype)BAD_NUMBER(bad)));
    return TD_OK;
}

/* Makes the description of a tensor invalid. */
static td_stored spoil(td_stored t)
{
    static const char *const names[] = {NULL, "", "\xff", "a\xed\xa0\x80", "__metadata__", "a"};
    static const int64_t ranks[] = {-1, 9, INT64_MIN, INT64_MAX};

    switch (bad_below(5)) {
    case 0:
        t.name = BAD(names);
        break;
    case 1:
        t.dtype = NULL;
        break;
    case 2:
        t.dtype = bad_below(2) == 0 ? "" : "F31";
        impossible(TD_UNSUPPORTED, "dtype");
        break;
    case 3:
        t.rank = BAD_NUMBER(ranks);
        break;
    default:
        t.rank = 2;
        t.shape[0] = INT64_MAX;
        t.shape[1] = bad_below(2) == 0 ? -1 : INT64_MAX;
        break;
    }
    impossible(TD_BAD_ARGUMENT, "tensor");
    return t;
}

static int64_t count_or_bad(const char *name, int64_t right)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, (int64_t)INT32_MAX + 1};

    if (!wrong())
        return right;
    impossible(TD_BAD_ARGUMENT, name);
    return BAD_NUMBER(bad);
}

API(td_safetensors_writer_create)
{
    td_stored tensors[GOOD];
    td_stored_text texts[2];

    memcpy(tensors, good, sizeof good);
    memcpy(texts, good_texts, sizeof texts);
    if (wrong())
        tensors[1] = spoil(tensors[1]);
    SPOIL(texts[1].key, "key", NULL, "", "\xff", "format");
    SPOIL(texts[1].value, "value", NULL, "\x80");
    const int64_t count = count_or_bad("count", GOOD), pairs = count_or_bad("metadata_count", 2);
    const char *to_path = path_or_none(path_own(false));
    const td_stored *list = pointer("tensors", tensors);
    const td_stored_text *text_list = pointer("metadata", texts);
    API_MAKES(td_safetensors_writer, td_safetensors_writer_destroy,
              td_safetensors_writer_create(to_path, count, list, pairs, text_list, to));
    return path_done(status);
}

API(td_safetensors_write)
{

    open_writer();
    int64_t bytes = 1 + td_fuzz_below(GOOD_BYTES);
    const void *data = in("data", (size_t)bytes);
    SPOIL_NUMBER(bytes, "bytes", -1, INT64_MIN, GOOD_BYTES + 1, INT64_MAX);
    return end(td_safetensors_write(pointer("writer", writer), data, bytes));
}

API(td_safetensors_commit)
{
    const char zeros[GOOD_BYTES] = {0};

    open_writer();
    if (!wrong())
        td_assert_ok(td_safetensors_write(writer, zeros, GOOD_BYTES));
    else
        impossible(TD_BAD_STATE, "missing");
    if (!api_spoilt() && td_fuzz_chance(20)) {
        td_assert_ok(td_safetensors_commit(writer));
        impossible(TD_BAD_STATE, "committed");
    }
    td_forget_error();
    return end(td_safetensors_commit(pointer("writer", writer)));
}

API(td_safetensors_writer_destroy)
{
    open_writer();
    td_safetensors_writer_destroy(NULL);
    return end(TD_OK);
}

/* ---- reading ---- */

static void make_file(void)
{
    char bytes[GOOD_BYTES];

    for (int i = 0; i < GOOD_BYTES; i++)
        bytes[i] = (char)i;
    open_writer();
    td_assert_ok(td_safetensors_write(writer, bytes, GOOD_BYTES));
    td_assert_ok(td_safetensors_commit(writer));
    td_safetensors_writer_destroy(writer);
    writer = NULL;
    td_assert_ok(td_safetensors_open(path, &file));
    td_forget_error();
}

static td_status close_file(td_status status)
{
    td_safetensors_close(file);
    file = NULL;
    return path_done(status);
}

API(td_safetensors_open)
{
    static const char *const bad[] = {NULL, "", "/", "/no/such/folder/file", "/dev/null", "/proc/self/stat"};

    make_file();
    const char *from = path;
    if (wrong()) {
        from = BAD(bad);
        impossible(TD_BAD_ARGUMENT, "path|not a safetensors file");
        impossible(TD_IO_ERROR, "cannot");
    }
    API_MAKES(td_safetensors, td_safetensors_close, td_safetensors_open(from, to));
    return close_file(status);
}

API_OF_NULL(td_safetensors_close)

API(td_safetensors_count)
{
    make_file();
    assert_int_equal(td_safetensors_count(file), GOOD);
    assert_int_equal(td_safetensors_count(NULL), 0);
    return close_file(TD_OK);
}

static int64_t index_or_bad(void)
{
    static const int64_t bad[] = {-1, GOOD, INT64_MIN, INT64_MAX};

    if (!wrong())
        return td_fuzz_below(GOOD);
    impossible(TD_BAD_ARGUMENT, "index");
    return BAD_NUMBER(bad);
}

API(td_safetensors_tensor)
{
    make_file();
    const int64_t index = index_or_bad();
    td_stored *to = out("out", sizeof *to);
    const td_status status = td_safetensors_tensor(pointer("file", file), index, to);
    if (status == TD_OK)
        assert_string_equal(to->name, good[index].name);
    return close_file(status);
}

API(td_safetensors_find)
{
    static const char *const none[] = {NULL, "", "d", "aa", "\xff"};
    const int64_t index = td_fuzz_below(GOOD);

    make_file();
    assert_int_equal(td_safetensors_find(file, good[index].name), index);
    assert_int_equal(td_safetensors_find(file, BAD(none)), -1);
    assert_int_equal(td_safetensors_find(NULL, "a"), -1);
    return close_file(TD_OK);
}

API(td_safetensors_metadata)
{
    static const char *const none[] = {NULL, "", "forma", "a"};

    make_file();
    assert_string_equal(td_safetensors_metadata(file, "key"), "value");
    assert_null(td_safetensors_metadata(file, BAD(none)));
    assert_null(td_safetensors_metadata(NULL, "key"));
    return close_file(TD_OK);
}

API(td_safetensors_read)
{
    static const int64_t has[] = {8, 24, 5}, first[] = {0, 8, 32};

    make_file();
    const int64_t which = td_fuzz_below(GOOD);
    int64_t index = which, at = td_fuzz_below(has[which]), bytes = 1 + td_fuzz_below(has[which] - at);
    unsigned char *dst = out("dst", (size_t)bytes);
    SPOIL(index, "index", -1, INT64_MAX);
    SPOIL_NUMBER(at, "begin", -1, 25, INT64_MIN, INT64_MAX);
    SPOIL_NUMBER(bytes, "bytes", -1, 25, INT64_MIN, INT64_MAX);
    const td_status status = td_safetensors_read(pointer("file", file), index, at, bytes, dst);
    for (int64_t i = 0; i < bytes && status == TD_OK; i++)
        assert_int_equal(dst[i], first[which] + at + i);
    return close_file(status);
}
