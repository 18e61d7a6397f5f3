/* Files of tensors: a written file can be read; any other file is refused by name; after any failure the old
 * file is unchanged and no other file is left. */
#include "base/safetensors.h"

#include "support/compare.h"
#include "support/fault.h"
#include "support/file_kit.h"
#include "support/test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static td_safetensors *open_file(void)
{
    td_safetensors *file;

    td_assert_ok(td_safetensors_open(file_path, &file));
    return file;
}

static td_stored tensor_of(const td_safetensors *file, const char *name)
{
    td_stored tensor;

    td_assert_ok(td_safetensors_tensor(file, td_safetensors_find(file, name), &tensor));
    return tensor;
}

/* ---- round trips ---- */

static const td_stored stored[] = {
    {.name = "step", .dtype = "I64"},
    {.name = "f64", .dtype = "F64", .rank = 1, .shape = {3}},
    {.name = "complex", .dtype = "C64", .rank = 1, .shape = {2}},
    {.name = "u64", .dtype = "U64", .rank = 1, .shape = {1}},
    {.name = "none", .dtype = "F32", .rank = 3, .shape = {2, 0, 5}},
    {.name = "f32", .dtype = "F32", .rank = 2, .shape = {2, 3}},
    {.name = "i32", .dtype = "I32", .rank = 1, .shape = {1}},
    {.name = "u32", .dtype = "U32", .rank = 1, .shape = {1}},
    {.name = "f16", .dtype = "F16", .rank = 8, .shape = {1, 1, 1, 3, 1, 1, 1, 1}},
    {.name = "bf16", .dtype = "BF16", .rank = 1, .shape = {2}},
    {.name = "i16", .dtype = "I16", .rank = 1, .shape = {1}},
    {.name = "u16", .dtype = "U16", .rank = 1, .shape = {1}},
    {.name = "a \"name\"\\ \n\t\x01 \xc3\xa4 \xf0\x9f\x99\x82", .dtype = "I8", .rank = 1, .shape = {5}},
    {.name = "u8", .dtype = "U8", .rank = 1, .shape = {1}},
    {.name = "bool", .dtype = "BOOL", .rank = 1, .shape = {1}},
    {.name = "e4m3", .dtype = "F8_E4M3", .rank = 1, .shape = {1}},
    {.name = "e5m2", .dtype = "F8_E5M2", .rank = 1, .shape = {1}},
    {.name = "e8m0", .dtype = "F8_E8M0", .rank = 1, .shape = {1}},
    {.name = "e4m3fnuz", .dtype = "F8_E4M3FNUZ", .rank = 1, .shape = {1}},
    {.name = "e5m2fnuz", .dtype = "F8_E5M2FNUZ", .rank = 1, .shape = {1}},
};
enum { STORED = sizeof stored / sizeof *stored, STORED_BYTES = 8 + 24 + 16 + 8 + 24 + 8 + 6 + 4 + 4 + 5 + 7 };

static const td_stored_text metadata[] = {{"format", "pt"},
                                          {"quote \"", "line\nand \\ \xe2\x82\xac \x1f\x10"}};

/* Writes data in pieces of `piece` bytes. */
static td_status write_stored(int64_t piece)
{
    td_safetensors_writer *writer = NULL;
    char data[STORED_BYTES];
    td_status status;

    for (int i = 0; i < STORED_BYTES; i++)
        data[i] = (char)(3 * i + 1);
    status = td_safetensors_writer_create(file_path, STORED, stored, 2, metadata, &writer);
    for (int64_t at = 0; at < STORED_BYTES && status == TD_OK; at += piece)
        status =
            td_safetensors_write(writer, data + at, STORED_BYTES - at < piece ? STORED_BYTES - at : piece);
    if (status == TD_OK)
        status = td_safetensors_commit(writer);
    td_safetensors_writer_destroy(writer);
    return status;
}

static td_status read_stored(void)
{
    td_safetensors *file = NULL;
    td_status status = td_safetensors_open(file_path, &file);
    int64_t at = 0;

    for (int i = 0; i < STORED && status == TD_OK; i++) {
        const td_stored *want = &stored[i];
        const td_stored got = tensor_of(file, want->name);
        unsigned char data[STORED_BYTES];

        assert_string_equal(got.name, want->name);
        assert_string_equal(got.dtype, want->dtype);
        assert_int_equal(got.rank, want->rank);
        assert_memory_equal(got.shape, want->shape, sizeof got.shape);
        memset(data, 0xFF, sizeof data);
        status = td_safetensors_read(file, td_safetensors_find(file, want->name), 0, got.bytes, data);
        for (int64_t j = 0; j < got.bytes && status == TD_OK; j++)
            assert_int_equal(data[j], (unsigned char)(3 * (at + j) + 1));
        assert_int_equal(data[got.bytes], 0xFF);
        at += got.bytes;
    }
    if (status == TD_OK) {
        assert_int_equal(at, STORED_BYTES);
        assert_int_equal(td_safetensors_count(file), STORED);
        assert_string_equal(td_safetensors_metadata(file, metadata[0].key), metadata[0].value);
        assert_string_equal(td_safetensors_metadata(file, metadata[1].key), metadata[1].value);
    }
    td_safetensors_close(file);
    return status;
}

