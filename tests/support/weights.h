/** A model's weights as numbers in host memory, whether their masters are in planes or not. */
#ifndef TD_TESTS_WEIGHTS_H
#define TD_TESTS_WEIGHTS_H

#include "base/float16.h"
#include "support/compare.h"
#include "support/test.h"
#include "transformer/transformer.h"

/** The numbers of a range in w->dtype; `params` is a copy of w->params. The caller frees them. */
static inline void *td_numbers_in_copy(const td_weights *w, void *params, int64_t begin, int64_t end)
{
    const size_t size = td_dtype_size(w->dtype);
    char *numbers = malloc((size_t)(end - begin) * size), *const copy = params;
    td_master from;

    assert_non_null(numbers);
    for (int64_t at = begin; at < end; at = from.end) {
        from = td_weights_master(w, at);
        const int64_t count = (from.end < end ? from.end : end) - at;
        void *const to = numbers + (size_t)(at - begin) * size, *const high = copy + ((char *)from.at -
                                                                                      (char *)w->params);

        if (from.low)
            td_planes_join(count, high, (void *)(copy + ((char *)from.low - (char *)w->params)), to);
        else
            memcpy(to, high, (size_t)count * size);
    }
    return numbers;
}

static inline void *td_numbers_in(const td_weights *w, int64_t begin, int64_t end)
{
    return td_numbers_in_copy(w, w->params, begin, end);
}

/** The same for a parameter. */
static inline void *td_numbers_of(const td_transformer *model, int64_t index)
{
    td_weights w;
    td_parameter p;

    td_assert_ok(td_transformer_weights(model, &w));
    td_assert_ok(td_transformer_parameter(model, index, &p));
    return td_numbers_in(&w, p.offset, p.offset + p.numel);
}

#endif
