/** What every public header needs: exported symbols, C linkage, the fixed-width types.
 *
 * Preprocessed with TD_CFFI defined, a public header of tandem is plain declarations, and cffi reads it as it
 * stands: the system includes are hidden here and nowhere else. */
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