TD_TEST(what_is_written_is_read)
{
    for (int64_t piece = 1; piece <= STORED_BYTES; piece += 50) {
        td_assert_ok(write_stored(piece));
        td_assert_ok(read_stored());
        assert_int_equal(file_count(), 1);
    }
    file_interruptions = 3;
    file_small_steps = 5;
    td_assert_ok(write_stored(7));
    file_interruptions = 3;
    file_small_steps = 5;
    td_assert_ok(read_stored());
    assert_int_equal(file_interruptions + file_small_steps, 0);
}

TD_TEST(data_begins_on_a_multiple_of_eight)
{
    for (int i = 0; i < 8; i++) { /* names of all lengths */
        const td_stored tensor = {.name = &"aaaaaaaa"[i], .dtype = "U8", .rank = 1};
        td_safetensors_writer *writer;
        size_t bytes;

        td_assert_ok(td_safetensors_writer_create(file_path, 1, &tensor, 0, NULL, &writer));
        td_assert_ok(td_safetensors_commit(writer));
        td_safetensors_writer_destroy(writer);
        free(file_read(file_path, &bytes));
        assert_int_equal(bytes % 8, 0);
    }
}

TD_TEST(parts_of_a_tensor_are_read)
{
    unsigned char bytes[4] = {9, 9, 9, 9};

    file_write_tensors(file_path,
                       "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                       "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
                       7);
    td_safetensors *file = open_file();
    const int64_t b = td_safetensors_find(file, "b");
    td_assert_ok(td_safetensors_read(file, b, 1, 2, bytes));
    assert_memory_equal(bytes, "\4\5\t\t", 4);
    td_assert_ok(td_safetensors_read(file, b, 4, 0, NULL));
    td_safetensors_close(file);
}

