#include "fiber.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <mutex>
#include "sanitizers.h"

asm(R"(
.text
.globl retape_emulator_switch
.hidden retape_emulator_switch
.type retape_emulator_switch, @function
retape_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size retape_emulator_switch, . - retape_emulator_switch
)");

namespace emulator {
namespace {

std::mutex guard;
std::vector<char*>& free_stacks() {
    static auto* stacks =
        new std::vector<char*>;  // never destroyed: threads may end after the process's destructors began
    return *stacks;
}

}  // namespace

bool AsyncCopies::pop(size_t keep, AsyncCopy* copy) {
    while (ends.size() - groups_done > keep) {
        if (done < ends[groups_done]) {
            *copy = copies[done++];
            return true;
        }
        groups_done++;
    }
    if (groups_done >= 64) {  // forget what is done
        copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
        ends.erase(ends.begin(), ends.begin() + static_cast<std::ptrdiff_t>(groups_done));
        for (size_t& end : ends) end -= done;
        done = groups_done = 0;
    }
    return false;
}

char* take_stack() {
    {
        std::lock_guard<std::mutex> lock(guard);
        auto& stacks = free_stacks();
        if (!stacks.empty()) {
            char* stack = stacks.back();
            stacks.pop_back();
            return stack;
        }
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
    void* memory = mmap(nullptr, STACK_GUARD + STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, STACK_GUARD, PROT_NONE) != 0) {
        perror("retape's CUDA emulator: no memory for the stack of a CUDA thread");
        abort();
    }
    return static_cast<char*>(memory) + STACK_GUARD;
}

void give_stack(char* stack) {
    std::lock_guard<std::mutex> lock(guard);
    free_stacks().push_back(stack);
}

void prepare(Fiber* fiber, void (*entry)()) {
    if (with_asan()) __asan_unpoison_memory_region(fiber->stack, STACK_BYTES);  // an abandoned frame's redzones
    auto** top = reinterpret_cast<void**>(fiber->stack + STACK_BYTES);
    *--top = nullptr;  // where entry would return to; it doesn't. As after a call, the stack is 8 off a multiple of 16
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->stack_pointer = top;
    fiber->asan = nullptr;
}

}  // namespace emulator
