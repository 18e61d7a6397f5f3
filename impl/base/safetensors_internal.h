/** What reading and writing safetensors share. */
#ifndef TD_BASE_SAFETENSORS_INTERNAL_H
#define TD_BASE_SAFETENSORS_INTERNAL_H

#include "base/safetensors.h"

#define TD_STORED_LENGTH_BYTES INT64_C(8)         /* ahead of the header, its length */
#define TD_STORED_MOST_HEADER  INT64_C(100000000) /* the format's limit */
#define TD_STORED_METADATA     "__metadata__"

/** *bytes = what a tensor of that dtype and shape takes. The message names the file and the tensor. */
td_status td_stored_measure(const char *path, const td_stored *tensor, int64_t *bytes);

#endif
