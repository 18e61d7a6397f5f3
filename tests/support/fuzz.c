#include "support/fuzz.h"

#include "base/clock.h"

#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t first_seed, seed, state;
static int64_t cases, until_ns;
static char description[1024], rerun[256];
static bool running;

static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
enum { FATAL = sizeof fatal / sizeof fatal[0] };
static struct sigaction before[FATAL];

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t next_of(uint64_t *at)
{
    uint64_t z = *at += 0x9E3779B97F4A7C15u;

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void write_text(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

/* After this handler returns, the signal is raised again with the earlier handler, so a sanitizer can
 * report. */
static void on_fatal(int number)
{
    write_text(rerun);
    write_text(description);
    write_text("\n");
    for (int i = 0; i < FATAL; i++)
        sigaction(fatal[i], &before[i], NULL);
    if (number == SIGABRT)
        raise(number);
}

void td_fuzz_begin(int argc, char **argv)
{
    const char *given = getenv("TANDEM_FUZZ_SEED"), *seconds = getenv("TANDEM_FUZZ_SECONDS");
    const double limit = seconds ? strtod(seconds, NULL) : argc > 1 ? strtod(argv[1], NULL) : 0;

    first_seed = given ? strtoull(given, NULL, 0) : 1;
    cases = 0;
    until_ns = td_clock_ns() + (int64_t)(limit * 1e9);
    running = false;
    printf("    seed %" PRIu64 ", %g s\n", first_seed, limit);
    fflush(stdout);
}

bool td_fuzz_next(void)
{
    running = cases == 0 || td_clock_ns() < until_ns;
    if (!running)
        return false;
    if (cases == 0) { /* set here, because CMocka sets its handlers around each test */
        struct sigaction action = {.sa_handler = on_fatal};

        for (int i = 0; i < FATAL; i++)
            sigaction(fatal[i], &action, &before[i]);
    }
    state = first_seed;
    state = next_of(&state) + (uint64_t)cases; /* mixed, so that runs with neighbouring seeds share no case */
    seed = cases++ == 0 ? first_seed : next_of(&state);
    state = seed;
    snprintf(rerun, sizeof rerun,
             "case %" PRId64 ", which TANDEM_FUZZ_SEED=%" PRIu64 " TANDEM_FUZZ_SECONDS=0 runs alone:\n  ",
             cases, seed);
    td_fuzz_describe("(not drawn yet)");
    return true;
}

int64_t td_fuzz_cases(void)
{
    return cases;
}

void td_fuzz_describe(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(description, sizeof description, format, args);
    va_end(args);
}

const char *td_fuzz_description(void)
{
    return description;
}

int td_fuzz_teardown(void **unused)
{
    (void)unused;
    if (running) {
        write_text(rerun);
        write_text(description);
        write_text("\n");
    }
    running = false;
    return 0;
}

void td_fuzz_seed(uint64_t given)
{
    state = given;
}

uint64_t td_fuzz_bits(void)
{
    return next_of(&state);
}

int64_t td_fuzz_below(int64_t bound)
{
    return (int64_t)(td_fuzz_bits() % (uint64_t)bound);
}

bool td_fuzz_chance(int percent)
{
    return td_fuzz_below(100) < percent;
}

double td_fuzz_uniform(double low, double high)
{
    return low + (high - low) * (double)(td_fuzz_bits() >> 11) * 0x1p-53;
}