TD_TEST(names_are_looked_up)
{
    file_write_tensors(file_path, "{\"__metadata__\":{\"k\":\"v\"}}", 0);
    td_safetensors *empty = open_file();
    assert_int_equal(td_safetensors_count(empty), 0);
    assert_int_equal(td_safetensors_find(empty, "a"), -1);
    assert_int_equal(td_safetensors_find(NULL, "a"), -1);
    assert_int_equal(td_safetensors_count(NULL), 0);
    assert_string_equal(td_safetensors_metadata(empty, "k"), "v");
    assert_null(td_safetensors_metadata(empty, "l"));
    assert_null(td_safetensors_metadata(empty, NULL));
    assert_null(td_safetensors_metadata(NULL, "k"));
    td_safetensors_close(empty);
    td_safetensors_close(NULL);

    file_write_tensors(file_path, "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1);
    td_safetensors *file = open_file();
    assert_null(td_safetensors_metadata(file, "k"));
    assert_int_equal(td_safetensors_find(file, NULL), -1);
    td_safetensors_close(file);

    assert_string_equal(td_stored_dtype(TD_F64), "F64");
    assert_string_equal(td_stored_dtype(TD_F32), "F32");
    assert_string_equal(td_stored_dtype(TD_F16), "F16");
    assert_string_equal(td_stored_dtype(TD_BF16), "BF16");
    assert_null(td_stored_dtype((td_dtype)4));
    assert_null(td_stored_dtype((td_dtype)-1));
}

/* Valid variants: members in another order, space, escapes, padding, empty tensors at any place. */
TD_TEST(other_writers_files_are_read)
{
    file_write_tensors(
        file_path,
        "\t\n{ \"b\" : {\"data_offsets\" : [ 2 , 6 ] ,\n\"shape\":[ ],\t\"dtype\":\"\\u00463\\u0032\"},\r"
        "\"\\u00e4\\u07ff\\u0800\\uFFFF\\ud800\\udc00\\ud83d\\uDE42\\/"
        "\\b\\f\\n\\r\\t\\\"\\\\\":{\"dtype\":\"U8\",\"shape\":[2],"
        "\"data_offsets\":[0,2]},"
        "\"e\":{\"dtype\":\"F64\",\"shape\":[0,9],\"data_offsets\":[2,2]},"
        "\"\":{\"dtype\":\"F64\",\"shape\":[0,9223372036854775807],\"data_offsets\":[6,6]},"
        "\"__metadata__\":{}}   \n ",
        6);
    td_safetensors *file = open_file();
    assert_int_equal(td_safetensors_count(file), 4);
    assert_string_equal(tensor_of(file, "b").dtype, "F32");
    assert_int_equal(tensor_of(file, "b").rank, 0);
    assert_int_equal(tensor_of(file, "e").bytes, 0);
    assert_int_equal(tensor_of(file, "").shape[1], INT64_MAX);
    assert_int_equal(
        tensor_of(file,
                  "\xc3\xa4\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf0\x9f\x99\x82/\b\f\n\r\t\"\\")
            .bytes,
        2);
    td_safetensors_close(file);
}

/* ---- files that are not safetensors ---- */

#define T(offsets) "{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" offsets "]}"

static const struct {
    const char *header;
    size_t data;
    td_status status;
    const char *words;
} bad_headers[] = {
    {"", 0, TD_BAD_ARGUMENT, "byte 0 of its header needs to be '{'"},
    {"[]", 0, TD_BAD_ARGUMENT, "byte 0 of its header needs to be '{'"},
    {"{", 0, TD_BAD_ARGUMENT, "byte 1 of its header needs to be a string"},
    {"{}}", 0, TD_BAD_ARGUMENT, "byte 2 of its header needs to be its end"},
    {"{}", 1, TD_BAD_ARGUMENT, "its tensors have 0 bytes, its data has 1"},
    {"{,}", 0, TD_BAD_ARGUMENT, "byte 1 of its header"},
    {"{\"a\"}", 0, TD_BAD_ARGUMENT, "byte 4 of its header needs to be ':'"},
    {"{\"a\":1}", 0, TD_BAD_ARGUMENT, "byte 5 of its header needs to be '{'"},
    {"{\"a\":null}", 0, TD_BAD_ARGUMENT, "byte 5 of its header"},
    {"{\"a\":{}}", 0, TD_BAD_ARGUMENT, "byte 6 of its header needs to be a string"},
    {"{\"a\":" T("0,2") ",}", 2, TD_BAD_ARGUMENT, "needs to be a string"},
    {"{\"a\":" T("0,2") " \"b\":" T("2,4") "}", 4, TD_BAD_ARGUMENT, "needs to be ',' or '}'"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, TD_BAD_ARGUMENT, "tensor 'a' has no data_offsets"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", 2, TD_BAD_ARGUMENT, "tensor 'a' has no shape"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", 2, TD_BAD_ARGUMENT, "tensor 'a' has no dtype"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", 2, TD_BAD_ARGUMENT, "tensor 'a' has two of dtype"},
    {"{\"a\":{\"colour\":\"red\"}}", 2, TD_BAD_ARGUMENT, "tensor 'a' has the key 'colour'"},
    {"{\"a\":{\"dtype\":8}}", 2, TD_BAD_ARGUMENT, "needs to be a string"},
    {"{\"a\":{\"shape\":{}}}", 2, TD_BAD_ARGUMENT, "needs to be '['"},
    {"{\"a\":{\"shape\":[[2]]}}", 2, TD_BAD_ARGUMENT, "needs to be a number without sign"},
    {"{\"a\":{\"shape\":[2,]}}", 2, TD_BAD_ARGUMENT, "needs to be a number without sign"},
    {"{\"a\":{\"shape\":[2}}", 2, TD_BAD_ARGUMENT, "needs to be ',' or ']'"},
    {"{\"a\":{\"shape\":[-2]}}", 2, TD_BAD_ARGUMENT, "needs to be a number without sign"},
    {"{\"a\":{\"shape\":[02]}}", 2, TD_BAD_ARGUMENT, "needs to be ',' or ']'"},
    {"{\"a\":{\"shape\":[2.0]}}", 2, TD_BAD_ARGUMENT, "needs to be ',' or ']'"},
    {"{\"a\":{\"shape\":[2e0]}}", 2, TD_BAD_ARGUMENT, "needs to be ',' or ']'"},
    {"{\"a\":{\"shape\":[9223372036854775808]}}", 2, TD_BAD_ARGUMENT, "a number below 2^63"},
    {"{\"a\":{\"shape\":[99999999999999999999]}}", 2, TD_BAD_ARGUMENT, "a number below 2^63"},
    {"{\"a\":{\"shape\":[1,2,3,4,5,6,7,8,9]}}", 2, TD_UNSUPPORTED, "has more than 8 numbers"},
    {"{\"a\":" T("0") "}", 2, TD_BAD_ARGUMENT, "tensor 'a' has 1 data_offsets, needs 2"},
    {"{\"a\":" T("0,1,2") "}", 2, TD_BAD_ARGUMENT, "tensor 'a' has 3 data_offsets, needs 2"},
    {"{\"a\":" T("0,3") "}", 3, TD_BAD_ARGUMENT, "data_offsets 0 to 3, but its dtype and shape take 2 bytes"},
    {"{\"a\":" T("2,0") "}", 2, TD_BAD_ARGUMENT, "data_offsets 2 to 0"},
    {"{\"a\":" T("0,9223372036854775807") "}", 2, TD_BAD_ARGUMENT, "data_offsets 0 to 9223372036854775807"},
    {"{\"a\":" T("1,3") "}", 3, TD_BAD_ARGUMENT, "tensor 'a' begins at byte 1 of the data, but"},
    {"{\"a\":" T("0,2") ",\"b\":" T("1,3") "}", 3, TD_BAD_ARGUMENT, "tensor 'b' begins at byte 1"},
    {"{\"a\":" T("0,2") ",\"b\":" T("0,2") "}", 2, TD_BAD_ARGUMENT, "begins at byte 0 of the data, but"},
    {"{\"a\":" T("0,2") ",\"a\":" T("0,2") "}", 2, TD_BAD_ARGUMENT, "tensor 'a' occurs twice"},
    {"{\"a\":" T("0,2") ",\"b\":" T("4,6") "}", 6, TD_BAD_ARGUMENT, "tensor 'b' begins at byte 4"},
    {"{\"a\":" T("0,2") "}", 3, TD_BAD_ARGUMENT, "its tensors have 2 bytes, its data has 3"},
    {"{\"a\":" T("0,2") "}", 1, TD_BAD_ARGUMENT, "its tensors have 2 bytes, its data has 1"},
    {"{\"a\":" T("0,2") ",\"\\u0061\":" T("2,4") "}", 4, TD_BAD_ARGUMENT, "tensor 'a' occurs twice"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[2,0]}}", 2, TD_BAD_ARGUMENT,
     "data_offsets 2 to 0"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,1]}}", 2, TD_BAD_ARGUMENT,
     "its tensors have 1 bytes, its data has 2"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 0,
     TD_BAD_ARGUMENT, "tensor 'a' has more than 2^63 - 1 bytes"},
    /* The number of bytes overflows, even if a file has no bytes. */
    {"{\"a\":{\"dtype\":\"F64\",\"shape\":[9223372036854775807,0],\"data_offsets\":[0,0]}}", 0,
     TD_BAD_ARGUMENT, "tensor 'a' has more than 2^63 - 1 bytes"},
    {"{\"__metadata__\":{\"k\":\"v\",\"k\":\"w\"}}", 0, TD_BAD_ARGUMENT,
     "key 'k' occurs twice in its metadata"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, TD_BAD_ARGUMENT, "'__metadata__' is in it twice"},
    {"{\"__metadata__\":{\"k\":1}}", 0, TD_BAD_ARGUMENT, "needs to be a string"},
    {"{\"__metadata__\":{\"k\"}}", 0, TD_BAD_ARGUMENT, "needs to be ':'"},
    {"{\"__metadata__\":{\"k\":\"v\"", 0, TD_BAD_ARGUMENT, "needs to be ',' or '}'"},
    {"{\"__metadata__\":{1:\"v\"}}", 0, TD_BAD_ARGUMENT, "needs to be a string"},
    {"{\"__metadata__\":{\"k\":{\"l\":\"v\"}}}", 0, TD_BAD_ARGUMENT, "needs to be a string"},
    {"{\"__metadata__\":[]}", 0, TD_BAD_ARGUMENT, "needs to be '{'"},
    {"{\"a", 0, TD_BAD_ARGUMENT, "needs to be a character of a string"},
    {"{\"a\n\":1}", 0, TD_BAD_ARGUMENT, "needs to be a character of a string"},
    {"{\"\xff\":1}", 0, TD_BAD_ARGUMENT, "needs to be a character of a string"},
    {"{\"\xed\xa0\x80\":1}", 0, TD_BAD_ARGUMENT, "needs to be a character of a string"},
    {"{\"\xf0\x9f\x99", 0, TD_BAD_ARGUMENT, "needs to be a character of a string"},
    {"{\"\\x\":1}", 0, TD_BAD_ARGUMENT, "needs to be an escape"},
    {"{\"\\", 0, TD_BAD_ARGUMENT, "needs to be an escape"},
    {"{\"\\u0000\":1}", 0, TD_BAD_ARGUMENT, "four hexadecimal digits above 0"},
    {"{\"\\u12G4\":1}", 0, TD_BAD_ARGUMENT, "four hexadecimal digits above 0"},
    {"{\"\\u12", 0, TD_BAD_ARGUMENT, "four hexadecimal digits above 0"},
    {"{\"\\ud800\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
    {"{\"\\udc00\\ud800\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
    {"{\"\\ud800\\n\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
    {"{\"\\ud800\\ud800\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
    {"{\"\\ud800\\ue000\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
    {"{\"\\ud800\\u12\":1}", 0, TD_BAD_ARGUMENT, "a pair of surrogates"},
};

static td_status try_open(const char *path)
{
    td_safetensors *file = (td_safetensors *)bad_headers; /* poison: open must overwrite it */
    const td_status status = td_safetensors_open(path, &file);

    assert_null(file);
    return status;
}

TD_TEST(bad_headers_are_refused_by_name)
{
    for (size_t i = 0; i < sizeof bad_headers / sizeof *bad_headers; i++) {
        file_write_tensors(file_path, bad_headers[i].header, bad_headers[i].data);
        td_assert_refused(try_open(file_path), bad_headers[i].status, bad_headers[i].words);
        td_assert_refused(try_open(file_path), bad_headers[i].status, file_path);
    }
}

TD_TEST(deep_nesting_is_refused_at_its_first_level)
{
    enum { DEPTH = 1 << 20 };
    char *header = malloc(DEPTH + 32);

    assert_non_null(header);
    strcpy(header, "{\"a\":{\"shape\":");
    const size_t begin = strlen(header);
    memset(header + begin, '[', DEPTH);
    header[begin + DEPTH] = '\0';
    file_write_tensors(file_path, header, 0);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "byte 15 of its header needs to be a number");
    free(header);
}

TD_TEST(bad_lengths_are_refused_by_name)
{
    file_write(file_path, "", 0);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "it has 0 bytes, needs at least 8");
    file_write(file_path, "\2\0\0\0\0\0\0", 7);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "it has 7 bytes");
    file_write(file_path, "\2\0\0\0\0\0\0\0{", 9);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "its header has 2 bytes, but ends after 1");
    file_write(file_path, "\1\xe1\xf5\x05\0\0\0\0{}", 10);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "has 100000001 bytes, at most 100000000");
    file_write(file_path, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "has 18446744073709551615 bytes");
    file_write(file_path, "\2\0\0\0\0\0\0\x80{}", 10);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "has 9223372036854775810 bytes");
    file_write(file_path, "\4\0\0\0\0\0\0\0{}\0 ", 12);
    td_assert_refused(try_open(file_path), TD_BAD_ARGUMENT, "byte 2 of its header is 0");
    file_write(file_path, "\2\0\0\0\0\0\0\0{}", 10);
    td_safetensors_close(open_file());
}

