/* Classes of kernels by their names. They are used for libraries' kernels and for PyTorch's traces; a kernel
 * of tandem gets its class from the operation that launched it. */
#include "trace/recording.h"

#include "base/check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** A text in the name, and the class that it means. first: only at the start of the name. */
typedef struct rule {
    const char *word;
    td_op_class op_class;
    bool first;
} rule;

/** The first matching rule counts. Kernels of tandem have the class in their name. "attention" precedes
 * "softmax"; kernels that Inductor fused precede the operations that they contain. */
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

/** The name without a leading "void ", and of a kernel of tandem without its namespace. */
static const char *begin_of(const char *name)
{
    const char *own = strstr(name, "::td_");

    if (own)
        return own + 2;
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

typedef char *(*demangler)(const char *name, char *buffer, size_t *bytes, int *status);

/** The demangled name, to be freed with free(); NULL: not a C++ name, or no C++ library. */
static char *demangle(const char *name)
{
    demangler function = NULL;
    int status = 0;

    if (strncmp(name, "_Z", 2) != 0)
        return NULL;
    /* Never unloaded. */
    void *loaded = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL);
    if (loaded)
        *(void **)&function = dlsym(loaded, "__cxa_demangle");
    char *text = function ? function(name, NULL, NULL, &status) : NULL;
    return text;
}

/** Removes arguments, and replaces template arguments longer than 60 bytes by "<...>". */
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
