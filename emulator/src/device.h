// The device that is emulated: an H200's numbers.
#pragma once
#include <stddef.h>
#include "vector_types.h"

namespace emulator::device {

constexpr int MOST_THREADS = 1024;
constexpr int SHARED_BY_DEFAULT = 48 << 10;
constexpr int MOST_SHARED = 227 << 10;

// CUdevice_attribute; 0 for what is unknown here.
int attribute(int which);
bool can_launch(dim3 grid, dim3 block);
int resident_blocks(int threads, size_t shared);

}  // namespace emulator::device
