/** FlashAttention-2 on CUDA, sm_80 and later. `shape` is resolved: seq_k and scale are filled in. dtype is
 * TD_F32 (with or without tf32), TD_BF16 or TD_F16, head_dim at most 256. flash/flash.h describes the tensors
 * and their order. `work` is 256-byte aligned. Its size is what td_cuda_flash_*_bytes returns for the same
 * arguments. It may be NULL if the size is 0.
 *
 * The number of SMs decides the number of parts of a sequence, and so the order of sums. */
#ifndef TD_KERNELS_FLASH_H
#define TD_KERNELS_FLASH_H

#include "attention/attention.h"

#include <cuda_runtime_api.h>

TD_BEGIN_DECLS

/** The GPU that a call runs on. `capability` is 10 major + minor; 80 asks for the portable kernels on any
 * GPU. */
typedef struct td_gpu {
    int sms;      /* streaming multiprocessors */
    int free_sms; /* the SMs that no kernel of a collective or an update holds; at least 1 */
    int capability;
} td_gpu;

/** Whether a grid can have a block for each tile of the shape. The functions below need such a shape. */
bool td_cuda_flash_fits(const td_attention_shape *shape);

/** Whether backward can write gradients into rows (shape->grad_pitch). */
bool td_cuda_flash_packs(td_gpu gpu, const td_attention_shape *shape);

size_t td_cuda_flash_forward_bytes(td_gpu gpu, const td_attention_shape *shape);
size_t td_cuda_flash_backward_bytes(td_gpu gpu, const td_attention_shape *shape);

cudaError_t td_cuda_flash_forward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                  const void *q, const void *k, const void *v, void *o, float *lse,
                                  void *work);
/** cudaErrorNotSupported: with grad_pitch, a tensor does not begin at a multiple of 16 bytes. */
cudaError_t td_cuda_flash_backward(cudaStream_t stream, td_gpu gpu, const td_attention_shape *shape,
                                   const void *q, const void *k, const void *v, const void *o,
                                   const void *dout, const float *lse, void *dq, void *dk, void *dv,
                                   void *work);

TD_END_DECLS

#endif
