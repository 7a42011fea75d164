#include "faults.h"
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>
#include <mutex>
#include "fiber.h"
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
    // Returns into `at_fault`, as if it were called first thing on the fiber's stack: nobody will need what is there,
    // and there may be no room below.
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const bool known = info->si_code > 0 && info->si_code != SI_KERNEL;  // a misaligned vector access names no address
    registers[REG_RDI] = known ? static_cast<greg_t>(reinterpret_cast<uintptr_t>(info->si_addr)) : 0;
    registers[REG_RSI] = registers[REG_RIP];
    registers[REG_RSP] = reinterpret_cast<greg_t>(reinterpret_cast<Fiber*>(current)->stack + STACK_BYTES) - 8;
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

SignalStack::SignalStack() {
    stack_t present;
    if (sigaltstack(nullptr, &present) != 0 || !(present.ss_flags & SS_DISABLE)) return;
    constexpr size_t BYTES = 64 << 10;
    memory_ = malloc(BYTES);
    stack_t made{};
    made.ss_sp = memory_;
    made.ss_size = BYTES;
    sigaltstack(&made, nullptr);
}

SignalStack::~SignalStack() {
    if (memory_ == nullptr) return;
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
    free(memory_);
}

}  // namespace emulator
