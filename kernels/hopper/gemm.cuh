/** GEMMs of a warpgroup on Hopper, sm_90a only (PTX ISA: wgmma, stmatrix).
 *
 * A panel is the box that the copy engine writes with a swizzle of W = 128, 64 or 32 bytes: rows of W bytes,
 * one directly after the other, on a 1024-byte boundary. A tile with wider rows has several panels, each with
 * all rows. The same bytes serve as both kinds of operand:
 *
 *   rows      the contraction runs along a row (K-major, trans 0). The next 16 elements are 32 bytes later
 *             in the panel. Q, K, V and dO are operands of Q K^T and dO V^T in this way
 *   columns   the contraction runs over the rows (MN-major, trans 1). The next step is 16 rows later. V is
 *             an operand of P V in this way
 *
 * gemm() only starts a wgmma. The order in a kernel: gemm_begin, gemm..., gemm_commit, gemm_wait<N>, pin.
 * Before gemm_wait has retired the group, no code may touch its accumulators, its A registers or its shared
 * memory. */
#ifndef TD_KERNELS_HOPPER_GEMM_CUH
#define TD_KERNELS_HOPPER_GEMM_CUH

#include "kernels/tile/shared.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hopper
{

using tile::shared_address;

/* ---- descriptors of operands in shared memory (PTX ISA: matrix-descriptor format) ---- */

template <int W> constexpr uint64_t SWIZZLE_BITS = (uint64_t)(W == 128 ? 1 : W == 64 ? 2 : 3) << 62;

/** Operand `rows`: panels of W bytes. */
template <int W = 128> __device__ inline uint64_t rows_operand(uint32_t address)
{
    return SWIZZLE_BITS<W> | (uint64_t)(8 * W >> 4) << 32 | (uint64_t)1 << 16 | (address & 0x3FFFF) >> 4;
}

/** Operand `columns`: panels of W bytes, panel_bytes from one to the next. panel_bytes matters only if the
 * operand has more columns than a panel. */
template <int W = 128> __device__ inline uint64_t columns_operand(uint32_t address, uint32_t panel_bytes)
{
    return SWIZZLE_BITS<W> | (uint64_t)(8 * W >> 4) << 32 | (uint64_t)(panel_bytes >> 4) << 16 |
           (address & 0x3FFFF) >> 4;
}

/** The operand `bytes` later in shared memory. */
__device__ inline uint64_t further(uint64_t operand, uint32_t bytes)
{
    return operand + (bytes >> 4);
}

/** Bytes from one 16-element step of the contraction to the next. ROWS is the number of rows of a panel. */
template <int W, int ROWS> __host__ __device__ constexpr uint32_t rows_step(int step)
{
    return (uint32_t)(step / (W / 32) * ROWS * W + step % (W / 32) * 32);
}
template <int W> __host__ __device__ constexpr uint32_t columns_step(int step)
{
    return (uint32_t)(step * 16 * W);
}

/* ---- order ---- */

/** Called before the first gemm, and after other code has touched accumulators or A registers. */
__device__ inline void gemm_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/** Ends a group. Groups retire in order. */
__device__ inline void gemm_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/** Waits until at most PENDING of the latest groups are under way. */
template <int PENDING> __device__ inline void gemm_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/** Keeps the compiler from moving reads and writes of these registers across this place: gemm_wait does not
 * name the accumulators. */
template <int N> __device__ inline void pin(float (&registers)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N> __device__ inline void pin(uint32_t (&registers)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(registers[i])::"memory");
}

/* ---- the GEMM: c (64 x N, f32) = or += A (64 x 16) B (16 x N). T is bf16 or f16 ----
 *
 * Of accumulators and A registers, lane l of warp w of the warpgroup has rows g = 16 w + l / 4 and g + 8:
 *   c[4 j + i]  = (g, 8 j + t + i), c[4 j + 2 + i] = (g + 8, 8 j + t + i)   with t = 2 (l % 4), i = 0, 1
 *   a[0] = (g, t..t + 1), a[1] = (g + 8, t..), a[2] = (g, 8 + t..), a[3] = (g + 8, 8 + t..)
 * So 16 columns of accumulators, rounded to T in pairs, are the A of the next GEMM: a[i] is the pair
 * c[8 step + 2 i], c[8 step + 2 i + 1]. */

#define TD_C_8(i)                                                                                            \
    "+f"(c[(i)]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3]), "+f"(c[(i) + 4]), "+f"(c[(i) + 5]),  \
        "+f"(c[(i) + 6]), "+f"(c[(i) + 7])
