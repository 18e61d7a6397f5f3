#include "support/transformer_reference.h"

#include "support/compare.h"
#include "support/draw.h"
#include "support/test.h"
#include "support/weights.h"

#include <math.h>

/* State-dict order inside a layer. */
enum { Q = 0, K, V, OUTPUT, W1, W2, W3, LN1, LN2, WEIGHTS };

struct td_reference_acts {
    double *x, *n1, *q, *k, *v, *p, *o, *mid, *n2, *gate, *up, *hidden;
};

static const double eps = 1e-5;

static double *zeros(int64_t count)
{
    double *block = calloc((size_t)(count > 0 ? count : 1), sizeof *block);

    assert_non_null(block);
    return block;
}

static double *weight(const td_reference *r, int64_t layer, int which)
{
    return r->weights[1 + layer * WEIGHTS + which];
}

static double *grad(const td_reference *r, int64_t layer, int which)
{
    return r->grads[1 + layer * WEIGHTS + which];
}

/* ---- y = x w^T ---- */

TD_TRUTH static void linear(int64_t rows, int64_t d_in, int64_t d_out, const double *x, const double *w,
                            double *y)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < d_out; o++) {
            double sum = 0;
            for (int64_t i = 0; i < d_in; i++)
                sum += x[r * d_in + i] * w[o * d_in + i];
            y[r * d_out + o] = sum;
        }
}

/* dx and dw are added to. */
TD_TRUTH static void linear_backward(int64_t rows, int64_t d_in, int64_t d_out, const double *x,
                                     const double *w, const double *dy, double *dx, double *dw)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < d_out; o++)
            for (int64_t i = 0; i < d_in; i++) {
                dx[r * d_in + i] += dy[r * d_out + o] * w[o * d_in + i];
                dw[o * d_in + i] += dy[r * d_out + o] * x[r * d_in + i];
            }
}

/* ---- y_i = x_i w_i / sqrt(mean(x^2) + eps) ---- */

TD_TRUTH static double inverse_rms(int64_t d, const double *x)
{
    double squares = 0;

    for (int64_t i = 0; i < d; i++)
        squares += x[i] * x[i];
    return 1 / sqrt(squares / (double)d + eps);
}

TD_TRUTH static void norm(int64_t rows, int64_t d, const double *x, const double *w, double *y)
{
    for (int64_t r = 0; r < rows; r++) {
        const double rstd = inverse_rms(d, x + r * d);
        for (int64_t i = 0; i < d; i++)
            y[r * d + i] = x[r * d + i] * rstd * w[i];
    }
}

/* dx and dw are added to. With s = 1 / rms, ds/dx_i = -s^3 x_i / d. */
TD_TRUTH static void norm_backward(int64_t rows, int64_t d, const double *x, const double *w,
                                   const double *dy, double *dx, double *dw)
{
    for (int64_t r = 0; r < rows; r++) {
        const double *xr = x + r * d, *dyr = dy + r * d;
        const double rstd = inverse_rms(d, xr);
        double dot = 0;
        for (int64_t i = 0; i < d; i++)
            dot += dyr[i] * w[i] * xr[i];
        for (int64_t i = 0; i < d; i++) {
            dx[r * d + i] += dyr[i] * w[i] * rstd - rstd * rstd * rstd * xr[i] / (double)d * dot;
            dw[i] += dyr[i] * xr[i] * rstd;
        }
    }
}

/* ---- rotation of every pair of every head, in place; sign -1 is the transpose ---- */

TD_TRUTH static void rotate(const td_reference *r, double *x, double sign)
{
    const int64_t d = r->size.d_model, head_dim = d / r->size.heads;

    for (int64_t t = 0; t < r->batch * r->seq; t++)
        for (int64_t c = 0; c < d; c += 2) {
            const double angle =
                sign * (double)(t % r->seq) * pow(r->theta, -(double)(c % head_dim) / (double)head_dim);
            const double even = x[t * d + c], odd = x[t * d + c + 1];
            x[t * d + c] = even * cos(angle) - odd * sin(angle);
            x[t * d + c + 1] = even * sin(angle) + odd * cos(angle);
        }
}

