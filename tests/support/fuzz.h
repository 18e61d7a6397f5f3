/** Random tests: cases drawn from seeds until the time is over.
 *
 * A case's own seed draws all of it. A failure prints that seed: as TANDEM_FUZZ_SEED of another run it draws
 * the same case first, and TANDEM_FUZZ_SECONDS=0 ends that run behind it. */
#ifndef TD_TESTS_FUZZ_H
#define TD_TESTS_FUZZ_H

#include <stdbool.h>
#include <stdint.h>

/** Begins: the first case's seed is TANDEM_FUZZ_SEED of the environment, 1 without it, and cases are drawn
 * for TANDEM_FUZZ_SECONDS or else for the seconds that the program's first argument says. */
void td_fuzz_begin(int argc, char **argv);

/** Begins the next case; false when the time is over, but never before the first one. From the first case on
 * a signal that ends the program prints the case too. */
bool td_fuzz_next(void);

/** How many cases were begun. */
int64_t td_fuzz_cases(void);

/** Says what the running case is, for a failure. */
void td_fuzz_describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *td_fuzz_description(void);

/** A CMocka teardown: where the test ended inside a case it prints the case and how to run it alone. */
int td_fuzz_teardown(void **state);

/** Begins again with the draws of this seed. */
void td_fuzz_seed(uint64_t seed);

/* Draws of the running case. */
uint64_t td_fuzz_bits(void);
int64_t td_fuzz_below(int64_t bound); /* in [0, bound) */
bool td_fuzz_chance(int percent);
double td_fuzz_uniform(double low, double high);
#define TD_FUZZ_PICK(array) ((array)[td_fuzz_below(sizeof(array) / sizeof *(array))])

#endif
