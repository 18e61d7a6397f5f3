#include "support/nvml_double.h"
#include "support/test.h"

td_nvml_double td_nvml;

static int nvml_says(void)
{
    return ++td_nvml.calls == td_nvml.fails ? 999 : 0;
}

static int nvml_init(void)
{
    return nvml_says();
}

static int nvml_shutdown(void)
{
    return 0;
}

static int nvml_handle(const char *pci, void **out)
{
    assert_string_equal(pci, "0000:01:00.0");
    *out = &td_nvml;
    return nvml_says();
}

static int nvml_clock(void *handle, int which, unsigned *mhz)
{
    assert_ptr_equal(handle, &td_nvml);
    assert_int_equal(which, 1);
    *mhz = 1755;
    return nvml_says();
}

static int nvml_power(void *handle, unsigned *milliwatts)
{
    assert_ptr_equal(handle, &td_nvml);
    *milliwatts = 690500;
    return nvml_says();
}

static int nvml_why(void *handle, unsigned long long *bits)
{
    assert_ptr_equal(handle, &td_nvml);
    *bits = td_nvml.reasons;
    return nvml_says();
}

static const struct {
    const char *name;
    void (*function)(void);
} functions[] = {{"nvmlInit_v2", (void (*)(void))nvml_init},
                 {"nvmlShutdown", (void (*)(void))nvml_shutdown},
                 {"nvmlDeviceGetHandleByPciBusId_v2", (void (*)(void))nvml_handle},
                 {"nvmlDeviceGetClockInfo", (void (*)(void))nvml_clock},
                 {"nvmlDeviceGetPowerUsage", (void (*)(void))nvml_power},
                 {"nvmlDeviceGetCurrentClocksThrottleReasons", (void (*)(void))nvml_why}};

enum { FUNCTIONS = sizeof functions / sizeof *functions };

const char *td_nvml_name(size_t i)
{
    return i < FUNCTIONS ? functions[i].name : NULL;
}

void *td_nvml_open(void)
{
    return td_nvml.there ? &td_nvml : NULL;
}

void *td_nvml_function(const char *name)
{
    void *address = NULL;

    for (size_t i = 0; i < FUNCTIONS; i++)
        if (strcmp(functions[i].name, name) == 0 && functions[i].name != td_nvml.lacks)
            memcpy(&address, &functions[i].function, sizeof address);
    return address;
}
