/** Tensor maps for the copy engine, made on the host (CUDA driver API: cuTensorMapEncodeTiled). The driver's
 * function is found at run time, so nothing links libcuda. */
#ifndef TD_KERNELS_HOPPER_MAPS_CUH
#define TD_KERNELS_HOPPER_MAPS_CUH

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace hopper
{

using map_encoder = PFN_cuTensorMapEncodeTiled_v12000;

/** nullptr: this driver has no tensor maps. */
inline map_encoder find_map_encoder()
{
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;

    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<map_encoder>(found) : nullptr;
}

/** The swizzle whose period is `bytes` of a box's row. */
constexpr CUtensorMapSwizzle swizzle_of(int bytes)
{
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

/** The map of a tensor of `RANK` extents, the innermost first, with strides[i] elements from one index of
 * extent i + 1 to the next. `swizzle`: 128, 64, 32 or 0 bytes; a row of the box is at most as long. The
 * address and all strides are multiples of 16 bytes. false: the driver refuses the map. */
template <typename T, int RANK>
bool make_map(map_encoder encode, CUtensorMap *map, const void *tensor, const int64_t (&extents)[RANK],
              const int64_t (&strides)[RANK - 1], const int (&box)[RANK], int swizzle)
{
    const CUtensorMapDataType type = std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cuuint64_t counts[RANK], pitches[RANK];
    cuuint32_t boxes[RANK], steps[RANK];

    for (int i = 0; i < RANK; i++) {
        counts[i] = (cuuint64_t)extents[i];
        boxes[i] = (cuuint32_t)box[i];
        steps[i] = 1;
        if (i + 1 < RANK)
            pitches[i] = (cuuint64_t)strides[i] * sizeof(T);
    }
    return encode(map, type, RANK, const_cast<void *>(tensor), counts, pitches, boxes, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

} // namespace hopper

#endif
