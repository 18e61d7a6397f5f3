/* The operator lists of torch.autocast: the operators that PyTorch 2.13 registers for AutocastCPU and
 * AutocastCUDA. Names are those in PyTorch's dispatcher, without overloads. _cudnn_rnn is left out, because
 * it always runs in f16. The parity layer compares the lists with that PyTorch. */
#include "precision/autocast_lists.h"

/* clang-format would put every name on a line of its own. */
/* clang-format off */
static const char *const cpu_lower[] = {
    "_addmm_activation", "_convolution", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm",
    "bmm", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "linalg_vecdot", "linear", "matmul", "mkldnn_rnn_layer", "mm", "prelu",
    "scaled_dot_product_attention",
};

static const char *const cpu_f32[] = {
    "_grid_sampler_2d_cpu_fallback", "_lu_with_info", "adaptive_avg_pool3d", "adaptive_max_pool3d",
    "avg_pool3d", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cdist", "cholesky",
    "cholesky_inverse", "cholesky_solve", "cosine_embedding_loss", "cross_entropy_loss", "ctc_loss",
    "fake_quantize_per_tensor_affine", "fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_ifft",
    "fft_ifft2", "fft_ifftn", "fft_ihfft", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft",
    "fft_rfft2", "fft_rfftn", "fractional_max_pool2d", "fractional_max_pool3d", "geqrf", "grid_sampler",
    "grid_sampler_2d", "grid_sampler_3d", "hinge_embedding_loss", "huber_loss", "inverse", "kl_div",
    "l1_loss", "linalg_cholesky", "linalg_cholesky_ex", "linalg_cond", "linalg_eig", "linalg_eigh",
    "linalg_eigvals", "linalg_eigvalsh", "linalg_householder_product", "linalg_inv", "linalg_inv_ex",
    "linalg_lstsq", "linalg_matrix_rank", "linalg_qr", "linalg_solve", "linalg_svd", "linalg_svdvals",
    "linalg_tensorinv", "linalg_tensorsolve", "lu_solve", "margin_ranking_loss", "max_pool3d",
    "max_unpool2d", "max_unpool3d", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_margin_loss_forward", "nanquantile", "nll_loss", "nll_loss2d", "orgqr", "ormqr",
    "pinverse", "poisson_nll_loss", "polar", "prod", "qr", "quantile", "reflection_pad1d",
    "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "smooth_l1_loss",
    "soft_margin_loss", "stft", "svd", "trace", "triangular_solve", "triplet_margin_loss",
    "view_as_complex",
};

static const char *const cpu_widest[] = {
    "cat", "index_copy", "stack",
};

static const char *const cuda_lower[] = {
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul",
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum",
    "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell", "matmul", "mm", "mv",
    "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
};

static const char *const cuda_f32[] = {
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "acos", "asin",
    "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "frobenius_norm", "group_norm",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "linalg_matrix_norm",
    "linalg_vector_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "native_layer_norm", "nll_loss", "nll_loss2d", "norm", "nuclear_norm", "pdist", "poisson_nll_loss",
    "pow", "prod", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softplus", "sum", "tan", "triplet_margin_loss",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
};

static const char *const cuda_widest[] = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
};

static const char *const cuda_banned[] = {
    "binary_cross_entropy",
};

#define LIST(rule, names) {rule, (int64_t)(sizeof(names) / sizeof(names)[0]), names}
/* clang-format on */

const td_autocast_list td_autocast_lists[2][TD_AUTOCAST_LISTS] = {
    [TD_AUTOCAST_CPU] = {LIST(TD_AUTOCAST_LOWER, cpu_lower),
                         LIST(TD_AUTOCAST_F32, cpu_f32),
                         LIST(TD_AUTOCAST_WIDEST, cpu_widest),
                         {TD_AUTOCAST_BANNED, 0, NULL}},
    [TD_AUTOCAST_CUDA] = {LIST(TD_AUTOCAST_LOWER, cuda_lower), LIST(TD_AUTOCAST_F32, cuda_f32),
                          LIST(TD_AUTOCAST_WIDEST, cuda_widest), LIST(TD_AUTOCAST_BANNED, cuda_banned)},
};
