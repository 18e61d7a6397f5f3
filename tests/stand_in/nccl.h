/** The part of NCCL's header that impl/comm/cuda.c needs, for doubles of the functions:
 * tests/comm_stand_in.c. */
#ifndef TD_TESTS_NCCL_H
#define TD_TESTS_NCCL_H

#include "cuda_runtime_api.h"

#include <limits.h>
#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct {
    int blocking, minCTAs, maxCTAs;
} ncclConfig_t;
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_INITIALIZER                                                                              \
    {                                                                                                        \
        .blocking = 1, .minCTAs = NCCL_CONFIG_UNDEF_INT, .maxCTAs = NCCL_CONFIG_UNDEF_INT                    \
    }
typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError,
    ncclInvalidArgument = 4,
    ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclSum = 0, ncclMax = 2, ncclAvg = 4 } ncclRedOp_t;
typedef enum { ncclScalarHostImmediate = 1 } ncclScalarResidence_t;
typedef enum {
    ncclInt64 = 4,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9
} ncclDataType_t;

ncclResult_t ncclGetVersion(int *out);
ncclResult_t ncclGetUniqueId(ncclUniqueId *out);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out);
ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *factor, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *block, size_t bytes, void **window, int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, void *window);

#endif
