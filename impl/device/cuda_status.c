#include "base/check.h"
#include "device/cuda.h"

td_status td_cuda_status(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return TD_OK;
    /* Clears CUDA's last error; otherwise the next launch would report it again. */
    (void)cudaGetLastError();
    return td_fail(code == cudaErrorMemoryAllocation ? TD_NO_MEMORY : TD_LIBRARY_ERROR, "%s: %s (%s)", what,
                   cudaGetErrorString(code), cudaGetErrorName(code));
}
