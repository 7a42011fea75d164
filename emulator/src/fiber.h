// Stacks and switches of fibers.
#pragma once
#include <vector>
#include "runtime.h"

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t STACK_GUARD = 4096;  // a page before it

// The cp.async copies of one thread, oldest first, and how far its groups reach.
struct AsyncCopies {
    std::vector<AsyncCopy> copies;
    std::vector<size_t> ends;       // of groups that were closed
    size_t done = 0, groups_done = 0;

    void clear() { copies.clear(), ends.clear(), done = groups_done = 0; }
    bool pop(size_t keep, AsyncCopy* copy);
};

// A fiber: a stack, and the CUDA thread that runs on it now.
struct Fiber {
    Thread view;  // first: `current` points here
    int index = -1;
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    void* asan = nullptr;
    void* tsan = nullptr;
    AsyncCopies copies;
};

// A stack with a page before it that can't be touched; and back, for the next that asks.
char* take_stack();
void give_stack(char* stack);

// Makes the fiber begin in `entry`, at its next switch.
void prepare(Fiber* fiber, void (*entry)());

}  // namespace emulator

// Saves the callee-saved registers and the stack pointer in *save, and goes on where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void retape_emulator_switch(void** save, void* load);