#define TD_C_OF_16      TD_C_8(0)
#define TD_C_OF_32      TD_C_OF_16, TD_C_8(8)
#define TD_C_OF_48      TD_C_OF_32, TD_C_8(16)
#define TD_C_OF_64      TD_C_OF_48, TD_C_8(24)
#define TD_C_OF_80      TD_C_OF_64, TD_C_8(32)
#define TD_C_OF_96      TD_C_OF_80, TD_C_8(40)
#define TD_C_OF_112     TD_C_OF_96, TD_C_8(48)
#define TD_C_OF_128     TD_C_OF_112, TD_C_8(56)
#define TD_C_OF_144     TD_C_OF_128, TD_C_8(64)
#define TD_C_OF_160     TD_C_OF_144, TD_C_8(72)
#define TD_C_OF_176     TD_C_OF_160, TD_C_8(80)
#define TD_C_OF_192     TD_C_OF_176, TD_C_8(88)
#define TD_C_OF_208     TD_C_OF_192, TD_C_8(96)
#define TD_C_OF_224     TD_C_OF_208, TD_C_8(104)
#define TD_C_OF_240     TD_C_OF_224, TD_C_8(112)
#define TD_C_OF_256     TD_C_OF_240, TD_C_8(120)
#define TD_NAMES_OF_16  "%0, %1, %2, %3, %4, %5, %6, %7"
#define TD_NAMES_OF_32  TD_NAMES_OF_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TD_NAMES_OF_48  TD_NAMES_OF_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TD_NAMES_OF_64  TD_NAMES_OF_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TD_NAMES_OF_80  TD_NAMES_OF_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TD_NAMES_OF_96  TD_NAMES_OF_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TD_NAMES_OF_112 TD_NAMES_OF_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TD_NAMES_OF_128 TD_NAMES_OF_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TD_NAMES_OF_144 TD_NAMES_OF_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TD_NAMES_OF_160 TD_NAMES_OF_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TD_NAMES_OF_176 TD_NAMES_OF_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TD_NAMES_OF_192 TD_NAMES_OF_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TD_NAMES_OF_208 TD_NAMES_OF_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TD_NAMES_OF_224 TD_NAMES_OF_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TD_NAMES_OF_240 TD_NAMES_OF_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TD_NAMES_OF_256 TD_NAMES_OF_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

/* The operands after the accumulators have the numbers N / 2 and so on: i0 to i6. */
#define TD_SHARED_GEMM(n, type, i0, i1, i2, i3, i4)                                                          \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i2 ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TD_NAMES_OF_##n        \
                 "}, %" i0 ", %" i1 ", add, 1, 1, %" i3 ", %" i4 ";\n}"                                      \
                 : TD_C_OF_##n                                                                               \
                 : "l"(a), "l"(b), "r"((int)add), "n"((int)A_COLUMNS), "n"((int)B_COLUMNS))
#define TD_REGISTERS_GEMM(n, type, i0, i1, i2, i3, i4, i5, i6)                                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i5 ", 0;\n"                                        \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TD_NAMES_OF_##n        \
                 "}, {%" i0 ", %" i1 ", %" i2 ", %" i3 "}, %" i4 ", add, 1, 1, %" i6 ";\n}"                  \
                 : TD_C_OF_##n                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"((int)B_COLUMNS))
#define TD_GEMM_OF(n, i0, i1, i2, i3, i4, i5, i6)                                                            \
    if constexpr (N == n && FROM_SHARED && IS_BF16)                                                          \
        TD_SHARED_GEMM(n, "bf16", i0, i1, i2, i3, i4);                                                       \
    if constexpr (N == n && FROM_SHARED && !IS_BF16)                                                         \
        TD_SHARED_GEMM(n, "f16", i0, i1, i2, i3, i4);                                                        \
    if constexpr (N == n && !FROM_SHARED && IS_BF16)                                                         \
        TD_REGISTERS_GEMM(n, "bf16", i0, i1, i2, i3, i4, i5, i6);                                            \
    if constexpr (N == n && !FROM_SHARED && !IS_BF16)                                                        \
        TD_REGISTERS_GEMM(n, "f16", i0, i1, i2, i3, i4, i5, i6);

/** A is shared memory (a descriptor) or registers. A_COLUMNS, B_COLUMNS: the operand is a columns_operand. N
 * is a multiple of 16 up to 256. `add` false: c is overwritten. */
