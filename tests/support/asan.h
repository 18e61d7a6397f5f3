/** AddressSanitizer's functions, and TD_ASAN, which is defined if the tests are built with it. Otherwise the
 * two macros do nothing: clang's header comes with its sanitizers, which a plain build may lack. */
#ifndef TD_TESTS_SUPPORT_ASAN_H
#define TD_TESTS_SUPPORT_ASAN_H

#ifdef __SANITIZE_ADDRESS__ /* gcc's macro */
#define TD_ASAN
#elif defined __has_feature /* clang's */
#if __has_feature(address_sanitizer)
#define TD_ASAN
#endif
#endif

#ifdef TD_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, bytes)   ((void)(start), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes) ((void)(start), (void)(bytes))
#endif

#endif
