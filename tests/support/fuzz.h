/** Random tests: cases are drawn from seeds until the time is over. A case is drawn only from its seed. A
 * failure prints that seed: a run with it as TANDEM_FUZZ_SEED draws the same case first, and
 * TANDEM_FUZZ_SECONDS=0 ends that run after the case. */
#ifndef TD_TESTS_FUZZ_H
#define TD_TESTS_FUZZ_H

#include <stdbool.h>
#include <stdint.h>

/** Begins. The first case's seed is TANDEM_FUZZ_SEED, or 1. Cases are drawn for TANDEM_FUZZ_SECONDS, or for
 * the seconds in the program's first argument. */
void td_fuzz_begin(int argc, char **argv);

/** Begins the next case; false when the time is over, but at least one case runs. From the first case on, a
 * signal that ends the program also prints the case. */
bool td_fuzz_next(void);

/** The number of cases that have begun. */
int64_t td_fuzz_cases(void);

/** Describes the running case, for the message of a failure. */
void td_fuzz_describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *td_fuzz_description(void);

/** A CMocka teardown: if the test ended inside a case, prints the case and how to run it alone. */
int td_fuzz_teardown(void **state);

/** Restarts the draws with this seed. */
void td_fuzz_seed(uint64_t seed);

/* Draws of the running case. */
uint64_t td_fuzz_bits(void);
int64_t td_fuzz_below(int64_t bound); /* in [0, bound) */
bool td_fuzz_chance(int percent);
double td_fuzz_uniform(double low, double high);
#define TD_FUZZ_PICK(array) ((array)[td_fuzz_below(sizeof(array) / sizeof *(array))])

#endif
