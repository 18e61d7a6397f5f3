#include "kernels/fills.h"

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

template <typename T> cudaError_t add(cudaGraphNode_t *node, cudaGraph_t graph, cudaMemsetParams fill)
{
    T *to = (T *)fill.dst;
    T value = (T)fill.value;
    void *arguments[] = {&to, &value, &fill.width};
    cudaKernelNodeParams kernel = {};

    kernel.func = (void *)td_fill<T>;
    kernel.gridDim = dim3((unsigned)((fill.width + THREADS - 1) / THREADS));
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = arguments;
    return cudaGraphAddKernelNode(node, graph, nullptr, 0, &kernel);
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

/* Gives the kernel the priority of a kernel that waits for it. Both were captured from one stream. */
cudaError_t copy_priority(const nodes &from, cudaGraphNode_t to)
{
    cudaError_t error = cudaSuccess;

    for (size_t i = 0; i < from.count && error == cudaSuccess; i++) {
        cudaGraphNodeType type;
        cudaKernelNodeAttrValue value;

        error = cudaGraphNodeGetType(from.all[i], &type);
        if (error != cudaSuccess || type != cudaGraphNodeTypeKernel)
            continue;
        error = cudaGraphKernelNodeGetAttribute(from.all[i], cudaLaunchAttributePriority, &value);
        if (error == cudaSuccess)
            error = cudaGraphKernelNodeSetAttribute(to, cudaLaunchAttributePriority, &value);
    }
    return error;
}

cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node)
{
    cudaMemsetParams fill;
    cudaGraphNode_t kernel;
    nodes before, after;
    cudaError_t error = cudaGraphMemsetNodeGetParams(node, &fill);

    if (error != cudaSuccess || fill.height > 1 || fill.width * fill.elementSize > MOST_BYTES)
        return error;
    error = fill.elementSize == 4   ? add<unsigned>(&kernel, graph, fill)
            : fill.elementSize == 2 ? add<unsigned short>(&kernel, graph, fill)
                                    : add<unsigned char>(&kernel, graph, fill);
    if (error == cudaSuccess)
        error = before.read([&](cudaGraphNode_t *list, size_t *count) {
            return cudaGraphNodeGetDependencies(node, list, NO_DATA count);
        });
    if (error == cudaSuccess)
        error = after.read([&](cudaGraphNode_t *list, size_t *count) {
            return cudaGraphNodeGetDependentNodes(node, list, NO_DATA count);
        });
    for (size_t i = 0; i < before.count && error == cudaSuccess; i++)
        error = cudaGraphAddDependencies(graph, &before.all[i], &kernel, NO_DATA 1);
    for (size_t i = 0; i < after.count && error == cudaSuccess; i++)
        error = cudaGraphAddDependencies(graph, &kernel, &after.all[i], NO_DATA 1);
    if (error == cudaSuccess)
        error = copy_priority(after, kernel);
    return error == cudaSuccess ? cudaGraphDestroyNode(node) : error;
}

} // namespace

cudaError_t td_cuda_fills_to_kernels(cudaGraph_t graph)
{
    nodes nodes;
    cudaError_t error = nodes.read(
        [&](cudaGraphNode_t *list, size_t *count) { return cudaGraphGetNodes(graph, list, count); });

    for (size_t i = 0; i < nodes.count && error == cudaSuccess; i++) {
        cudaGraphNodeType type;

        error = cudaGraphNodeGetType(nodes.all[i], &type);
        if (error == cudaSuccess && type == cudaGraphNodeTypeMemset)
            error = replace(graph, nodes.all[i]);
    }
    return error;
}