TD_TEST(what_is_no_regular_file_is_refused_at_once)
{
    td_assert_refused(try_open(file_path), TD_IO_ERROR, "No such file");
    td_assert_refused(try_open("/"), TD_IO_ERROR, "not a regular file");
    td_assert_refused(try_open("/dev/zero"), TD_IO_ERROR, "not a regular file");
    assert_int_equal(mkfifo(file_path, 0600), 0);
    td_assert_refused(try_open(file_path), TD_IO_ERROR, "not a regular file");
    td_assert_refused(write_stored(9), TD_IO_ERROR, "not a regular file");
}

TD_TEST(a_file_that_becomes_shorter_is_an_error_of_the_read)
{
    char bytes[8] = {0};

    file_write_tensors(file_path, "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 8);
    td_safetensors *file = open_file();
    struct stat info;
    assert_int_equal(stat(file_path, &info), 0);
    assert_int_equal(truncate(file_path, info.st_size - 3), 0);
    td_assert_ok(td_safetensors_read(file, 0, 0, 5, bytes));
    td_assert_refused(td_safetensors_read(file, 0, 0, 8, bytes), TD_IO_ERROR, "it became shorter");
    td_safetensors_close(file);
}

/* ---- writers ---- */

static td_status try_create(const td_stored *tensors, int64_t count, const td_stored_text *texts,
                            int64_t pairs)
{
    td_safetensors_writer *writer = (td_safetensors_writer *)bad_headers;
    const td_status status = td_safetensors_writer_create(file_path, count, tensors, pairs, texts, &writer);

    assert_null(writer);
    assert_int_equal(file_count(), 0);
    return status;
}

TD_TEST(bad_descriptions_are_refused_by_name)
{
    const td_stored good = {.name = "a", .dtype = "F32", .rank = 1, .shape = {2}};
    static const struct {
        td_stored tensor;
        td_status status;
        const char *words;
    } bad[] = {
        {{.dtype = "F32"}, TD_BAD_ARGUMENT, "the name of tensor 1 is NULL"},
        {{.name = "", .dtype = "F32"}, TD_BAD_ARGUMENT, "the name of tensor 1 is empty"},
        {{.name = "b\xff", .dtype = "F32"}, TD_BAD_ARGUMENT, "tensor 1 is not UTF-8: byte 1 is 0xff"},
        {{.name = "a", .dtype = "F32"}, TD_BAD_ARGUMENT, "'a' occurs twice"},
        {{.name = "__metadata__", .dtype = "F32"}, TD_BAD_ARGUMENT, "name is '__metadata__'"},
        {{.name = "b"}, TD_BAD_ARGUMENT, "tensor 'b': dtype is NULL"},
        {{.name = "b", .dtype = "F5"}, TD_UNSUPPORTED, "dtype 'F5'"},
        {{.name = "b", .dtype = "F32", .rank = -1}, TD_BAD_ARGUMENT, "tensor 'b': rank is -1"},
        {{.name = "b", .dtype = "F32", .rank = 9}, TD_BAD_ARGUMENT, "rank is 9, needs 0 to 8"},
        {{.name = "b", .dtype = "F32", .rank = 1, .shape = {-1}}, TD_BAD_ARGUMENT, "extent 0 is -1"},
        {{.name = "b", .dtype = "F32", .rank = 2, .shape = {INT64_MAX / 4, 2}}, TD_BAD_ARGUMENT, "2^63 - 1"},
        {{.name = "b", .dtype = "U8", .rank = 1, .shape = {INT64_MAX}},
         TD_BAD_ARGUMENT,
         "the tensors have more than 2^63 - 1 bytes"},
    };
    const int stdin_flags = fcntl(0, F_GETFD);
    td_safetensors_writer *writer;

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const td_stored both[] = {good, bad[i].tensor};
        td_assert_refused(try_create(both, 2, NULL, 0), bad[i].status, bad[i].words);
    }
    td_assert_refused(td_safetensors_writer_create("no/such/folder", 1, &good, 0, NULL, &writer), TD_IO_ERROR,
                      "No such file");
    td_assert_refused(td_safetensors_writer_create("/dev/full", 1, &good, 0, NULL, &writer), TD_IO_ERROR,
                      "'/dev/full': not a regular file");
    assert_int_equal(fcntl(0, F_GETFD), stdin_flags); /* they closed no file of the caller's */
}