template <typename T, int N, bool A_COLUMNS, bool B_COLUMNS, typename A>
__device__ __forceinline__ void gemm_of(float (&c)[N / 2], const A &a, uint64_t b, bool add)
{
    constexpr bool FROM_SHARED = std::is_same_v<A, uint64_t>, IS_BF16 = std::is_same_v<T, __nv_bfloat16>;

    static_assert(N % 16 == 0 && N <= 256 && (FROM_SHARED || !A_COLUMNS));
    TD_GEMM_OF(16, "8", "9", "10", "11", "12", "13", "14")
    TD_GEMM_OF(32, "16", "17", "18", "19", "20", "21", "22")
    TD_GEMM_OF(48, "24", "25", "26", "27", "28", "29", "30")
    TD_GEMM_OF(64, "32", "33", "34", "35", "36", "37", "38")
    TD_GEMM_OF(80, "40", "41", "42", "43", "44", "45", "46")
    TD_GEMM_OF(96, "48", "49", "50", "51", "52", "53", "54")
    TD_GEMM_OF(112, "56", "57", "58", "59", "60", "61", "62")
    TD_GEMM_OF(128, "64", "65", "66", "67", "68", "69", "70")
    TD_GEMM_OF(144, "72", "73", "74", "75", "76", "77", "78")
    TD_GEMM_OF(160, "80", "81", "82", "83", "84", "85", "86")
    TD_GEMM_OF(176, "88", "89", "90", "91", "92", "93", "94")
    TD_GEMM_OF(192, "96", "97", "98", "99", "100", "101", "102")
    TD_GEMM_OF(208, "104", "105", "106", "107", "108", "109", "110")
    TD_GEMM_OF(224, "112", "113", "114", "115", "116", "117", "118")
    TD_GEMM_OF(240, "120", "121", "122", "123", "124", "125", "126")
    TD_GEMM_OF(256, "128", "129", "130", "131", "132", "133", "134")
}

template <typename T, int N, bool A_COLUMNS = false, bool B_COLUMNS = false>
__device__ __forceinline__ void gemm(float (&c)[N / 2], uint64_t a, uint64_t b, bool add)
{
    gemm_of<T, N, A_COLUMNS, B_COLUMNS>(c, a, b, add);
}

template <typename T, int N, bool B_COLUMNS = false>
__device__ __forceinline__ void gemm(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add)
{
    gemm_of<T, N, false, B_COLUMNS>(c, a, b, add);
}

#undef TD_GEMM_OF
#undef TD_REGISTERS_GEMM
#undef TD_SHARED_GEMM
#undef TD_NAMES_OF_16
#undef TD_C_OF_16
#undef TD_NAMES_OF_32
#undef TD_C_OF_32
#undef TD_NAMES_OF_48
#undef TD_C_OF_48
#undef TD_NAMES_OF_64
#undef TD_C_OF_64
#undef TD_NAMES_OF_80
#undef TD_C_OF_80
#undef TD_NAMES_OF_96
#undef TD_C_OF_96
#undef TD_NAMES_OF_112
#undef TD_C_OF_112
#undef TD_NAMES_OF_128
#undef TD_C_OF_128
#undef TD_NAMES_OF_144
#undef TD_C_OF_144
#undef TD_NAMES_OF_160
#undef TD_C_OF_160
#undef TD_NAMES_OF_176
#undef TD_C_OF_176
#undef TD_NAMES_OF_192
#undef TD_C_OF_192
#undef TD_NAMES_OF_208
#undef TD_C_OF_208
#undef TD_NAMES_OF_224
#undef TD_C_OF_224
#undef TD_NAMES_OF_240
#undef TD_C_OF_240
#undef TD_NAMES_OF_256
#undef TD_C_OF_256
#undef TD_C_8

/* ---- fragments of 16-bit elements to shared memory: four 8 x 8 matrices. Lane l gives the address of row l
 * % 8 of matrix l / 8. Of each matrix it has two elements of row l / 4, from column 2 (l % 4) on ---- */

__device__ inline void store_matrices(uint32_t address, const uint32_t (&x)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/** Stores each matrix transposed. */
__device__ inline void store_matrices_transposed(uint32_t address, const uint32_t (&x)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/** Where byte `offset` of a panel of W-byte rows lies after the swizzle. */
template <int W = 128> __device__ inline uint32_t swizzled(uint32_t offset)
{
    return offset ^ ((offset >> 7) & (W / 16 - 1)) << 4;
}

} // namespace hopper

#endif
