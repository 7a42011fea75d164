// What the kernels of matmul.cu and matmul_mma.cu have in common: the product's operands, and the order of its tiles.
#pragma once
#include "tensor.cuh"

// Strides of a matrix, in elements.
struct Steps {
    int64_t row, column;
};

// out (+)= alpha a b: [.., m, k] x [.., k, n] -> [.., m, n]. The tensors hold the batch dimensions alone.
struct Matmul {
    Tensor a, b, out;
    Steps a_steps, b_steps, out_steps;
    int64_t m, n, k;
    int64_t down, across, tiles;  // tiles of out: in a column and a row of them, and in the whole batch
    double alpha;
    int32_t accumulate;
    // In each, every row (along the dimension whose stride is 1) starts 16-byte aligned.
    int32_t aligned_a, aligned_b, aligned_out;
};

// A tile of out: which matrix of the batch, and its first row and column.
struct Place {
    int64_t batch, row, column;
};

// Tiles in an order that goes down 8 rows of tiles before it goes right, so that blocks that run at the same time
// read few different rows of a and columns of b.
DEVICE Place place_of(const Matmul& p, int64_t tile, int size) {
    constexpr int64_t TOGETHER = 8;
    const int64_t batch = tile / (p.down * p.across);
    tile -= batch * p.down * p.across;
    const int64_t group = tile / (TOGETHER * p.across), first = group * TOGETHER;
    const int64_t height = p.down - first < TOGETHER ? p.down - first : TOGETHER;
    tile -= group * TOGETHER * p.across;
    return {batch, (first + tile % height) * size, tile / height * size};
}
