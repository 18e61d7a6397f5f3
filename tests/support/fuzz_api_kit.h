/** Shared by the files of test_fuzz_api: the arguments of a random call of a public function, and the judge
 * of the call.
 *
 * To cover a function, write `API(td_name) { ... }` in the file of its module. Draw each argument with the
 * name that the function's messages use, and return the call's status. A drawn argument that is invalid makes
 * a note of that. If only a combination is invalid, use impossible_if. The judge demands:
 *
 *   - without a note the call returns TD_OK; else a noted status, with a message that has one of the words
 *     noted with that status;
 *   - arguments that are only read keep their bits. After a refusal all arguments do, and the device's memory
 *     is unchanged. */
#ifndef TD_TESTS_FUZZ_API_KIT_H
#define TD_TESTS_FUZZ_API_KIT_H

#include "comm/comm.h"
#include "support/compare.h"
#include "support/fuzz.h"
#include "support/test.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

#define API(function)                                                                                        \
    static td_status call_##function(void);                                                                  \
    __attribute__((constructor)) static void add_##function(void)                                            \
    {                                                                                                        \
        api_add(#function, call_##function);                                                                 \
    }                                                                                                        \
    static td_status call_##function(void)

/* The same for a call that needs no other statement. */
#define API_IS(function, ...)                                                                                \
    API(function)                                                                                            \
    {                                                                                                        \
        return __VA_ARGS__;                                                                                  \
    }

/* A function that accepts NULL and returns nothing. */
#define API_OF_NULL(function)                                                                                \
    API(function)                                                                                            \
    {                                                                                                        \
        function(NULL);                                                                                      \
        return TD_OK;                                                                                        \
    }

/* The names of an enum's values 0, 1, ...; and the function that finds a value by its name. */
#define API_NAMES(type, function, ...)                                                                       \
    API(function)                                                                                            \
    {                                                                                                        \
        static const char *const names[] = {__VA_ARGS__};                                                    \
        enum { COUNT = sizeof names / sizeof *names };                                                       \
                                                                                                             \
        for (int value = -1; value <= COUNT; value++)                                                        \
            check_name(function((type)value), value >= 0 && value < COUNT ? names[value] : NULL);            \
        return TD_OK;                                                                                        \
    }
#define API_PARSE(type, function, words, ...)                                                                \
    API(function)                                                                                            \
    {                                                                                                        \
        static const char *const names[] = {__VA_ARGS__};                                                    \
        const char *const name = text(words, sizeof names / sizeof *names, names);                           \
        type *const to = out("out", sizeof(type));                                                           \
        const td_status status = function(name, to);                                                         \
                                                                                                             \
        if (status == TD_OK)                                                                                 \
            assert_string_equal(names[*to], name);                                                           \
        return status;                                                                                       \
    }

/* const td_status status = the call, which makes an object at `to`. A refused call sets `to` to NULL. */
#define API_MAKES(type, destroy, ...)                                                                        \
    type *made = (type *)(void *)&made;                                                                      \
    type **const to = pointer("out", &made);                                                                 \
    const td_status status = __VA_ARGS__;                                                                    \
                                                                                                             \
    if (to && status != TD_OK)                                                                               \
        assert_null(made);                                                                                   \
    if (to)                                                                                                  \
    destroy(made)

void api_add(const char *name, td_status (*call)(void));

/* A CPU device of the case. */
extern td_device *api_dev;

/* ---- notes: `words` are possible words of a message, separated by '|' ---- */

void impossible(td_status status, const char *words);
void impossible_if(bool condition, const char *words); /* TD_BAD_ARGUMENT */

/* The call may be refused for this, or may succeed. */
void possible(td_status status, const char *words);

/* Whether a note says that the call is impossible. */
bool api_spoilt(void);

/* ---- arguments ---- */

/* Whether the next argument is wrong: as often as the case has drawn; in a sweep exactly one is. */
bool wrong(void);

/* Chooses one of `count` bad values for a wrong argument, and the value from an array. */
int64_t bad_below(int64_t count);
#define BAD(array) ((array)[bad_below(sizeof(array) / sizeof *(array))])

/* The same for numbers. If nothing else is wrong, the message must print the number. */
#define BAD_NUMBER(array)                                                                                    \
    _Generic((array)[0], float                                                                               \
             : says_number, double                                                                           \
             : says_number, size_t                                                                           \
             : says_size, default                                                                            \
             : says_integer)(BAD(array))
int64_t says_integer(int64_t value);
size_t says_size(size_t value);
double says_number(double value);

/* If the variable must be wrong, sets it to one of the following values. A message must then contain one of
 * the words. */
#define SPOIL_WITH(pick, variable, words, ...)                                                               \
    do {                                                                                                     \
        if (wrong()) {                                                                                       \
            const __typeof__(variable) bad_values[] = {__VA_ARGS__};                                         \
                                                                                                             \
            (variable) = pick(bad_values);                                                                   \
            impossible(TD_BAD_ARGUMENT, words);                                                              \
        }                                                                                                    \
    } while (0)
#define SPOIL(variable, words, ...)        SPOIL_WITH(BAD, variable, words, __VA_ARGS__)
#define SPOIL_NUMBER(variable, words, ...) SPOIL_WITH(BAD_NUMBER, variable, words, __VA_ARGS__)

td_device *dev(void);

/* A communicator of one rank on api_dev. Close it with api_close_rank, which returns `status` and keeps the
 * call's message. */
td_comm *api_one_rank(void);
td_status api_close_rank(td_comm *comm, td_status status);

/* In [1, 4]; or 0, negative, or next to the largest number. `words`, with the name, may be in messages about
 * products. */
int64_t extent(const char *words);
int64_t bad_extent(const char *words);
int64_t at_least_one(const char *words); /* without the largest */

/* In [0, most]; or negative. */
int64_t index_in(const char *name, int64_t most);

/* f32 or bf16; or a type without CPU kernels, or an unknown one. dtype_any takes all four types. */
td_dtype dtype(const char *name);
td_dtype dtype_any(const char *name);

/* A second type: 0, `first`, f32 with a 16-bit first (`wide`), or a 16-bit type with an f32 first; or
 * another. one_of returns the resulting type. */
td_dtype second(const char *name, td_dtype first, bool wide);
td_dtype one_of(td_dtype second, td_dtype first);

/* A value in [0, count); or another value. */
int choice(const char *name, int count);

/* The same for functions that cannot refuse. */
int any_enum(int count);

/* Fails unless a value's name is `want`. NULL: there must be no name, or "unknown ...". */
void check_name(const char *name, const char *want);

/* Any finite f32 number; or NaN or an infinity. `positive`: above 0. */
double number(const char *name);
double positive(const char *name);

/* A struct; or NULL. */
#define pointer(name, address) (wrong() ? (impossible(TD_BAD_ARGUMENT, (name)), NULL) : (address))

/* Memory of `bytes` that ends at an inaccessible page, or NULL: read only, written only, or both. */
const void *in(const char *name, size_t bytes);
void *out(const char *name, size_t bytes);
void *in_out(const char *name, size_t bytes);

/* The same, but NULL is allowed. */
void *out_or_null(size_t bytes);

/* A work area of `bytes`, if `status` is TD_OK; or NULL, or a misaligned one. */
void *work(td_status status, const size_t *bytes);

/* [count] indices in [0, bound); or one of them outside. */
const int64_t *indices(const char *name, int64_t count, int64_t bound);

/* A pitch: 0, the row itself or more. A wrong pitch is below the row, or makes the array larger than
 * 2^63 bytes. */
int64_t pitch(const char *name, int64_t row);

/* The extent, if it is as extent() draws it; else 4. */
int64_t small(int64_t extent);

/* A count in [1, 20], or an invalid one; and as many arbitrary numbers. */
int64_t draw_count(void);
const double *draw_samples(const char *name, int64_t count);

/* A copy of a struct that the call reads, or reads and writes. */
const void *in_copy(const char *name, const void *from, size_t bytes);
void *in_out_copy(const char *name, const void *from, size_t bytes);

/* One of `count` strings; or NULL, "" or another. */
const char *text(const char *name, int count, const char *const *good);

/* The path of a file of the case, which is empty or does not exist; or an invalid path. path_done removes the
 * file and returns `status`. */
const char *path_own(bool there);
const char *path_or_none(const char *path);
td_status path_done(td_status status);

/* The bytes of an array if its extents are small; else 4096. */
size_t bytes_of(td_dtype type, int count, const int64_t *extents);
#define BYTES(type, ...)                                                                                     \
    bytes_of((type), (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),                              \
             (const int64_t[]){__VA_ARGS__})

/* ---- the driver ---- */

/* Draws a function, calls it and judges. */
void api_case(void);

/* Calls each function whose name begins with `prefix`: in four cases without a fault, then in these cases
 * with each fault and each bad value. */
void api_sweep(const char *prefix);

/* Calls the operation on a device without kernels, which must refuse the call and name the operation. */
void api_gap(const char *name);

/* A CMocka teardown: prints the case in which the sweep failed. */
int api_sweep_teardown(void **state);

/* The same for several calls in one case: forgets the notes, and judges the last drawn call. */
void api_begin(void);
void api_judge(const char *name, td_status status);

/* Takes random steps with a model, repeats each successful step with its twin, and checks that both stay
 * equal. */
void api_walk(void);

/* Prints how often each function was called and refused. */
void api_summary(void);
void api_list(void);

#endif
