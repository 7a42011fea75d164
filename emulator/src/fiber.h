// Stacks and switches of fibers.
#pragma once
#include <vector>
#include "runtime.h"

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;

// A fiber: a stack, and the CUDA thread that runs on it now.
struct Fiber {
    Thread view;  // first: `current` points here
    int index = -1;
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    void* asan = nullptr;
    void* tsan = nullptr;
    std::vector<AsyncCopy> open;                 // cp.async: since the last commit,
    std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first,
    std::vector<AsyncCopy> arriving;             // waited for
};

// A stack with a page before it that can't be touched; and back, for the next that asks.
char* take_stack();
void give_stack(char* stack);

// Makes the fiber begin in `entry`, at its next switch.
void prepare(Fiber* fiber, void (*entry)());

}  // namespace emulator

// Saves the callee-saved registers and the stack pointer in *save, and goes on where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void retape_emulator_switch(void** save, void* load);
