/* On how many SMs updates run next to the GEMMs of the backward pass. */
#include "base/check.h"
#include "device/sms.h"
#include "train/state.h"

#include <string.h>

/* Models for which another number than the formula's makes steps faster. 8 to 28 were tried in steps of 2
 * (bf16_mixed, 25 November 2026). */
static const struct {
    const char *card; /* the begin of its name */
    int64_t d_model, d_ff, tokens;
    int32_t sms;
} measured[] = {{"NVIDIA H100", 768, 3072, 2048, 12},
                {"NVIDIA H100", 1024, 4096, 2048, 16},
                {"NVIDIA H100", 2560, 10240, 2048, 22}};

/* H100: bytes per second that an update moves with one SM next to GEMMs, and FLOP per second of GEMMs. */
#define SM_BYTES  75e9
#define FLOPS_16  480e12
#define FLOPS_F32 45e12

/* GEMMs of 16 bits run in clusters of blocks. Clusters of 8 leave 12 SMs of an H100 free, and a number that
 * is no multiple of 4 leaves SMs that nothing uses. With more than 28 SMs steps of 512 tokens are slower.
 * Steps of 256 tokens, whose update takes longer than their GEMMs even on all SMs, are the fastest with 40
 * (xl, DDP on two H200s, 26 November 2026: 20 SMs 35.0 ms, 28 27.2, 40 23.6, 56 25.6; all SMs after the pass
 * 27.8). If each of two ranks updates half of the weights, 28 is the fastest too: 20 SMs 22.8 ms, 28 20.4, 40
 * 21.5, 56 22.9; all SMs after the pass 22.8. */
enum { LEAST_16 = 12, MOST = 28, MOST_OF_LONG = 40, CLUSTER = 4 };

/* All updates run during the backward pass. It was tried to keep the updates of a third or a quarter of the
 * layers for the next forward pass, with 8 to 20 SMs in both passes. The best of ten such steps takes,
 * relative to this one (H200, batch 4, context 512, bf16_mixed, 29 November 2026): small 0.993, medium 1.019,
 * large 1.028, xl 1.012, 2.7B 0.998. Two runs of one step differ by up to 0.01. */

/** The update is long if it takes longer than the GEMMs even on so many SMs. */
enum { LONG = 132 };

/** The SMs with which the update takes as long as the GEMMs of the backward pass. Both times are
 * proportional to the number of weights, so the formula compares bytes of a weight with 4 FLOPs for each
 * token. The number is then limited as above. `parts`: ranks that divide the update, at least. */
static int32_t by_formula(const td_transformer_config *model, int32_t parts)
{
    const double wide = (double)td_dtype_size(td_precision_weights(model->precision)),
                 narrow = (double)td_dtype_size(td_precision_dtype(model->precision));
    const double bytes = 2 * (wide + 2 * sizeof(float)) + narrow;
    const double tokens = (double)model->batch * (double)model->context;
    const double seconds = 4 * tokens / (narrow > 2 ? FLOPS_F32 : FLOPS_16);
    const double sms = bytes / seconds / SM_BYTES / parts;
    const int32_t least = narrow > 2 ? CLUSTER : LEAST_16;

    return sms > LONG    ? MOST_OF_LONG
           : sms > MOST  ? MOST
           : sms > least ? (int32_t)sms / CLUSTER * CLUSTER
                         : least;
}

static int32_t best(const td_device *dev, const td_train_config *config)
{
    const td_transformer_config *const model = &config->model;
    const char *const card = td_device_model(dev);

    if (config->own_groups)
        return by_formula(model, 2);
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++)
        if (strncmp(card, measured[i].card, strlen(measured[i].card)) == 0 &&
            model->precision == TD_PRECISION_BF16_MIXED && model->size.d_model == measured[i].d_model &&
            model->size.d_ff == measured[i].d_ff && model->batch * model->context == measured[i].tokens)
            return measured[i].sms;
    return by_formula(model, 1);
}

td_status td_train_update_sms(td_device *dev, const td_train_config *config, int32_t *out)
{
    bool late = false;
    td_status status = TD_OK;

    TD_NOT_NULL(dev, config, out);
    for (const td_hook *hook = config->hooks; hook; hook = hook->next)
        late |= hook->late;
    const bool has_sms = td_update_has_sms(dev);
    TD_FAIL_IF(config->update_sms > 0 && !has_sms, TD_UNSUPPORTED,
               "update_sms is %d, but %s cannot update on a part of its SMs", (int)config->update_sms,
               td_device_name(dev));
    TD_CHECK(config->update_sms < td_device_sms(dev) || !has_sms,
             "update_sms is %d, needs to be below the %d SMs of %s", (int)config->update_sms,
             (int)td_device_sms(dev), td_device_name(dev));
    *out = 0;
    if (config->until != TD_TRAIN_UPDATE || config->clip > 0 || config->update_sms == TD_UPDATE_ALL_SMS ||
        !has_sms)
        goto cleanup;
    if (config->update_sms > 0)
        *out = config->update_sms;
    else if (config->time == TD_UPDATE_ALONG && !late)
        *out = best(dev, config);
cleanup:
    return status;
}
