/** How flash attention brings its tiles into shared memory. */
#ifndef TD_KERNELS_FLASH_FETCH_CUH
#define TD_KERNELS_FLASH_FETCH_CUH

#include "kernels/tile/operand.cuh"

namespace flash
{

/** Starts to copy a tile of ROWS x D, whose rows lie `pitch` elements apart. Rows from `rows` on and
 * columns from `columns` on become 0. With `vectors` every row starts at a multiple of 16 bytes. Otherwise
 * elements are copied one by one, and are visible after the next barrier. */
template <typename T, int ROWS, int D, int THREADS, typename Pitch>
__device__ inline void fetch(uint32_t dst, const T *src, Pitch pitch, int rows, int columns, bool vectors)
{
    constexpr int PER = 16 / (int)sizeof(T), CHUNKS = D / PER;

    if (vectors && THREADS % CHUNKS == 0) { /* a thread keeps its columns */
        constexpr int AT_ONCE = THREADS >= CHUNKS ? THREADS / CHUNKS : 1;
        static_assert(THREADS % CHUNKS || ROWS % AT_ONCE == 0, "every thread copies as many rows");
        const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const int within = chunk * PER < columns ? rows : 0;
        const T *from = src + first * pitch + chunk * PER;
        dst += first * tile::PITCH<T, D> + 16 * chunk;
#pragma unroll
        for (int row = 0; row < ROWS; row += AT_ONCE) {
            tile::copy16(dst + row * tile::PITCH<T, D>, from, first + row < within);
            from += AT_ONCE * pitch;
        }
    } else if (vectors) {
#pragma unroll
        for (int start = 0; start < ROWS * CHUNKS; start += THREADS) {
            const int i = start + threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
            if (ROWS * CHUNKS % THREADS == 0 || i < ROWS * CHUNKS) {
                const bool wanted = row < rows && chunk * PER < columns;
                tile::copy16(dst + row * tile::PITCH<T, D> + 16 * chunk,
                             wanted ? src + row * pitch + chunk * PER : src, wanted);
            }
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
            const int row = i / D, column = i % D;
            const bool wanted = row < rows && column < columns;
            const uint32_t address = dst + row * tile::PITCH<T, D> + column * (int)sizeof(T);
            if constexpr (sizeof(T) == 4) {
                const float x = wanted ? src[row * pitch + column] : 0.0f;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
            } else {
                const uint16_t *const bits = reinterpret_cast<const uint16_t *>(src);
                const uint16_t x = wanted ? bits[row * pitch + column] : (uint16_t)0;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
            }
        }
    }
}

} // namespace flash

#endif
