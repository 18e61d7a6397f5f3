/** What every test includes: CMocka, the headers that it needs before it, and the usual ones of C. */
#ifndef TD_TESTS_TEST_H
#define TD_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#endif
