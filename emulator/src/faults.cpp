#include "faults.h"
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>
#include <mutex>
#include "runtime.h"
#include "sanitizers.h"

namespace emulator {
namespace {

struct sigaction previous_segv, previous_bus;

void handle(int signal, siginfo_t* info, void* context) {
    if (current == nullptr) {
        // Not in a kernel: as before this handler came, at the instruction that is tried again.
        sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);
        return;
    }
    // Returns into `at_fault` on the thread's own stack, below the red zone, as if called there.
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const bool known = info->si_code > 0 && info->si_code != SI_KERNEL;  // a misaligned vector access names no address
    registers[REG_RDI] = known ? static_cast<greg_t>(reinterpret_cast<uintptr_t>(info->si_addr)) : 0;
    registers[REG_RSI] = registers[REG_RIP];
    registers[REG_RSP] = ((registers[REG_RSP] - 256) & ~greg_t(15)) - 8;
    registers[REG_RIP] = reinterpret_cast<greg_t>(at_fault);
}

}  // namespace

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        if (with_asan() || with_tsan()) return;  // they report for themselves
        struct sigaction action {};
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &previous_segv);
        sigaction(SIGBUS, &action, &previous_bus);
    });
}

}  // namespace emulator
