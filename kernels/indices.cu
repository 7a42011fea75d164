// A look at indices before they are used: the first that is out of range.
#include "block.cuh"
#include "tensor.cuh"

struct CheckIndices {
    Tensor indices;
    int64_t low, end;  // allowed are low .. end - 1,
    int64_t ignore;    // and this, if
    int32_t ignores;   // isn't 0
    int32_t padding;
    int64_t* bad;  // for each block, the first bad position that it has seen, else the largest number
};

struct Earlier {
    DEVICE int64_t operator()(int64_t a, int64_t b) const { return a < b ? a : b; }
};

KERNEL check_indices(const CheckIndices p) {
    SHARED_MEMORY(memory);
    const int64_t n = p.indices.count(), step = int64_t(gridDim.x) * blockDim.x;
    int64_t first = INT64_MAX;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n && first == INT64_MAX; i += step) {
        const int64_t index = load_index(p.indices, p.indices.offset(i));
        if ((index < p.low || index >= p.end) && !(p.ignores && index == p.ignore)) first = i;
    }
    first = block_fold(first, int64_t(INT64_MAX), reinterpret_cast<int64_t*>(memory), Earlier());
    if (threadIdx.x == 0) p.bad[blockIdx.x] = first;
}
