// The shared memory of the blocks of one OS thread: NaN (0xff) as a block begins, guarded at both ends.
#pragma once
#include <stddef.h>
#include <vector>

namespace emulator {

class SharedMemory {
public:
    ~SharedMemory() { drop(); }
    // For a launch with this many bytes a block.
    void prepare(size_t bytes);
    // For its next block.
    void next_block();
    unsigned char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    // TSan takes two blocks at one address for threads that share it: blocks get memory of their own, until there are
    // too many. True where that has just begun anew: what comes from here on is ordered after all before.
    bool reused() const { return reused_; }
    // Whether what lies around it was left alone. ASan sees for itself.
    bool intact() const;

private:
    void drop();

    unsigned char* memory_ = nullptr;
    unsigned char* data_ = nullptr;
    size_t bytes_ = 0, capacity_ = 0, stride_ = 0, places_ = 1, place_ = 0;
    bool reused_ = false;
};

}  // namespace emulator