TD_TEST(a_tensor_of_an_unknown_dtype_costs_no_other)
{
    td_stored tensor;
    char bytes[2];

    file_write_tensors(file_path,
                       "{\"a\":{\"dtype\":\"F4\",\"shape\":[5],\"data_offsets\":[0,3]},"
                       "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]}}",
                       5);
    td_safetensors *file = open_file();
    td_assert_ok(td_safetensors_read(file, td_safetensors_find(file, "b"), 0, 2, bytes));
    assert_memory_equal(bytes, "\3\4", 2);
    td_assert_ok(td_safetensors_tensor(file, 0, &tensor));
    assert_string_equal(tensor.dtype, "F4");
    assert_int_equal(tensor.bytes, 3);
    td_assert_refused(td_safetensors_read(file, 0, 0, 2, bytes), TD_UNSUPPORTED,
                      "tensor 'a' has the unknown dtype 'F4'");
    td_safetensors_close(file);
}

TD_TEST(a_header_beyond_the_formats_limit_is_refused)
{
    const size_t bytes = 20 << 20; /* one control character repeated; each takes six bytes in the header */
    char *value = malloc(bytes + 1);

    assert_non_null(value);
    memset(value, 1, bytes);
    value[bytes] = '\0';
    td_assert_refused(try_create(NULL, 0, &(td_stored_text){"k", value}, 1), TD_BAD_ARGUMENT,
                      "at most 100000000 are allowed");
    free(value);
}

