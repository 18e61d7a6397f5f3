/* Names of backends and types, and small calculations. */
#include "base/check.h"
#include "base/dtype.h"
#include "base/names.h"
#include "comm/backend.h"

_Static_assert((int)TD_COMM_F64 == TD_F64 && (int)TD_COMM_F32 == TD_F32 && (int)TD_COMM_F16 == TD_F16 &&
                   (int)TD_COMM_BF16 == TD_BF16,
               "the floating-point types of collectives have td_dtype's numbers");

enum { BACKENDS = 3, TYPES = 5 };

static const struct {
    const char *name, *library, *option;
    bool there;
} backends[BACKENDS] = {
#ifdef TANDEM_HAVE_MPI
    [TD_COMM_MPI] = {"mpi", "MPI", "TANDEM_MPI", true},
#else
    [TD_COMM_MPI] = {"mpi", "MPI", "TANDEM_MPI", false},
#endif
#ifdef TANDEM_HAVE_GLOO
    [TD_COMM_GLOO] = {"gloo", "Gloo", "TANDEM_GLOO", true},
#else
    [TD_COMM_GLOO] = {"gloo", "Gloo", "TANDEM_GLOO", false},
#endif
#ifdef TANDEM_HAVE_NCCL
    [TD_COMM_NCCL] = {"nccl", "NCCL", "TANDEM_CUDA and TANDEM_NCCL", true},
#else
    [TD_COMM_NCCL] = {"nccl", "NCCL", "TANDEM_CUDA and TANDEM_NCCL", false},
#endif
};

static const struct {
    const char *name;
    size_t size;
} types[TYPES] = {{"f64", 8}, {"f32", 4}, {"f16", 2}, {"bf16", 2}, {"i64", 8}};

const char *td_comm_backend_name(td_comm_backend backend)
{
    return (unsigned)backend < BACKENDS ? backends[backend].name : NULL;
}

td_status td_comm_backend_parse(const char *name, td_comm_backend *out)
{
    return td_names_find("backend", &backends[0].name, sizeof *backends, BACKENDS, name, (int *)out);
}

td_status td_comm_backend_check(td_comm_backend backend)
{
    td_status status = TD_OK;

    TD_CHECK((unsigned)backend < BACKENDS, "backend is %d, needs to be a td_comm_backend", (int)backend);
    if (!backends[backend].there)
        status = td_fail(TD_UNSUPPORTED, "backend %s: this build of tandem has no %s (%s=ON)",
                         backends[backend].name, backends[backend].library, backends[backend].option);
cleanup:
    return status;
}

const char *td_comm_type_name(td_comm_type type)
{
    return (unsigned)type < TYPES ? types[type].name : NULL;
}

size_t td_comm_type_size(td_comm_type type)
{
    return (unsigned)type < TYPES ? types[type].size : 0;
}

int td_comm_power(int ranks)
{
    int power = 1;

    while (power < ranks)
        power *= 2;
    return power;
}

int64_t td_comm_ns(double seconds)
{
    return (int64_t)(seconds * 1e9);
}
