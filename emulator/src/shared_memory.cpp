#include "shared_memory.h"
#include <stdlib.h>
#include "sanitizers.h"
#include "scheduler.h"

namespace emulator {
namespace {
constexpr size_t GUARD = 256;           // bytes before and after
constexpr size_t BEFORE = GUARD + 128;  // so that addresses are multiples of 128, and of nothing larger
constexpr size_t TSAN_BYTES = 64 << 20;
constexpr unsigned char UNWRITTEN = 0xff, GUARDED = 0xfd;
}  // namespace

void SharedMemory::drop() {
    if (memory_ == nullptr) return;
    if (with_asan()) __asan_unpoison_memory_region(memory_, capacity_);
    free(memory_);
    memory_ = nullptr;
}

void SharedMemory::prepare(size_t bytes) {
    place_ = 0;
    reused_ = false;  // by other launches: they are ordered
    if (memory_ != nullptr && bytes == bytes_) return;
    bytes_ = bytes;
    stride_ = (BEFORE + bytes + GUARD + 255) / 256 * 256;
    const size_t needed = with_tsan() && stride_ < TSAN_BYTES ? TSAN_BYTES : stride_;
    if (memory_ == nullptr || capacity_ < needed) {
        drop();
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, needed) != 0) abort();
        memory_ = static_cast<unsigned char*>(memory);
        capacity_ = needed;
    }
    places_ = with_tsan() ? capacity_ / stride_ : 1;
    if (with_asan()) {
        __asan_poison_memory_region(memory_, capacity_);
        __asan_unpoison_memory_region(memory_ + BEFORE, bytes_);
    }
}

void SharedMemory::next_block() {
    reused_ = with_tsan() && place_ == places_;
    if (place_ == places_) place_ = 0;
    data_ = memory_ + place_++ * stride_ + BEFORE;
    if (!with_asan()) {
        fill_unseen(data_ - GUARD, GUARDED, GUARD);
        fill_unseen(data_ + bytes_, GUARDED, GUARD);
    }
    fill_unseen(data_, UNWRITTEN, bytes_);
}

bool SharedMemory::intact() const {
    if (with_asan()) return true;
    for (size_t i = 1; i <= GUARD; i++)
        if (data_[-i] != GUARDED || data_[bytes_ + i - 1] != GUARDED) return false;
    return true;
}

}  // namespace emulator