TD_TEST(a_file_is_committed_whole_and_once)
{
    const td_stored tensor = {.name = "a", .dtype = "U8", .rank = 1, .shape = {4}};
    td_safetensors_writer *writer;

    file_write(file_path, "old", 3);
    td_assert_ok(td_safetensors_writer_create(file_path, 1, &tensor, 0, NULL, &writer));
    assert_int_equal(file_count(), 2);
    td_assert_refused(td_safetensors_commit(writer), TD_BAD_STATE, "4 bytes are missing");
    td_assert_ok(td_safetensors_write(writer, "abc", 3));
    td_assert_refused(td_safetensors_commit(writer), TD_BAD_STATE, "1 bytes are missing");
    assert_true(file_is(file_path, "old", 3));
    td_assert_ok(td_safetensors_write(writer, "d", 1));
    td_assert_ok(td_safetensors_write(writer, NULL, 0));
    td_assert_ok(td_safetensors_commit(writer));
    td_assert_refused(td_safetensors_commit(writer), TD_BAD_STATE, "committed already");
    td_safetensors_writer_destroy(writer);
    assert_int_equal(file_count(), 1);
    td_safetensors_close(open_file());
    size_t bytes;
    char *data = file_read(file_path, &bytes);
    assert_memory_equal(data + 8, "{\"a\"", 4); /* no metadata */
    free(data);

    td_assert_ok(td_safetensors_writer_create(file_path, 0, NULL, 0, NULL, &writer));
    td_safetensors_writer_destroy(writer); /* without commit */
    assert_int_equal(file_count(), 1);
    td_safetensors *file = open_file();
    assert_int_equal(td_safetensors_count(file), 1);
    td_safetensors_close(file);
    td_safetensors_writer_destroy(NULL);
}

