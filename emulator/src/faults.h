// Faults of the machine in a kernel (an address that isn't there, a misaligned vector access) as errors of the launch.
#pragma once
#include <stdint.h>

namespace emulator {

// Has SIGSEGV and SIGBUS in a kernel end its launch; elsewhere they do what they did. Once is enough.
void catch_faults();

// Called by the handler, on the stack of the thread at fault: ends the launch.
[[noreturn]] void at_fault(uintptr_t address, uintptr_t instruction);

}  // namespace emulator
