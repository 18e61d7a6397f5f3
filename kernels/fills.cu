#include "kernels/fills.h"

#include <cstdint>
#include <new>

namespace
{

/* A larger fill takes longer than the waits before and after it, so replacing it saves little. */
constexpr size_t MOST_BYTES = 64 << 10;
constexpr int THREADS = 256;

template <typename T> __global__ void td_fill(T *to, T value, size_t count)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;

    if (at < count)
        to[at] = value;
}

/* A list of nodes. CUDA's functions return its length in a first call and the nodes in a second. */
struct nodes {
    cudaGraphNode_t *all = nullptr;
    size_t count = 0;

    nodes() = default;
    nodes(const nodes &) = delete;
    nodes &operator=(const nodes &) = delete;
    ~nodes()
    {
        delete[] all;
    }

    template <typename F> cudaError_t read(F list)
    {
        const cudaError_t error = list(nullptr, &count);

        if (error != cudaSuccess || count == 0)
            return error;
        all = new (std::nothrow) cudaGraphNode_t[count];
        return all ? list(all, &count) : cudaErrorMemoryAllocation;
    }
};

/* Since CUDA 13 these functions have an argument for the data of edges. Edges of a fill have no data. */
#if CUDART_VERSION >= 13000
#define NO_DATA nullptr,
#else
#define NO_DATA
#endif

/* Whether the node is of this type. The runtime cannot name each type of the driver, such as the waits for
   memory that NCCL captures for gathers by copy engines. Such a node is of no type that is asked for. */
bool is(cudaGraphNode_t node, cudaGraphNodeType wanted)
{
    cudaGraphNodeType type;

    if (cudaGraphNodeGetType(node, &type) == cudaSuccess)
        return type == wanted;
    (void)cudaGetLastError();
    return false;
}

/* Gives the kernel the priority of a kernel that waits for it. Both were captured from one stream. */
cudaError_t copy_priority(const nodes &from, cudaGraphNode_t to)
{
    cudaError_t error = cudaSuccess;

    for (size_t i = 0; i < from.count && error == cudaSuccess; i++) {
        cudaKernelNodeAttrValue value;

        if (!is(from.all[i], cudaGraphNodeTypeKernel))
            continue;
        error = cudaGraphKernelNodeGetAttribute(from.all[i], cudaLaunchAttributePriority, &value);
        if (error == cudaSuccess)
            error = cudaGraphKernelNodeSetAttribute(to, cudaLaunchAttributePriority, &value);
    }
    return error;
}

template <typename T>
cudaError_t add(cudaGraphNode_t *node, cudaGraph_t graph, cudaMemsetParams fill, const nodes &before)
{
    T *to = (T *)fill.dst;
    T value = (T)fill.value;
    void *arguments[] = {&to, &value, &fill.width};
    cudaKernelNodeParams kernel = {};

    kernel.func = (void *)td_fill<T>;
    kernel.gridDim = dim3((unsigned)((fill.width + THREADS - 1) / THREADS));
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = arguments;
    return cudaGraphAddKernelNode(node, graph, before.all, before.count, &kernel);
}

/* Each node of `from` comes before each of `to`. */
cudaError_t connect(cudaGraph_t graph, const cudaGraphNode_t *from, size_t count, const nodes &to)
{
    cudaError_t error = cudaSuccess;

    for (size_t i = 0; i < count * to.count && error == cudaSuccess; i++)
        error = cudaGraphAddDependencies(graph, &from[i / to.count], &to.all[i % to.count], NO_DATA 1);
    return error;
}

/* Adds a kernel that fills after all of `before` and before all of `after`. */
cudaError_t fill_between(cudaGraph_t graph, const cudaMemsetParams &fill, const nodes &before,
                         const nodes &after)
{
    cudaGraphNode_t kernel;
    cudaError_t error = fill.elementSize == 4   ? add<unsigned>(&kernel, graph, fill, before)
                        : fill.elementSize == 2 ? add<unsigned short>(&kernel, graph, fill, before)
                                                : add<unsigned char>(&kernel, graph, fill, before);

    if (error == cudaSuccess)
        error = connect(graph, &kernel, 1, after);
    return error == cudaSuccess ? copy_priority(after, kernel) : error;
}

/* Replaces the fill by a kernel, or removes it if its memory is `cleared` already. */
cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams &fill, bool cleared)
{
    nodes before, after;
    cudaError_t error = before.read([&](cudaGraphNode_t *list, size_t *count) {
        return cudaGraphNodeGetDependencies(node, list, NO_DATA count);
    });

    if (error == cudaSuccess)
        error = after.read([&](cudaGraphNode_t *list, size_t *count) {
            return cudaGraphNodeGetDependentNodes(node, list, NO_DATA count);
        });
    if (error == cudaSuccess)
        error = cleared ? connect(graph, before.all, before.count, after)
                        : fill_between(graph, fill, before, after);
    return error == cudaSuccess ? cudaGraphDestroyNode(node) : error;
}

} // namespace

cudaError_t td_cuda_fills_to_kernels(cudaGraph_t graph, void *counters, size_t counter_bytes)
{
    const nodes none;
    nodes nodes, roots;
    bool clears = false;
    cudaError_t error = nodes.read(
        [&](cudaGraphNode_t *list, size_t *count) { return cudaGraphGetNodes(graph, list, count); });

    for (size_t i = 0; i < nodes.count && error == cudaSuccess; i++) {
        cudaMemsetParams fill;

        if (!is(nodes.all[i], cudaGraphNodeTypeMemset))
            continue;
        error = cudaGraphMemsetNodeGetParams(nodes.all[i], &fill);
        if (error != cudaSuccess || fill.height > 1 || fill.width * fill.elementSize > MOST_BYTES)
            continue;
        const bool cleared = (uintptr_t)fill.dst - (uintptr_t)counters < counter_bytes && fill.value == 0;
        error = replace(graph, nodes.all[i], fill, cleared);
        clears |= cleared;
    }
    if (!clears || error != cudaSuccess)
        return error;
    error = roots.read(
        [&](cudaGraphNode_t *list, size_t *count) { return cudaGraphGetRootNodes(graph, list, count); });
    return error == cudaSuccess ? fill_between(graph, {counters, 0, 0, 4, counter_bytes / 4, 1}, none, roots)
                                : error;
}