/* ---- causal attention; p is [batch, heads, seq, seq] ---- */

TD_TRUTH static void attention(const td_reference *r, const double *q, const double *k, const double *v,
                               double *p, double *o)
{
    const int64_t d = r->size.d_model, heads = r->size.heads, head_dim = d / heads, seq = r->seq;

    for (int64_t b = 0; b < r->batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < seq; i++) {
                double *row = p + ((b * heads + h) * seq + i) * seq, largest = -INFINITY, sum = 0;
                for (int64_t j = 0; j <= i; j++) {
                    row[j] = 0;
                    for (int64_t c = h * head_dim; c < (h + 1) * head_dim; c++)
                        row[j] +=
                            q[(b * seq + i) * d + c] * k[(b * seq + j) * d + c] / sqrt((double)head_dim);
                    largest = fmax(largest, row[j]);
                }
                for (int64_t j = 0; j <= i; j++)
                    sum += row[j] = exp(row[j] - largest);
                for (int64_t j = 0; j <= i; j++)
                    row[j] /= sum;
                for (int64_t c = h * head_dim; c < (h + 1) * head_dim; c++) {
                    double total = 0;
                    for (int64_t j = 0; j <= i; j++)
                        total += row[j] * v[(b * seq + j) * d + c];
                    o[(b * seq + i) * d + c] = total;
                }
            }
}

/* dq, dk and dv are added to. */
TD_TRUTH static void attention_backward(const td_reference *r, const struct td_reference_acts *a,
                                        const double *d_o, double *dq, double *dk, double *dv)
{
    const int64_t d = r->size.d_model, heads = r->size.heads, head_dim = d / heads, seq = r->seq;
    double *dp = zeros(seq);

    for (int64_t b = 0; b < r->batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < seq; i++) {
                const double *p = a->p + ((b * heads + h) * seq + i) * seq;
                const int64_t qi = (b * seq + i) * d;
                double dot = 0;
                for (int64_t j = 0; j <= i; j++) {
                    dp[j] = 0;
                    for (int64_t c = h * head_dim; c < (h + 1) * head_dim; c++) {
                        dp[j] += d_o[qi + c] * a->v[(b * seq + j) * d + c];
                        dv[(b * seq + j) * d + c] += p[j] * d_o[qi + c];
                    }
                    dot += p[j] * dp[j];
                }
                for (int64_t j = 0; j <= i; j++) {
                    const double ds = p[j] * (dp[j] - dot) / sqrt((double)head_dim);
                    for (int64_t c = h * head_dim; c < (h + 1) * head_dim; c++) {
                        dq[qi + c] += ds * a->k[(b * seq + j) * d + c];
                        dk[(b * seq + j) * d + c] += ds * a->q[qi + c];
                    }
                }
            }
    free(dp);
}

TD_TRUTH static double log_sum_exp(int64_t count, const double *x)
{
    double largest = x[0], sum;

    for (int64_t i = 1; i < count; i++)
        largest = fmax(largest, x[i]);
    sum = exp(x[0] - largest);
    for (int64_t i = 1; i < count; i++)
        sum += exp(x[i] - largest);
    return largest + log(sum);
}

/* ---- the model ---- */

td_reference *td_reference_of(const td_transformer *model, const td_transformer_config *config)
{
    td_reference *r = calloc(1, sizeof *r);

    assert_non_null(r);
    r->size = config->size;
    r->theta = config->rope_theta > 0 ? config->rope_theta : 10000;
    r->count = td_transformer_parameter_count(model);
    r->numel = calloc((size_t)r->count, sizeof *r->numel);
    r->weights = calloc((size_t)r->count, sizeof *r->weights);
    r->grads = calloc((size_t)r->count, sizeof *r->grads);
    assert_true(r->numel && r->weights && r->grads);
    for (int64_t i = 0; i < r->count; i++) {
        td_parameter parameter;
        td_assert_ok(td_transformer_parameter(model, i, &parameter));
        r->numel[i] = parameter.numel;
        void *numbers = td_numbers_of(model, i);
        r->weights[i] = td_as_f64(parameter.dtype, numbers, parameter.numel);
        free(numbers);
        r->grads[i] = zeros(parameter.numel);
    }
    return r;
}

