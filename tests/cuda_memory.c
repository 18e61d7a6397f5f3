/* Mapped memory of a GPU, tested without a GPU. Doubles of the driver's functions count what exists. */
#include "device/cuda_memory.h"
#include "support/compare.h"
#include "support/test.h"

#include <cuda.h>

enum { PAGE = 2 << 20, GPU = 1 };
static const size_t total = (size_t)1 << 32;

static cudaError_t info_says, synchronize_says;
static const char *missing; /* a function that the driver lacks */
static int lacks;           /* a CUdevice_attribute */
static int fails_in;        /* the nth call from now on that can fail, fails; 0: none */
static CUresult failure;
static int memories, ranges, mappings, accesses, synchronized;
static size_t made; /* bytes of the last memory */

static CUresult end_of(int *count)
{
    if (fails_in > 0 && --fails_in == 0)
        return failure;
    ++*count;
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *out, CUdevice_attribute attribute, CUdevice device)
{
    assert_int_equal(device, GPU);
    *out = (int)attribute != lacks;
    return CUDA_SUCCESS;
}

static CUresult get_granularity(size_t *out, const CUmemAllocationProp *p,
                                CUmemAllocationGranularity_flags kind)
{
    int count = 0;

    assert_int_equal(kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    assert_int_equal(p->location.id, GPU);
    *out = PAGE;
    return end_of(&count);
}

static CUresult create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *p,
                       unsigned long long flags)
{
    assert_int_equal(flags, 0);
    assert_int_equal(bytes % PAGE, 0);
    assert_int_equal(p->requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    made = bytes;
    *out = 7;
    return end_of(&memories);
}

static CUresult release(CUmemGenericAllocationHandle memory)
{
    assert_int_equal(memory, 7);
    memories--;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted,
                        unsigned long long flags)
{
    assert_true(bytes == made && alignment == PAGE && wanted == 0 && flags == 0);
    const CUresult result = end_of(&ranges);
    *out = result == CUDA_SUCCESS ? 64 * (CUdeviceptr)PAGE : 0;
    return result;
}

static CUresult unreserve(CUdeviceptr at, size_t bytes)
{
    assert_true(at == 64 * (CUdeviceptr)PAGE && bytes == made && mappings == 0);
    ranges--;
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle memory,
                    unsigned long long flags)
{
    assert_true(at == 64 * (CUdeviceptr)PAGE && bytes == made && offset == 0 && memory == 7 && flags == 0);
    return end_of(&mappings);
}

static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    assert_true(at == 64 * (CUdeviceptr)PAGE && bytes == made);
    mappings--;
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    assert_true(at == 64 * (CUdeviceptr)PAGE && bytes == made && count == 1);
    assert_int_equal(access->location.id, GPU);
    assert_int_equal(access->flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return end_of(&accesses);
}

static CUresult get_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr at)
{
    *base = at;
    *bytes = made;
    return mappings > 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static CUresult get_name(CUresult code, const char **out)
{
    if (code != CUDA_ERROR_NOT_PERMITTED)
        return CUDA_ERROR_INVALID_VALUE; /* *out stays as it is */
    *out = "CUDA_ERROR_NOT_PERMITTED";
    return CUDA_SUCCESS;
}

/* ---- the runtime ---- */

cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result)
{
    static const struct {
        const char *name;
        void (*function)(void);
    } functions[] = {{"cuDeviceGetAttribute", (void (*)(void))get_attribute},
                     {"cuMemGetAllocationGranularity", (void (*)(void))get_granularity},
                     {"cuMemCreate", (void (*)(void))create},
                     {"cuMemRelease", (void (*)(void))release},
                     {"cuMemAddressReserve", (void (*)(void))reserve},
                     {"cuMemAddressFree", (void (*)(void))unreserve},
                     {"cuMemMap", (void (*)(void))map},
                     {"cuMemUnmap", (void (*)(void))unmap},
                     {"cuMemSetAccess", (void (*)(void))set_access},
                     {"cuMemGetAddressRange", (void (*)(void))get_range},
                     {"cuGetErrorName", (void (*)(void))get_name}};

    assert_int_equal(flags, cudaEnableDefault);
    assert_in_range(version, 1, CUDA_VERSION);
    *result = cudaDriverEntryPointSymbolNotFound;
    *out = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0 && (!missing || strcmp(missing, name) != 0)) {
            memcpy(out, &functions[i].function, sizeof *out);
            *result = cudaDriverEntryPointSuccess;
        }
    return cudaSuccess;
}

