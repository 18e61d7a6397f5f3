/* What a kernel's name tells. Names are for libraries and for PyTorch's traces: what this library launches
 * has its class from the operation that launched it. */
#include "trace/recording.h"

#include "base/check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** A word and what it says; `first`: only at the begin of the name. */
typedef struct rule {
    const char *word;
    td_op_class op_class;
    bool first;
} rule;

/** The first that hits. Our own kernels say their class; "attention" goes before "softmax", and what is fused
 * by Inductor before what it is fused with. */
static const rule rules[] = {
    {"ncclDevKernel", TD_OP_COMMUNICATION, true},
    {"ncclSymkDevKernel", TD_OP_COMMUNICATION, true},
    {"ncclKernel", TD_OP_COMMUNICATION, true},
    {"td_attention_", TD_OP_ATTENTION, true},
    {"td_flash_", TD_OP_ATTENTION, true},
    {"td_softmax_", TD_OP_SOFTMAX, true},
    {"td_optimizer_", TD_OP_OPTIMIZER, true},
    {"td_adamw_", TD_OP_OPTIMIZER, true},
    {"td_norm_", TD_OP_REDUCTION, true},
    {"td_reduce_", TD_OP_REDUCTION, true},
    {"td_elem_", TD_OP_ELEMENTWISE, true},
    {"td_fill", TD_OP_MEMORY, true},
    {"fmha", TD_OP_ATTENTION, false},
    {"flash_fwd", TD_OP_ATTENTION, false},
    {"flash_bwd", TD_OP_ATTENTION, false},
    {"FlashAttn", TD_OP_ATTENTION, false},
    {"_sdpa_", TD_OP_ATTENTION, false},
    {"nvjet_", TD_OP_MATMUL, true},
    {"xmma_gemm", TD_OP_MATMUL, false},
    {"cutlass3x_sm", TD_OP_MATMUL, false},
    {"tensorop", TD_OP_MATMUL, false},
    {"gemm", TD_OP_MATMUL, false},
    {"gemv", TD_OP_MATMUL, false},
    {"splitKreduce_kernel", TD_OP_MATMUL, false},
    {"cublasLt::epilogue", TD_OP_MATMUL, false},
    {"triton_tem_", TD_OP_MATMUL, true},
    {"softmax", TD_OP_SOFTMAX, false},
    {"SoftMax", TD_OP_SOFTMAX, false},
    {"multi_tensor_apply_kernel", TD_OP_OPTIMIZER, false},
    {"fused_adam", TD_OP_OPTIMIZER, false},
    {"reduce_kernel", TD_OP_REDUCTION, false},
    {"rms_norm", TD_OP_REDUCTION, false},
    {"RMSNorm", TD_OP_REDUCTION, false},
    {"layer_norm", TD_OP_REDUCTION, false},
    {"triton_red_", TD_OP_REDUCTION, true},
    {"triton_per_", TD_OP_REDUCTION, true},
    {"triton_poi_", TD_OP_ELEMENTWISE, true},
    {"elementwise", TD_OP_ELEMENTWISE, false},
    {"CatArray", TD_OP_ELEMENTWISE, false},
    {"index", TD_OP_ELEMENTWISE, false},
    {"[CUDA mem", TD_OP_MEMORY, true},
    {"Memcpy", TD_OP_MEMORY, true},
    {"Memset", TD_OP_MEMORY, true},
};

/** A name without what C++ puts before it: "void ", a return type's namespace stays. */
static const char *begin_of(const char *name)
{
    return strncmp(name, "void ", 5) == 0 ? name + 5 : name;
}

td_op_class td_trace_class_of(const char *name)
{
    const char *begin = begin_of(name);

    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const size_t length = strlen(rules[i].word);

        if (rules[i].first ? strncmp(begin, rules[i].word, length) == 0
                           : strstr(begin, rules[i].word) != NULL)
            return rules[i].op_class;
    }
    return TD_OP_OTHER;
}

td_status td_trace_classify(const char *name, td_op_class *out)
{
    td_status status = TD_OK;

    TD_NOT_NULL(name, out);
    *out = td_trace_class_of(name);
cleanup:
    return status;
}

bool td_trace_is_reduction_of_split(const char *name)
{
    return strstr(name, "splitKreduce") != NULL;
}

/* ---- shown names ---- */

typedef char *(*demangler)(const char *name, char *room, size_t *bytes, int *status);

/** The name in C++, to be freed; NULL: it is none, or there is no C++ library. */
static char *demangle(const char *name)
{
    demangler function = NULL;
    int status = 0;

    if (strncmp(name, "_Z", 2) != 0)
        return NULL;
    /* It stays loaded, as a kernel's library keeps it anyway. */
    void *loaded = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL);
    if (loaded)
        *(void **)&function = dlsym(loaded, "__cxa_demangle");
    char *text = function ? function(name, NULL, NULL, &status) : NULL;
    return text;
}

/** Without arguments, and with template arguments of more than 60 bytes as "<...>". */
static void shorten(char *text)
{
    static const char anonymous[] = "(anonymous namespace)";
    const char *open = strchr(text, '<');
    int depth = 0;
    char *end = text;

    for (; *end; end++) {
        depth += *end == '<';
        depth -= *end == '>' && depth > 0;
        if (*end == '(' && depth == 0 && strncmp(end, anonymous, sizeof anonymous - 1) == 0)
            end += sizeof anonymous - 2;
        else if (*end == '(' && depth == 0)
            break;
    }
    *end = '\0';
    const char *close = strrchr(text, '>');
    if (open && close && close > open && close - open > 60) {
        char *to = text + (open - text) + 1;

        memmove(to + 3, close, strlen(close) + 1);
        memcpy(to, "...", 3);
    }
}

const char *td_trace_shown_name(td_names *names, const char *name)
{
    char *text = demangle(name);

    if (!text)
        return td_names_keep(names, name);
    shorten(text);
    const char *kept = td_names_keep(names, begin_of(text));
    free(text);
    return kept;
}