static void free_acts(td_reference *r)
{
    for (int64_t l = 0; r->acts && l < r->size.layers; l++) {
        struct td_reference_acts *a = &r->acts[l];
        double *const all[] = {a->x, a->n1,  a->q,  a->k,    a->v,  a->p,
                               a->o, a->mid, a->n2, a->gate, a->up, a->hidden};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
    }
    free(r->acts);
    free(r->final_input);
    free(r->logits);
    r->acts = NULL;
    r->final_input = r->logits = NULL;
}

void td_reference_free(td_reference *r)
{
    free_acts(r);
    for (int64_t i = 0; i < r->count; i++) {
        free(r->weights[i]);
        free(r->grads[i]);
    }
    free(r->numel);
    free(r->weights);
    free(r->grads);
    free(r);
}

static void layer_forward(td_reference *r, int64_t layer, double *x)
{
    const int64_t n = r->batch * r->seq, d = r->size.d_model, f = r->size.d_ff;
    struct td_reference_acts *a = &r->acts[layer];
    double *branch = zeros(n * d);

    a->x = zeros(n * d);
    a->n1 = zeros(n * d);
    a->q = zeros(n * d);
    a->k = zeros(n * d);
    a->v = zeros(n * d);
    a->p = zeros(n * r->seq * r->size.heads);
    a->o = zeros(n * d);
    a->mid = zeros(n * d);
    a->n2 = zeros(n * d);
    a->gate = zeros(n * f);
    a->up = zeros(n * f);
    a->hidden = zeros(n * f);

    memcpy(a->x, x, (size_t)(n * d) * sizeof *x);
    norm(n, d, a->x, weight(r, layer, LN1), a->n1);
    linear(n, d, d, a->n1, weight(r, layer, Q), a->q);
    linear(n, d, d, a->n1, weight(r, layer, K), a->k);
    linear(n, d, d, a->n1, weight(r, layer, V), a->v);
    rotate(r, a->q, 1);
    rotate(r, a->k, 1);
    attention(r, a->q, a->k, a->v, a->p, a->o);
    linear(n, d, d, a->o, weight(r, layer, OUTPUT), branch);
    for (int64_t i = 0; i < n * d; i++)
        a->mid[i] = a->x[i] + branch[i];

    norm(n, d, a->mid, weight(r, layer, LN2), a->n2);
    linear(n, d, f, a->n2, weight(r, layer, W1), a->gate);
    linear(n, d, f, a->n2, weight(r, layer, W3), a->up);
    for (int64_t i = 0; i < n * f; i++)
        a->hidden[i] = a->gate[i] / (1 + exp(-a->gate[i])) * a->up[i];
    linear(n, f, d, a->hidden, weight(r, layer, W2), branch);
    for (int64_t i = 0; i < n * d; i++)
        x[i] = a->mid[i] + branch[i];
    free(branch);
}

double td_reference_loss(td_reference *r, const int64_t *ids, const int64_t *targets, int64_t batch,
                         int64_t seq)
{
    const int64_t n = batch * seq, d = r->size.d_model, vocab = r->size.vocab;
    double *x = zeros(n * d), *normed = zeros(n * d), loss = 0;

    free_acts(r);
    r->batch = batch;
    r->seq = seq;
    r->acts = calloc((size_t)r->size.layers, sizeof *r->acts);
    assert_non_null(r->acts);
    for (int64_t t = 0; t < n; t++)
        memcpy(x + t * d, r->weights[0] + ids[t] * d, (size_t)d * sizeof *x);
    for (int64_t layer = 0; layer < r->size.layers; layer++)
        layer_forward(r, layer, x);
    r->final_input = x;
    r->logits = zeros(n * vocab);
    norm(n, d, x, r->weights[r->count - 2], normed);
    linear(n, d, vocab, normed, r->weights[r->count - 1], r->logits);
    free(normed);

    for (int64_t t = 0; t < n; t++) {
        const double *row = r->logits + t * vocab;
        loss += (log_sum_exp(vocab, row) - row[targets[t]]) / (double)n;
    }
    return loss;
}

