// The device's memory: host memory that is NaN (0xff) when new, guarded at both ends, and accounted for as by a
// driver with a memory pool.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <map>
#include <mutex>
#include <string>

namespace emulator {

struct MemoryCounts {
    uint64_t allocations = 0;  // alive
    uint64_t in_use = 0;       // bytes of these
    uint64_t kept = 0;         // bytes that the pool keeps for later
    uint64_t trims = 0;        // of the pool
    uint64_t total = 0;        // bytes of the device
};

class DeviceMemory {
public:
    // False where there isn't as much. From the pool: a piece of exactly this size that it keeps, else new memory.
    bool allocate(size_t bytes, bool from_pool, uint64_t* address);
    // Ends the allocation as far as calls can see, at their time: false where it isn't one.
    bool retire(uint64_t address, size_t* bytes);
    // Gives back what was retired, at the stream's time: what is wrong with its guards, or nothing.
    std::string destroy(uint64_t address);

    // Whether a call may touch these bytes.
    bool contains(uint64_t address, size_t bytes);
    // The allocation, alive or retired, that the address points into, if its guards were written to.
    std::string damage_at(uint64_t address);

    void keep(uint64_t threshold);
    void trim();
    void set_total(uint64_t bytes);
    MemoryCounts counts();

private:
    struct Allocation {
        size_t bytes;
        void* memory;
        bool retired, from_pool;
    };
    std::map<uint64_t, Allocation>::iterator find(uint64_t address);
    static std::string damage(uint64_t address, const Allocation& allocation);

    std::mutex lock_;
    std::map<uint64_t, Allocation> allocations_;
    std::map<size_t, size_t> pool_;  // pieces kept, by size
    bool keeps_ = false;
    MemoryCounts counts_;
};

DeviceMemory& memory();

}  // namespace emulator
