/** Matrix multiplication of a warp on tensor cores, for sm_80 and later: mma.sync, ldmatrix, cp.async (PTX
 * ISA).
 *
 * The element type T is __nv_bfloat16, __half or float. float means TF32: operands are stored in f32 and
 * rounded to 10 bits of fraction before the multiplication. A step of the contraction is 32 bytes of a row
 * for each T. So if the contraction index is contiguous, a fragment has the same bytes of a row for each T.
 *
 * Fragments, with g = lane / 4 and t = lane % 4: c[0] to c[3] of an accumulator of a 16 x 8 block are the
 * elements (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1). */
#ifndef TD_KERNELS_TILE_MMA_CUH
#define TD_KERNELS_TILE_MMA_CUH

#include "kernels/tile/shared.cuh"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace tile
{

/** Elements of one step of the contraction: 16; for TF32 8. */
template <typename T> constexpr int STEP = 32 / (int)sizeof(T);

/* ---- asynchronous copies ---- */

/** Copies 16 bytes to shared memory. If not `wanted`, writes 16 zero bytes and does not read src. */
__device__ inline void copy16(uint32_t dst, const void *src, bool wanted)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(wanted ? 16 : 0)
                 : "memory");
}

__device__ inline void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/** Waits until all groups of copies are complete except the latest PENDING. */
template <int PENDING> __device__ inline void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* ---- shared memory to registers ---- */

__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline uint32_t load_word(uint32_t address)
{
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ inline float2 load_pair(uint32_t address)
{
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}

/* ---- conversions ---- */

/** x rounded to TF32, ties away from zero, as the bits of an f32. */
__device__ inline uint32_t to_tf32(float x)
{
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

/** Two values of type T in one word, `low` in the lower half. */
template <typename T> __device__ inline uint32_t pack(float low, float high)
{
    uint32_t word;
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <typename T> __device__ inline void round_operand(uint32_t (&x)[4])
{
    if constexpr (std::is_same_v<T, float>)
        for (int i = 0; i < 4; i++)
            x[i] = to_tf32(__uint_as_float(x[i]));
}

/** 2^x with an error of at most two units in the last place. A result below 2^-126 becomes 0. */
__device__ inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- multiplication ---- */

/** c += a b for a 16 x STEP, b STEP x 8. */
template <typename T>
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (std::is_same_v<T, float>)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace tile

#endif