/* What happens in the folder between the begin of a file and its commit. */
static void lay_a_folder(void)
{
    unlink(file_path);
    assert_int_equal(mkdir(file_path, 0700), 0);
}

static void write_another(void)
{
    file_at_rename = NULL;
    td_assert_ok(write_stored(100));
}

TD_TEST(a_commit_reaches_the_disk_before_the_name_and_then_the_folder)
{
    const td_stored tensor = {.name = "a", .dtype = "U8"};
    td_safetensors_writer *writer;

    file_calls_fail = true;
    td_fault_at(0);
    td_assert_ok(write_stored(100));
    file_calls_fail = false;
    assert_non_null(strstr(file_calls, " write fsync close renameat openat fsync close"));
    file_at_rename = write_another; /* it removes files that no writer has locked */
    td_assert_ok(write_stored(100));
    td_assert_ok(td_safetensors_writer_create(file_path, 1, &tensor, 0, NULL, &writer));
    td_assert_ok(td_safetensors_write(writer, "a", 1));
    lay_a_folder();
    td_assert_refused(td_safetensors_commit(writer), TD_IO_ERROR, "not a regular file");
    td_assert_refused(td_safetensors_commit(writer), TD_BAD_STATE, "a write of");
    td_safetensors_writer_destroy(writer);
    assert_int_equal(rmdir(file_path), 0);
    assert_int_equal(file_count(), 0);
}

TD_TEST(permissions_follow_the_umask)
{
    static const mode_t masks[] = {022, 077, 0};
    struct stat info;

    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        const mode_t before = umask(masks[i]);

        td_assert_ok(write_stored(100));
        umask(before);
        assert_int_equal(stat(file_path, &info), 0);
        assert_int_equal(info.st_mode & 0777, 0666 & ~masks[i]);
    }
}

/* Makes an unfinished file with the name that write_stored uses. Returns its descriptor: a living writer
 * keeps it open. */
static int make_beside(long process, int number, char name[128])
{
    snprintf(name, 128, "%s.%ld-%d.partial", file_path, process, number);
    file_write(name, "x", 1);
    const int held = open(name, O_WRONLY | O_CLOEXEC, 0);
    assert_true(held >= 0);
    return held;
}

