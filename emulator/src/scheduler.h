// Runs a launch. For the driver and for tests of the emulator.
#pragma once
#include <string>
#include "runtime.h"

namespace emulator {

// The kernel with this name, or null.
const Kernel* find_kernel(const char* name);

enum class Fault { none, failed, misaligned, illegal_address };

struct Outcome {
    Fault fault = Fault::none;
    std::string reason;  // names kernel, block, thread, file and line
};

// Runs all blocks of a launch, one after the other, on the calling OS thread.
Outcome run(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, const void* parameters);

// Writes `value` to `bytes` bytes, unseen by the sanitizers' runtimes.
inline void fill_unseen(void* p, unsigned char value, size_t bytes) {
    asm volatile("rep stosb" : "+D"(p), "+c"(bytes) : "a"(value) : "memory");
}

}  // namespace emulator
