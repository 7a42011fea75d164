// What compiled kernels call in the scheduler.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "vector_types.h"

namespace emulator {

// Where a kernel calls an operation. As the default of a last parameter it is the caller's line.
struct Place {
    const char* file;
    int line;
};
#define EMULATOR_HERE emulator::Place at = {__builtin_FILE(), __builtin_LINE()}

// The running CUDA thread.
struct Thread {
    uint3 thread, block;
    dim3 threads, blocks;
    int lane;
};
// The model: other OS threads may run launches of their own, and a fiber never leaves its OS thread.
extern __thread Thread* current __attribute__((tls_model("initial-exec"), visibility("hidden")));

unsigned char* shared_memory();

// __syncthreads. Returns how many of the threads gave true.
int barrier(bool vote, Place at);

// An operation of the lanes in `mask`: each comes with its own `data`; the last one runs `together` over all that
// came, whose set is `lanes`, then all go on. `orders_memory`: what one wrote before, all see after.
typedef void (*Together)(void* const* data, uint32_t lanes, Place at);
void meet(uint32_t mask, void* data, Together together, bool orders_memory, const char* name, Place at);

// The running thread's cp.async copies: those started, and the groups that they were closed into. `pop` gives one
// copy of a group older than the newest `keep`, until there are none.
struct AsyncCopy {
    void* shared;
    const void* global;
    int bytes;
};
void async_push(const AsyncCopy& copy);
void async_commit();
bool async_pop(int keep, AsyncCopy* copy);

// Ends the launch with an error of the running thread. Doesn't return.
[[noreturn]] void fail(const char* reason, Place at);

// The table of kernels.
struct Kernel {
    const char* name;
    size_t bytes;  // of its parameters
    void (*call)(const void* parameters);
};
void add_kernel(const Kernel& kernel);

template <auto function>
struct Register;
template <class P, void (*function)(P)>
struct Register<function> {
    static void call(const void* parameters) { function(*static_cast<const P*>(parameters)); }
    explicit Register(const char* name) { add_kernel({name, sizeof(P), call}); }
};

}  // namespace emulator
