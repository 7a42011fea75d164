#include "shared_memory.h"
#include <stdlib.h>
#include "sanitizers.h"
#include "scheduler.h"

namespace emulator {
namespace {
constexpr size_t GUARD = 256;  // before and after; addresses are multiples of 128 and of nothing larger
constexpr size_t TSAN_BYTES = 64 << 20;
constexpr unsigned char UNWRITTEN = 0xff, GUARDED = 0xfd;
}  // namespace

void SharedMemory::drop() {
    if (memory_ == nullptr) return;
    if (with_asan()) __asan_unpoison_memory_region(memory_, places_ * stride_);
    free(memory_);
    memory_ = nullptr;
}

void SharedMemory::prepare(size_t bytes) {
    place_ = 0;
    reused_ = false;  // by other launches: they are ordered
    if (memory_ != nullptr && bytes == bytes_) return;
    drop();
    bytes_ = bytes;
    stride_ = (GUARD + 128 + bytes + GUARD + 255) / 256 * 256;
    places_ = with_tsan() ? TSAN_BYTES / stride_ : 1;
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, places_ * stride_) != 0) abort();
    memory_ = static_cast<unsigned char*>(memory);
    if (with_asan()) {
        __asan_poison_memory_region(memory_, stride_);
        __asan_unpoison_memory_region(memory_ + GUARD + 128, bytes_);
    } else {
        for (size_t i = 0; i < places_; i++) fill_unseen(memory_ + i * stride_, GUARDED, stride_);
    }
    data_ = memory_ + GUARD + 128;
}

void SharedMemory::next_block() {
    reused_ = with_tsan() && place_ == places_;
    if (place_ == places_) place_ = 0;
    data_ = memory_ + place_++ * stride_ + GUARD + 128;
    fill_unseen(data_, UNWRITTEN, bytes_);
}

bool SharedMemory::intact() const {
    if (with_asan()) return true;
    for (size_t i = 1; i <= GUARD; i++)
        if (data_[-i] != GUARDED || data_[bytes_ + i - 1] != GUARDED) return false;
    return true;
}

}  // namespace emulator
