/** What every public header needs: exported symbols, C linkage, the fixed-width types.
 *
 * With TD_CFFI defined, the preprocessor turns a public header of tandem into plain declarations, which cffi
 * can parse. Only this header includes system headers, and it skips them if TD_CFFI is defined. */
#ifndef TD_BASE_BASE_H
#define TD_BASE_BASE_H

#ifdef TD_CFFI
#define TD_API
#define TD_BEGIN_DECLS
#define TD_END_DECLS
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_API __attribute__((visibility("default")))
#ifdef __cplusplus
#define TD_BEGIN_DECLS extern "C" {
#define TD_END_DECLS   }
#else
#define TD_BEGIN_DECLS
#define TD_END_DECLS
#endif
#endif

#endif
