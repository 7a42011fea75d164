#include "device.h"
#include <algorithm>

namespace emulator::device {
namespace {
constexpr int MULTIPROCESSORS = 132;
constexpr int THREADS_OF_ONE = 2048;       // of a multiprocessor
constexpr int SHARED_OF_ONE = 228 << 10;
constexpr int BLOCKS_OF_ONE = 32;
constexpr unsigned MOST_Z = 64, MOST_BLOCKS = 0x7fffffff, MOST_BLOCKS_YZ = 65535;
}  // namespace

int attribute(int which) {
    switch (which) {
        case 1: return MOST_THREADS;
        case 2: case 3: return MOST_THREADS;          // of a block, along x and y
        case 4: return MOST_Z;
        case 5: return MOST_BLOCKS;
        case 6: case 7: return MOST_BLOCKS_YZ;
        case 8: return SHARED_BY_DEFAULT;
        case 9: return 64 << 10;                      // constant memory
        case 10: return 32;                           // warp size
        case 12: return 64 << 10;                     // registers of a block
        case 13: return 1'980'000;                    // kHz
        case 14: return 512;                          // alignment of textures
        case 16: return MULTIPROCESSORS;
        case 19: return 1;                            // can map host memory
        case 31: return 1;                            // concurrent kernels
        case 32: return 1;                            // ECC
        case 36: return 3'201'000;                    // kHz of the memory
        case 37: return 6144;                         // bits of the memory bus
        case 38: return 60 << 20;                     // L2 cache
        case 39: return THREADS_OF_ONE;
        case 40: return 3;                            // copy engines
        case 41: return 1;                            // unified addressing
        case 75: return 9;                            // compute capability
        case 76: return 0;
        case 78: return 1;                            // stream priorities
        case 81: return SHARED_OF_ONE;
        case 82: return 64 << 10;                     // registers of a multiprocessor
        case 95: return 1;                            // cooperative launch
        case 97: return MOST_SHARED;
        case 106: return BLOCKS_OF_ONE;
        case 111: return 1 << 10;                     // shared memory that the system takes of each block
        case 115: return 1;                           // memory pools
        default: return 0;
    }
}

bool can_launch(dim3 grid, dim3 block) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) return false;
    if (grid.x > MOST_BLOCKS || grid.y > MOST_BLOCKS_YZ || grid.z > MOST_BLOCKS_YZ) return false;
    if (block.x > MOST_THREADS || block.y > MOST_THREADS || block.z > MOST_Z) return false;
    return block.x * block.y * block.z <= MOST_THREADS;
}

int resident_blocks(int threads, size_t shared) {
    if (threads <= 0 || threads > MOST_THREADS) return 0;
    const int by_shared = SHARED_OF_ONE / static_cast<int>(std::min<size_t>(shared, SHARED_OF_ONE) + (1 << 10));
    return std::min({THREADS_OF_ONE / ((threads + 31) / 32 * 32), by_shared, BLOCKS_OF_ONE});
}

}  // namespace emulator::device
