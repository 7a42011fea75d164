#include "memory.h"
#include <stdlib.h>
#include "sanitizers.h"
#include "scheduler.h"

namespace emulator {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr size_t GUARD = 256;
constexpr unsigned char FRESH = 0xff;  // NaN; guards too, so that what is read past an end shows
constexpr uint64_t TOTAL = uint64_t(4) << 30;

size_t guard() { return with_asan() ? 0 : GUARD; }  // ASan guards memory itself, better

}  // namespace

DeviceMemory& memory() {
    static auto* one = [] {
        auto* made = new DeviceMemory;
        const char* text = getenv("RETAPE_EMULATOR_MEMORY");
        made->set_total(text ? strtoull(text, nullptr, 10) : TOTAL);
        return made;
    }();
    return *one;
}

bool DeviceMemory::allocate(size_t bytes, bool from_pool, uint64_t* address) {
    Lock lock(lock_);
    auto piece = from_pool ? pool_.find(bytes) : pool_.end();
    if (piece != pool_.end()) {
        counts_.kept -= bytes;
        if (--piece->second == 0) pool_.erase(piece);
    } else if (counts_.in_use + counts_.kept + bytes > counts_.total) {
        return false;
    }
    // Aligned to 256 bytes and to no more, and of exactly this size.
    void* raw = nullptr;
    if (posix_memalign(&raw, 2 * GUARD, guard() + bytes + guard()) != 0) return false;
    fill_unseen(raw, FRESH, guard() + bytes + guard());
    *address = reinterpret_cast<uint64_t>(raw) + guard();
    allocations_[*address] = {bytes, raw, false, from_pool};
    counts_.allocations++;
    counts_.in_use += bytes;
    return true;
}

bool DeviceMemory::retire(uint64_t address, size_t* bytes) {
    Lock lock(lock_);
    auto found = allocations_.find(address);
    if (found == allocations_.end() || found->second.retired) return false;
    Allocation& allocation = found->second;
    allocation.retired = true;
    *bytes = allocation.bytes;
    counts_.allocations--;
    counts_.in_use -= allocation.bytes;
    if (allocation.from_pool && keeps_) {
        counts_.kept += allocation.bytes;
        pool_[allocation.bytes]++;
    }
    return true;
}

std::string DeviceMemory::destroy(uint64_t address) {
    Lock lock(lock_);
    auto found = allocations_.find(address);
    const std::string wrong = damage(address, found->second);
    free(found->second.memory);
    allocations_.erase(found);
    return wrong;
}

std::map<uint64_t, DeviceMemory::Allocation>::iterator DeviceMemory::find(uint64_t address) {
    auto next = allocations_.upper_bound(address);
    if (next == allocations_.begin()) return allocations_.end();
    --next;
    return address <= next->first + next->second.bytes ? next : allocations_.end();
}

bool DeviceMemory::contains(uint64_t address, size_t bytes) {
    if (bytes == 0) return true;
    Lock lock(lock_);
    auto found = find(address);
    return found != allocations_.end() && !found->second.retired &&
           bytes <= found->second.bytes - (address - found->first);
}

std::string DeviceMemory::damage(uint64_t address, const Allocation& allocation) {
    const auto* data = reinterpret_cast<const unsigned char*>(address);
    for (size_t i = 0; i < guard(); i++) {
        if (data[allocation.bytes + i] != FRESH)
            return "byte " + std::to_string(i) + " after an allocation of " + std::to_string(allocation.bytes) +
                   " bytes was written";
        if (data[-1 - static_cast<std::ptrdiff_t>(i)] != FRESH)
            return "byte " + std::to_string(i + 1) + " before an allocation of " + std::to_string(allocation.bytes) +
                   " bytes was written";
    }
    return "";
}

std::string DeviceMemory::damage_at(uint64_t address) {
    Lock lock(lock_);
    auto found = find(address);
    if (found == allocations_.end()) return "";
    std::string wrong = damage(found->first, found->second);
    if (!wrong.empty()) {  // told once
        const size_t bytes = found->second.bytes;
        fill_unseen(found->second.memory, FRESH, guard());
        fill_unseen(reinterpret_cast<void*>(found->first + bytes), FRESH, guard());
    }
    return wrong;
}

void DeviceMemory::keep(uint64_t threshold) {
    Lock lock(lock_);
    keeps_ = threshold > 0;
}

void DeviceMemory::trim() {
    Lock lock(lock_);
    pool_.clear();
    counts_.kept = 0;
    counts_.trims++;
}

void DeviceMemory::set_total(uint64_t bytes) {
    Lock lock(lock_);
    counts_.total = bytes;
}

MemoryCounts DeviceMemory::counts() {
    Lock lock(lock_);
    return counts_;
}

}  // namespace emulator