TD_TEST(files_of_killed_writers_are_removed_and_those_of_living_ones_stay)
{
    static const char *const others[] = {".7-1.partial.x", ".7-.partial", ".7-x.partial", "7-1.partial"};
    char name[128];
    int held[100];

    for (int i = 0; i < 100; i++) { /* 100 files of this process, and 100 of a process that has ended */
        held[i] = make_beside(getpid(), i, name);
        assert_int_equal(flock(held[i], LOCK_EX | LOCK_NB), 0);
        close(make_beside(1234567, i, name));
    }
    td_assert_refused(write_stored(100), TD_IO_ERROR, "File exists");
    assert_int_equal(file_count(), 100);
    close(held[7]);
    td_assert_ok(write_stored(100));
    assert_int_equal(file_count(), 100);
    for (int i = 0; i < 100; i++)
        if (i != 7)
            close(held[i]);
    snprintf(name, sizeof name, "%s.7-2.partial", file_path);
    assert_int_equal(mkdir(name, 0700), 0); /* a folder with a writer's name is no file of a writer */
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(name, sizeof name, "%s%s", file_path, others[i]);
        file_write(name, "x", 1);
    }
    td_assert_ok(write_stored(100));
    assert_int_equal(file_count(), 2 + (int)(sizeof others / sizeof *others));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(name, sizeof name, "%s%s", file_path, others[i]);
        assert_int_equal(unlink(name), 0);
    }
    snprintf(name, sizeof name, "%s.7-2.partial", file_path);
    assert_int_equal(rmdir(name), 0);
}

TD_TEST(the_folder_may_be_renamed_while_a_file_is_written)
{
    const td_stored tensor = {.name = "a", .dtype = "U8", .rank = 1, .shape = {1}};
    char was[64], now[80], file[96];
    td_safetensors_writer *writer;

    snprintf(was, sizeof was, "%.*s", (int)(strrchr(file_path, '/') - file_path), file_path);
    snprintf(now, sizeof now, "%s-moved", was);
    snprintf(file, sizeof file, "%s%s", now, strrchr(file_path, '/'));
    for (int commits = 0; commits <= 1; commits++) {
        td_assert_ok(td_safetensors_writer_create(file_path, 1, &tensor, 0, NULL, &writer));
        assert_int_equal(rename(was, now), 0);
        td_assert_ok(td_safetensors_write(writer, "a", 1));
        if (commits)
            td_assert_ok(td_safetensors_commit(writer));
        td_safetensors_writer_destroy(writer);
        assert_int_equal(access(file, F_OK), commits ? 0 : -1);
        assert_int_equal(rename(now, was), 0);
        assert_int_equal(file_count(), commits);
    }
}

TD_TEST(a_full_disk_leaves_the_old_file)
{
    void (*const before)(int) = signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit, small;

    file_write(file_path, "old", 3);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    for (small.rlim_cur = 0; small.rlim_cur < 2000; small.rlim_cur += 100) {
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        const td_status status = write_stored(16);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        assert_int_equal(file_count(), 1);
        if (status == TD_OK)
            break;
        assert_int_equal(status, TD_IO_ERROR);
        assert_true(file_is(file_path, "old", 3));
    }
    assert_in_range(small.rlim_cur, 1000, 1900);
    td_assert_ok(read_stored());
    signal(SIGXFSZ, before);
}

TD_TEST(a_writer_whose_write_failed_does_not_commit)
{
    const td_stored tensor = {.name = "a", .dtype = "U8", .rank = 1, .shape = {1}};
    td_safetensors_writer *writer;

    td_assert_ok(td_safetensors_writer_create(file_path, 1, &tensor, 0, NULL, &writer));
    file_calls_fail = true;
    td_fault_at(1);
    td_assert_refused(td_safetensors_write(writer, "a", 1), TD_IO_ERROR, "No space left");
    file_calls_fail = false;
    td_assert_ok(td_safetensors_write(writer, "a", 1));
    td_assert_refused(td_safetensors_commit(writer), TD_BAD_STATE, "a write of");
    td_safetensors_writer_destroy(writer);
    assert_int_equal(file_count(), 0);
}

/* ---- every call fails in turn ---- */

static td_status write_at(const char *path)
{
    (void)path; /* write_stored writes to file_path */
    return write_stored(40);
}

TD_TEST(every_failing_call_leaves_the_old_file_and_nothing_beside_it)
{
    /* The folder's fsync, the search for dead writers, the last closes. */
    assert_in_range(file_check_faults(write_at, read_stored), 1, 7);
}

TD_TEST(every_failing_call_of_a_reader_comes_out)
{
    int64_t nth;

    td_assert_ok(write_stored(40));
    for (nth = 1;; nth++) {
        file_calls_fail = true;
        td_fault_at(nth);
        const td_status status = read_stored();
        file_calls_fail = false;
        if (!td_fault_name()) {
            td_assert_ok(status);
            break;
        }
        if (status == TD_OK)
            assert_true(file_fault_is_harmless());
        else
            assert_int_equal(status, file_fault_is_memory() ? TD_NO_MEMORY : TD_IO_ERROR);
    }
    assert_true(nth > 10);
}

TD_MAIN_EACH("safetensors", file_folder_make, file_folder_remove, NULL, NULL)
