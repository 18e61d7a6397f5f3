/** A library that looks like libtandem and fails on demand, for the tests of parity/core. */
#ifndef TD_FAKE_H
#define TD_FAKE_H

#ifdef TD_CFFI
#define TD_BEGIN_DECLS
#define TD_END_DECLS
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define TD_BEGIN_DECLS
#define TD_END_DECLS
#endif

TD_BEGIN_DECLS

typedef enum td_status { TD_OK = 0, TD_BAD_ARGUMENT, TD_NO_MEMORY, TD_UNSUPPORTED } td_status;
typedef enum td_dtype { TD_F64 = 0, TD_F32, TD_F16, TD_BF16 } td_dtype;

const char *td_status_name(td_status status);
const char *td_last_error(void);

typedef struct td_build_module {
    const char *name, *cpu, *cuda;
} td_build_module;

typedef struct td_build {
    const char *version, *commit;
    bool dirty;
    const char *id, *compiler;
    const td_build_module *modules;
    int32_t module_count;
} td_build;

const td_build *td_build_info(void);  /* FAKE_ID: the id of a changed source of the module scale */
const char *td_build_interface(void); /* FAKE_INTERFACE; FAKE_UNNAMED: the function is missing */

typedef struct td_device td_device;

typedef struct td_memory_stats {
    size_t current_bytes, peak_bytes;
    int64_t live_blocks, allocations;
} td_memory_stats;

td_status td_device_open(const char *name, td_device **out);
void td_device_close(td_device *dev);
td_status td_device_alloc(td_device *dev, size_t bytes, void **out);
td_status td_device_free(td_device *dev, void *block);
td_status td_device_memory(const td_device *dev, td_memory_stats *out);

typedef struct td_stream td_stream;
td_status td_stream_wrap(td_device *dev, void *native, td_stream **out);
void td_stream_destroy(td_stream *stream);
td_status td_device_set_stream(td_device *dev, td_stream *stream);
int64_t td_fake_stream(td_device *dev); /* the native stream that has been set; 0: none */

int td_cpu_threads(void);
td_status td_cpu_set_threads(int threads);

typedef enum td_fake_order { TD_FAKE_COURSE2025 = 0, TD_FAKE_TORCH = 7 } td_fake_order;

typedef enum td_fake_precision {
    TD_FAKE_F32 = 0,
    TD_FAKE_TF32,
    TD_FAKE_F16,
    TD_FAKE_BF16,
    TD_FAKE_BF16_MIXED
} td_fake_precision;

typedef struct td_fake_size {
    int64_t layers, heads;
} td_fake_size;

typedef struct td_fake_shape {
    int64_t count;
    td_dtype dtype;
    td_fake_order order;
    float factor; /* 0 means 0.5 */
    td_fake_precision precision;
    bool causal, tf32;
    const char *attention;
    td_fake_size size;
} td_fake_shape;

/** y = factor * x, [count], f32. */
td_status td_fake_scale(td_device *dev, const td_fake_shape *shape, const float *x, float *y);

/** Writes the fields of the shape as text: "count dtype order factor causal attention layers heads". */
td_status td_fake_describe(const td_fake_shape *shape, char *text, size_t bytes);

typedef struct td_fake td_fake;

td_status td_fake_create(td_device *dev, td_fake **out);
void td_fake_destroy(td_fake *fake);
int td_fake_live(void); /* number of objects that have not been destroyed */

/** Calls the function once for each number below `count`. Returns the first status that is not TD_OK. */
typedef td_status (*td_fake_ready)(void *user, int64_t number);
td_status td_fake_each(int64_t count, td_fake_ready ready, void *user);

/** Returns `status` with a message. If `crash` is set, writes to address 0. */
td_status td_fake_fail(td_status status, bool crash);

TD_END_DECLS

#endif
