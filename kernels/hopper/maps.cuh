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

/** The map of a tensor [heads / together, rows, together, columns] of 16-bit elements. If `together` is 1,
 * each head is a matrix. `pitch`: elements between rows; 0: together * columns. A box has `box` rows of a
 * head and as many columns as `swizzle` bytes (128, 64, 32). Coordinates are column, row, head % together,
 * head / together. The address and the rows are multiples of 16 bytes. false: the driver refuses the map, or
 * has none. */
template <typename T>
bool make_map(map_encoder encode, CUtensorMap *map, const void *tensor, int64_t columns, int64_t rows,
              int64_t heads, int64_t together, int box, int swizzle, int64_t pitch = 0)
{
    const CUtensorMapDataType type =
        std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t row = (pitch ? pitch : together * columns) * sizeof(T),
                     extents[] = {(cuuint64_t)columns, (cuuint64_t)rows, (cuuint64_t)together,
                                  (cuuint64_t)(heads / together)},
                     strides[] = {row, columns * sizeof(T), rows * row};
    const cuuint32_t boxes[] = {(cuuint32_t)(swizzle / sizeof(T)), (cuuint32_t)box, 1, 1},
                     steps[] = {1, 1, 1, 1};

    return encode &&
           encode(map, type, 4, const_cast<void *>(tensor), extents, strides, boxes, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE,
                  swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                  : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                  : CU_TENSOR_MAP_SWIZZLE_32B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

} // namespace hopper

#endif
