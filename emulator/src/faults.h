// Faults of the machine in a kernel (an address that isn't there, a misaligned vector access) as errors of the launch.
#pragma once
#include <stdint.h>

namespace emulator {

// Has SIGSEGV and SIGBUS in a kernel end its launch; elsewhere they do what they did. Once is enough.
void catch_faults();

// A stack for the handler, for this OS thread if it has none: a fiber's may be full.
class SignalStack {
public:
    SignalStack();
    ~SignalStack();
    SignalStack(const SignalStack&) = delete;

private:
    void* memory_ = nullptr;
};

// Where the handler returns to, on the stack of the CUDA thread at fault: ends the launch.
[[noreturn]] void at_fault(uintptr_t address, uintptr_t instruction);

}  // namespace emulator
