// What the sanitizers' runtimes want to be told: all weak, and null where the process runs without them. The emulator
// itself is compiled without sanitizers; kernels may be compiled with them.
#pragma once
#include <stddef.h>

extern "C" {
#define WEAK __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
WEAK void __asan_poison_memory_region(const volatile void* p, size_t size);
WEAK void __asan_unpoison_memory_region(const volatile void* p, size_t size);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void* fiber);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_acquire(void* p);
WEAK void __tsan_release(void* p);
#undef WEAK
}

namespace emulator {

inline bool with_asan() { return __asan_poison_memory_region != nullptr; }
inline bool with_tsan() { return __tsan_create_fiber != nullptr; }
constexpr unsigned TSAN_NO_SYNC = 1;  // switching fibers orders nothing

}  // namespace emulator
