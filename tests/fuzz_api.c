/* Calls every public function with random and extreme arguments. support/fuzz_api_kit.h states what each call
 * must do, support/fuzz.h how to run one case again. With --list the program prints the functions that it
 * covers. fuzz_api_covers.py compares them with the headers. */
#include "support/fuzz_api_kit.h"

#include "ops/list.h"

static int arguments;
static char **argument;

TD_BODY(each_fault_is_refused_by_its_name)
{
    td_assert_ok(td_cpu_set_threads(2));
    api_sweep(arguments > 2 ? argument[2] : "");
    api_summary();
}

#ifndef TANDEM_HAVE_CUDA /* a build with CUDA has all kernels */
TD_BODY(a_device_without_kernels_refuses_each_operation)
{
#define GAP(op, ...) api_gap("td_" #op);
    TD_EACH_OP(GAP, GAP)
    TD_EACH_WORK(GAP)
}
#endif

TD_BODY(every_function_refuses_what_is_impossible_and_changes_nothing)
{
    td_assert_ok(td_cpu_set_threads(2));
    td_fuzz_begin(arguments, argument);
    while (td_fuzz_next())
        if (td_fuzz_chance(1))
            api_walk();
        else
            api_case();
    api_summary();
}

/* AddressSanitizer calls this function for its options. An allocation that is too large for any memory must
 * be refused, as in other builds, and not reported. */
TD_API const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(each_fault_is_refused_by_its_name, api_sweep_teardown),
#ifndef TANDEM_HAVE_CUDA
        cmocka_unit_test_teardown(a_device_without_kernels_refuses_each_operation, api_sweep_teardown),
#endif
        cmocka_unit_test_teardown(every_function_refuses_what_is_impossible_and_changes_nothing,
                                  td_fuzz_teardown),
    };

    if (argc > 1 && strcmp(argv[1], "--list") == 0) {
        api_list();
        return 0;
    }
    arguments = argc;
    argument = argv;
    return cmocka_run_group_tests_name("fuzz_api", tests, NULL, NULL);
}
