/** Internal to jit/: the texts of templates/; the build embeds them in the library. */
#ifndef TD_JIT_TEMPLATES_H
#define TD_JIT_TEMPLATES_H

extern const char td_jit_template_cpu[];
extern const char td_jit_template_cuda[];
extern const char td_jit_template_softmax[];

#endif