/* dx holds the gradient of the layer's output, then of its input. */
static void layer_backward(td_reference *r, int64_t layer, double *dx)
{
    const int64_t n = r->batch * r->seq, d = r->size.d_model, f = r->size.d_ff;
    const struct td_reference_acts *a = &r->acts[layer];
    double *dhidden = zeros(n * f), *dgate = zeros(n * f), *dup = zeros(n * f), *dn = zeros(n * d);
    double *d_o = zeros(n * d), *dq = zeros(n * d), *dk = zeros(n * d), *dv = zeros(n * d);

    linear_backward(n, f, d, a->hidden, weight(r, layer, W2), dx, dhidden, grad(r, layer, W2));
    for (int64_t i = 0; i < n * f; i++) {
        const double s = 1 / (1 + exp(-a->gate[i]));
        dgate[i] = dhidden[i] * a->up[i] * (s + a->gate[i] * s * (1 - s));
        dup[i] = dhidden[i] * a->gate[i] * s;
    }
    linear_backward(n, d, f, a->n2, weight(r, layer, W1), dgate, dn, grad(r, layer, W1));
    linear_backward(n, d, f, a->n2, weight(r, layer, W3), dup, dn, grad(r, layer, W3));
    norm_backward(n, d, a->mid, weight(r, layer, LN2), dn, dx, grad(r, layer, LN2));

    linear_backward(n, d, d, a->o, weight(r, layer, OUTPUT), dx, d_o, grad(r, layer, OUTPUT));
    attention_backward(r, a, d_o, dq, dk, dv);
    rotate(r, dq, -1);
    rotate(r, dk, -1);
    memset(dn, 0, (size_t)(n * d) * sizeof *dn);
    linear_backward(n, d, d, a->n1, weight(r, layer, Q), dq, dn, grad(r, layer, Q));
    linear_backward(n, d, d, a->n1, weight(r, layer, K), dk, dn, grad(r, layer, K));
    linear_backward(n, d, d, a->n1, weight(r, layer, V), dv, dn, grad(r, layer, V));
    norm_backward(n, d, a->x, weight(r, layer, LN1), dn, dx, grad(r, layer, LN1));

    double *const all[] = {dhidden, dgate, dup, dn, d_o, dq, dk, dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

void td_reference_backward(td_reference *r, const int64_t *ids, const int64_t *targets)
{
    const int64_t n = r->batch * r->seq, d = r->size.d_model, vocab = r->size.vocab;
    const double *ln_final = r->weights[r->count - 2], *head = r->weights[r->count - 1];
    double *dlogits = zeros(n * vocab), *normed = zeros(n * d), *dnormed = zeros(n * d), *dx = zeros(n * d);

    for (int64_t i = 0; i < r->count; i++)
        memset(r->grads[i], 0, (size_t)r->numel[i] * sizeof(double));
    for (int64_t t = 0; t < n; t++) {
        const double *row = r->logits + t * vocab;
        const double lse = log_sum_exp(vocab, row);
        for (int64_t i = 0; i < vocab; i++)
            dlogits[t * vocab + i] = (exp(row[i] - lse) - (i == targets[t])) / (double)n;
    }
    norm(n, d, r->final_input, ln_final, normed);
    linear_backward(n, d, vocab, normed, head, dlogits, dnormed, r->grads[r->count - 1]);
    norm_backward(n, d, r->final_input, ln_final, dnormed, dx, r->grads[r->count - 2]);
    for (int64_t layer = r->size.layers - 1; layer >= 0; layer--)
        layer_backward(r, layer, dx);
    for (int64_t t = 0; t < n; t++)
        for (int64_t i = 0; i < d; i++)
            r->grads[0][ids[t] * d + i] += dx[t * d + i];
    free(dlogits);
    free(normed);
    free(dnormed);
    free(dx);
}
