/** Comes after a template of jit/ for CUDA: runs one of its kernels block by block. */
static const arguments *emulated_given;
static void (*emulated_kernel)(const arguments a);

static void emulated_thread(void)
{
    emulated_kernel(*emulated_given);
    emulated_done[emulated_now] = 1;
    if (--emulated_left == 0)
        setcontext(&emulated_home);
    emulated_yield();
}

/** Runs `blocks` blocks of `threads` threads with `bytes` of shared memory. Returns 0; 1: no
 * memory, or too many threads. */
int emulate(void (*kernel)(const arguments a), long long blocks, int threads, int bytes,
            const arguments *given)
{
    unsigned char *const stacks = malloc((size_t)threads * EMULATED_STACK);

    emulated_shared = aligned_alloc(16, ((size_t)bytes + 31) / 16 * 16);
    if (!stacks || !emulated_shared || threads > EMULATED_MOST)
        return 1;
    emulated_kernel = kernel;
    emulated_given = given;
    emulated_threads = threads;
    for (emulated_block = 0; emulated_block < blocks; emulated_block++) {
        memset(emulated_shared, 0xFF, (size_t)bytes); /* NaN in every type */
        memset(emulated_done, 0, sizeof emulated_done);
        emulated_left = threads;
        for (int i = 0; i < threads; i++) {
            getcontext(&emulated[i]);
            emulated[i].uc_stack.ss_sp = stacks + (size_t)i * EMULATED_STACK;
            emulated[i].uc_stack.ss_size = EMULATED_STACK;
            emulated[i].uc_link = NULL;
            makecontext(&emulated[i], emulated_thread, 0);
        }
        emulated_now = 0;
        swapcontext(&emulated_home, &emulated[0]);
    }
    free(stacks);
    free(emulated_shared);
    return 0;
}
