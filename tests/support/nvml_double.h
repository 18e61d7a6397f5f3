/** A double of NVML, for one GPU at PCI address 0000:01:00.0: 1755 MHz and 690.5 W. */
#ifndef TD_TESTS_NVML_DOUBLE_H
#define TD_TESTS_NVML_DOUBLE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct td_nvml_double {
    bool there;                 /* the library is on this machine */
    const char *lacks;          /* name of a missing function (td_nvml_name); NULL: none */
    int calls, fails;           /* fails: the call that fails, from 1; 0: none */
    unsigned long long reasons; /* reasons for a low clock */
} td_nvml_double;

extern td_nvml_double td_nvml;

/** The name of function i; NULL after the last one. */
const char *td_nvml_name(size_t i);

/** The doubles of dlopen and dlsym: &td_nvml if the library is there, and one of its functions. */
void *td_nvml_open(void);
void *td_nvml_function(const char *name);

#endif