cudaError_t __wrap_cudaMemGetInfo(size_t *free_bytes, size_t *all)
{
    *free_bytes = total / 2;
    *all = total;
    return info_says;
}

cudaError_t __wrap_cudaDeviceSynchronize(void)
{
    synchronized++;
    assert_int_equal(mappings, 1);
    return synchronize_says;
}

/* ---- tests ---- */

static int begin(void **state)
{
    (void)state;
    missing = NULL;
    info_says = synchronize_says = cudaSuccess;
    lacks = fails_in = memories = ranges = mappings = accesses = synchronized = 0;
    return 0;
}

TD_TEST(gpus_that_map_are_known)
{
    assert_true(td_cuda_maps(GPU));
    lacks = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    assert_false(td_cuda_maps(GPU));
    lacks = CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    assert_false(td_cuda_maps(GPU));
    lacks = 0;
    missing = "cuMemCreate";
    assert_false(td_cuda_maps(GPU));
}

TD_TEST(a_block_is_whole_pages_and_is_freed_whole)
{
    static const size_t sizes[] = {1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE + 3};

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *block = NULL;

        td_assert_ok(td_cuda_map(GPU, sizes[i], &block));
        assert_int_equal((uintptr_t)block, 64 * (uintptr_t)PAGE);
        assert_int_equal(made, (sizes[i] + PAGE - 1) / PAGE * PAGE);
        assert_true(memories == 0 && ranges == 1 && mappings == 1 && accesses == (int)i + 1);
        td_cuda_unmap(block);
        assert_true(memories == 0 && ranges == 0 && mappings == 0 && synchronized == (int)i + 1);
    }
}

TD_TEST(what_fails_leaves_nothing_behind)
{
    static const CUresult failures[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_PERMITTED,
                                        CUDA_ERROR_UNKNOWN};
    int failed = 0;

    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++)
        for (int nth = 1; nth <= 6; nth++) {
            void *block = NULL;

            failure = failures[i];
            fails_in = nth;
            const td_status status = td_cuda_map(GPU, 3 * PAGE, &block);
            if (nth == 6) { /* five calls can fail */
                td_assert_ok(status);
                fails_in = 0;
                td_cuda_unmap(block);
                continue;
            }
            failed++;
            assert_null(block);
            assert_true(memories == 0 && ranges == 0 && mappings == 0);
            assert_int_equal(status, i == 0 ? TD_NO_MEMORY : TD_LIBRARY_ERROR);
            if (i == 1)
                assert_non_null(strstr(td_last_error(), ": CUDA_ERROR_NOT_PERMITTED"));
            if (i == 2)
                assert_non_null(strstr(td_last_error(), ": an unknown error"));
        }
    assert_int_equal(failed, 15);
}

TD_TEST(a_block_that_may_be_in_use_stays)
{
    void *block = NULL;

    td_assert_ok(td_cuda_map(GPU, PAGE, &block));
    synchronize_says = cudaErrorStreamCaptureUnsupported;
    td_cuda_unmap(block);
    assert_true(ranges == 1 && mappings == 1);
    synchronize_says = cudaSuccess;
    td_cuda_unmap(block);
    assert_true(ranges == 0 && mappings == 0);
}

TD_TEST(more_than_the_gpu_has_is_not_asked_for)
{
    static const size_t sizes[] = {((size_t)1 << 32) + 1, PTRDIFF_MAX, SIZE_MAX};
    void *block = NULL;

    made = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        assert_int_equal(td_cuda_map(GPU, sizes[i], &block), TD_NO_MEMORY);
    info_says = cudaErrorIllegalAddress;
    td_assert_refused(td_cuda_map(GPU, PAGE, &block), TD_LIBRARY_ERROR, "asking for the GPU's memory");
    info_says = cudaSuccess;
    assert_true(!block && made == 0);
    missing = "cuMemMap";
    assert_int_equal(td_cuda_map(GPU, PAGE, &block), TD_LIBRARY_ERROR);
}

int main(void)
{
    return td_run_each("mapped memory, over a double of the driver", begin, NULL, NULL, NULL);
}
