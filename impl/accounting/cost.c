#include "accounting/checks.h"

/** *out = the bytes of one element of dtype. */
static td_status element_bytes(td_dtype dtype, int64_t *out)
{
    td_status status = TD_OK;
    size_t size = td_dtype_size(dtype);

    TD_CHECK(size > 0, "dtype is %d, needs a td_dtype", (int)dtype);
    *out = (int64_t)size;
cleanup:
    return status;
}

td_status td_gemm_cost(int64_t batch, int64_t m, int64_t n, int64_t k, td_dtype dtype, td_cost *out)
{
    td_status status = TD_OK;
    int64_t size = 0, a = 0, b = 0, c = 0, bytes = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("m", m));
    TD_TRY(td_account_extent("n", n));
    TD_TRY(td_account_extent("k", k));
    TD_TRY(element_bytes(dtype, &size));
    TD_TRY(td_product("bytes of a", TD_LIST(batch, m, k, size), &a));
    TD_TRY(td_product("bytes of b", TD_LIST(batch, k, n, size), &b));
    TD_TRY(td_product("bytes of c", TD_LIST(batch, m, n, size), &c));
    TD_TRY(td_account_sum("bytes moved", TD_LIST(a, b, c), &bytes));
    out->flops = 2.0 * (double)batch * (double)m * (double)n * (double)k;
    out->bytes = (double)bytes;
cleanup:
    return status;
}

td_status td_softmax_cost(int64_t rows, int64_t cols, td_dtype dtype, td_cost *out)
{
    td_status status = TD_OK;
    int64_t size = 0, bytes = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("rows", rows));
    TD_TRY(td_account_extent("cols", cols));
    TD_TRY(element_bytes(dtype, &size));
    TD_TRY(td_product("bytes moved", TD_LIST(2, rows, cols, size), &bytes));
    out->flops = (double)rows * (5.0 * (double)cols - 2.0);
    out->bytes = (double)bytes;
cleanup:
    return status;
}

td_status td_flash_cost(int64_t batch, int64_t heads, int64_t seq, int64_t seq_k, int64_t head_dim,
                        td_dtype dtype, bool causal, bool backward, td_cost *out)
{
    td_status status = TD_OK;
    int64_t size = 0, scores = 0, query_bytes = 0, key_bytes = 0, lse_bytes = 0, bytes = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("batch", batch));
    TD_TRY(td_account_extent("heads", heads));
    TD_TRY(td_account_extent("seq", seq));
    TD_TRY(td_account_extent("seq_k", seq_k));
    TD_TRY(td_account_extent("head_dim", head_dim));
    TD_TRY(element_bytes(dtype, &size));
    TD_TRY(td_product("scores", TD_LIST(batch, heads, seq, seq_k), &scores));
    /* Forward moves q, o and k, v; backward q, o, dO, dQ and k, v, dK, dV. */
    int64_t tensors = backward ? 4 : 2;
    TD_TRY(td_product("bytes of the query side", TD_LIST(tensors, batch, heads, seq, head_dim, size),
                      &query_bytes));
    TD_TRY(td_product("bytes of the key side", TD_LIST(tensors, batch, heads, seq_k, head_dim, size),
                      &key_bytes));
    TD_TRY(td_product("bytes of the logsumexp", TD_LIST(4, batch, heads, seq), &lse_bytes));
    TD_TRY(td_account_sum("bytes moved", TD_LIST(query_bytes, key_bytes, lse_bytes), &bytes));
    out->flops = 4.0 * (double)scores * (double)head_dim * (causal ? 0.5 : 1.0) * (backward ? 2.5 : 1.0);
    out->bytes = (double)bytes;
cleanup:
    return status;
}

td_status td_adamw_cost(int64_t count, td_dtype dtype, td_cost *out)
{
    td_status status = TD_OK;
    int64_t size = 0, bytes = 0;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_extent("count", count));
    TD_TRY(element_bytes(dtype, &size));
    TD_TRY(td_product("bytes moved", TD_LIST(count, 3 * size + 16), &bytes));
    out->flops = 14.0 * (double)count;
    out->bytes = (double)bytes;
cleanup:
    return status;
}
