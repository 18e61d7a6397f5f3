#include "device/cuda_memory.h"

#include "base/check.h"

#include <cuda.h>

/* The driver's functions, found at run time without linking the driver. The number is the CUDA version of the
 * function's interface. */
#define EACH_FUNCTION(f)                                                                                     \
    f(cuDeviceGetAttribute, 2000) f(cuMemGetAllocationGranularity, 10020) f(cuMemCreate, 10020)              \
        f(cuMemRelease, 10020) f(cuMemAddressReserve, 10020) f(cuMemAddressFree, 10020) f(cuMemMap, 10020)   \
            f(cuMemUnmap, 10020) f(cuMemSetAccess, 10020) f(cuMemGetAddressRange, 3020)                      \
                f(cuGetErrorName, 6000)

typedef struct driver {
#define DECLARE(name, version) __typeof__(&name) name;
    EACH_FUNCTION(DECLARE)
} driver;

static bool find(const char *name, unsigned version, void **out)
{
    enum cudaDriverEntryPointQueryResult result;

    return cudaGetDriverEntryPointByVersion(name, out, version, cudaEnableDefault, &result) == cudaSuccess &&
           result == cudaDriverEntryPointSuccess;
}

/** Looks up the functions at every call; CUDA caches them. False: the driver lacks one. */
static bool load(driver *out)
{
#define LOAD(name, version)                                                                                  \
    if (!find(#name, version, (void **)&out->name)) {                                                        \
        (void)cudaGetLastError();                                                                            \
        return false;                                                                                        \
    }
    EACH_FUNCTION(LOAD)
    return true;
}

/** Allows GPUDirect RDMA (network cards access the memory) if the GPU supports it, as for cudaMalloc's
 * memory. */
static CUmemAllocationProp properties_of(const driver *cu, int index)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = index}};
    int cards = 0;

    if (cu->cuDeviceGetAttribute(&cards, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                 index) == CUDA_SUCCESS)
        properties.allocFlags.gpuDirectRDMACapable = cards != 0;
    return properties;
}

bool td_cuda_maps(int index)
{
    driver cu;
    int maps = 0, hands = 0;

    return load(&cu) &&
           cu.cuDeviceGetAttribute(&maps, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, index) ==
               CUDA_SUCCESS &&
           cu.cuDeviceGetAttribute(&hands, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                   index) == CUDA_SUCCESS &&
           maps && hands;
}

static td_status fail(const driver *cu, CUresult code, const char *what)
{
    const char *name = NULL;

    if (code == CUDA_ERROR_OUT_OF_MEMORY)
        return TD_NO_MEMORY; /* the caller writes the message */
    (void)cu->cuGetErrorName(code, &name);
    return td_fail(TD_LIBRARY_ERROR, "%s: %s", what, name ? name : "an unknown error");
}

td_status td_cuda_map(int index, size_t bytes, void **out)
{
    CUmemGenericAllocationHandle memory = 0;
    CUdeviceptr at = 0;
    size_t page = 0, whole = 0, free_bytes = 0, all_bytes = 0;
    bool mapped = false;
    driver cu;

    if (!load(&cu))
        return td_fail(TD_LIBRARY_ERROR, "the driver has lost its functions for mapping memory");
    const CUmemAllocationProp properties = properties_of(&cu, index);
    const CUmemAccessDesc access = {.location = properties.location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult code =
        cu.cuMemGetAllocationGranularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (code != CUDA_SUCCESS)
        return fail(&cu, code, "cuMemGetAllocationGranularity");
    /* If a size exceeds the GPU's memory, the driver reports an invalid value, not missing memory: compare
     * sizes first. */
    const cudaError_t asked = cudaMemGetInfo(&free_bytes, &all_bytes);
    if (asked != cudaSuccess)
        return td_cuda_status(asked, "asking for the GPU's memory");
    if (bytes > all_bytes)
        return TD_NO_MEMORY;
    whole = (bytes + page - 1) / page * page;
    code = cu.cuMemCreate(&memory, whole, &properties, 0);
    if (code != CUDA_SUCCESS)
        return fail(&cu, code, "cuMemCreate");
    code = cu.cuMemAddressReserve(&at, whole, page, 0, 0);
    if (code == CUDA_SUCCESS)
        code = cu.cuMemMap(at, whole, 0, memory, 0);
    mapped = code == CUDA_SUCCESS;
    if (mapped)
        code = cu.cuMemSetAccess(at, whole, &access, 1);
    (void)cu.cuMemRelease(memory); /* the memory stays until it is unmapped */
    if (code != CUDA_SUCCESS) {
        if (mapped)
            (void)cu.cuMemUnmap(at, whole);
        if (at)
            (void)cu.cuMemAddressFree(at, whole);
        return fail(&cu, code, "mapping memory");
    }
    *out = (void *)(uintptr_t)at;
    return TD_OK;
}

void td_cuda_unmap(void *block)
{
    CUdeviceptr at = 0;
    size_t whole = 0;
    driver cu;

    /* During a capture waiting fails, as cudaFree does. Then the block stays allocated, for it may be in
     * use. */
    if (cudaDeviceSynchronize() != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    if (!load(&cu) || cu.cuMemGetAddressRange(&at, &whole, (CUdeviceptr)(uintptr_t)block) != CUDA_SUCCESS)
        return;
    (void)cu.cuMemUnmap(at, whole);
    (void)cu.cuMemAddressFree(at, whole);
}
