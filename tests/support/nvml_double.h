/** A double of NVML, for one GPU at PCI address 0000:01:00.0: 1755 MHz and 690.5 W. */
#ifndef TD_TESTS_NVML_DOUBLE_H
#define TD_TESTS_NVML_DOUBLE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct td_nvml_double {
    bool there;                 /* the library is on this machine */
    const char *lacks;          /* a function, by its td_nvml_name; NULL: none */
    int calls, fails;           /* which call fails, from 1; 0: none */
    unsigned long long reasons; /* why the clock is low */
} td_nvml_double;

extern td_nvml_double td_nvml;

/** The name of function i, NULL after the last one. */
const char *td_nvml_name(size_t i);

/** dlopen and dlsym: &td_nvml if it is there, and a function of it. */
void *td_nvml_open(void);
void *td_nvml_function(const char *name);

#endif
