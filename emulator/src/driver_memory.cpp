// The driver's functions for memory: the device's, page-locked memory of the host, copies and fills.
#include <stdlib.h>
#include <string.h>
#include <map>
#include "driver.h"
#include "memory.h"

using namespace emulator;

namespace {

char pool;  // the device's memory pool, by its address

// Queues work that reads or writes these ranges of the device's memory, or runs it now, after all else, on the null
// stream.
struct Range {
    uint64_t address;
    size_t bytes;
};
int on_stream(void* handle, Range a, Range b, std::function<void()> work) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    if (!memory().contains(a.address, a.bytes) || !memory().contains(b.address, b.bytes)) return INVALID_VALUE;
    if (handle == nullptr) drain_all();
    Outcome outcome = stream->push([work = std::move(work)] {
        work();
        return Outcome{};
    });
    return code(handle == nullptr ? stream->drain() : outcome);
}

template <class T>
T* at(uint64_t address) {
    return reinterpret_cast<T*>(address);
}
template <class T>
int fill(void* stream, uint64_t address, T value, size_t count) {
    if (address % sizeof(T) != 0) return INVALID_VALUE;
    return on_stream(stream, {address, count * sizeof(T)}, {}, [=] {
        for (size_t i = 0; i < count; i++) at<T>(address)[i] = value;
    });
}

int allocate(uint64_t* address, size_t bytes, bool from_pool) {
    if (bytes == 0) return INVALID_VALUE;
    return memory().allocate(bytes, from_pool, address) ? OK : OUT_OF_MEMORY;
}

}  // namespace

DRIVER cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    IN_CONTEXT;
    return allocate(address, bytes, false);
}
DRIVER cuMemFree_v2(uint64_t address) {
    IN_CONTEXT;
    drain_all();
    size_t bytes;
    if (!memory().retire(address, &bytes)) return INVALID_VALUE;
    const std::string wrong = memory().destroy(address);
    return wrong.empty() ? int(OK) : code({Fault::illegal_address, wrong});
}
DRIVER cuMemAllocAsync(uint64_t* address, size_t bytes, void* handle) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    const int so_far = code(stream->push([] { return Outcome{}; }));
    return so_far != OK ? so_far : allocate(address, bytes, true);
}
DRIVER cuMemFreeAsync(uint64_t address, void* handle) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    size_t bytes;
    if (!memory().retire(address, &bytes)) return INVALID_VALUE;
    const bool always = true;
    const Work destroy = [=]() -> Outcome {
        const std::string wrong = memory().destroy(address);
        return wrong.empty() ? Outcome{} : Outcome{Fault::illegal_address, wrong};
    };
    return code(stream->push(destroy, always, bytes));
}
DRIVER cuMemGetInfo_v2(size_t* free, size_t* total) {
    IN_CONTEXT;
    const MemoryCounts counts = memory().counts();
    *total = counts.total;
    const uint64_t taken = counts.in_use + counts.kept;
    *free = taken < counts.total ? counts.total - taken : 0;
    return OK;
}

DRIVER cuDeviceGetDefaultMemPool(void** found, int device) {
    if (device != 0) return INVALID_DEVICE;
    *found = &pool;
    return OK;
}
DRIVER cuDeviceGetMemPool(void** found, int device) { return cuDeviceGetDefaultMemPool(found, device); }
DRIVER cuMemPoolSetAttribute(void* which, int attribute, void* value) {
    if (which != &pool) return INVALID_HANDLE;
    if (attribute == 4) memory().keep(*static_cast<uint64_t*>(value));  // the release threshold
    return OK;
}
DRIVER cuMemPoolGetAttribute(void* which, int attribute, void* value) {
    if (which != &pool) return INVALID_HANDLE;
    const MemoryCounts counts = memory().counts();
    switch (attribute) {
        case 5: *static_cast<uint64_t*>(value) = counts.in_use + counts.kept; return OK;  // reserved now
        case 7: *static_cast<uint64_t*>(value) = counts.in_use; return OK;                // used now
        default: return NOT_SUPPORTED;
    }
}
DRIVER cuMemPoolTrimTo(void* which, size_t) {
    if (which != &pool) return INVALID_HANDLE;
    memory().trim();
    return OK;
}

// Page-locked memory is garbage when new, and may be freed once all work is done.
DRIVER cuMemAllocHost_v2(void** made, size_t bytes) {
    IN_CONTEXT;
    if (bytes == 0) return INVALID_VALUE;
    if (posix_memalign(made, 4096, bytes) != 0) return OUT_OF_MEMORY;
    memset(*made, 0xff, bytes);
    counters.pinned++;
    return OK;
}
DRIVER cuMemHostAlloc(void** made, size_t bytes, unsigned) { return cuMemAllocHost_v2(made, bytes); }
DRIVER cuMemFreeHost(void* p) {
    IN_CONTEXT;
    drain_all();
    free(p);
    counters.pinned--;
    return OK;
}

DRIVER cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    return on_stream(stream, {to, bytes}, {}, [=] { memcpy(at<void>(to), from, bytes); });
}
DRIVER cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return on_stream(stream, {from, bytes}, {}, [=] { memcpy(to, at<void>(from), bytes); });
}
DRIVER cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    return on_stream(stream, {to, bytes}, {from, bytes}, [=] { memmove(at<void>(to), at<void>(from), bytes); });
}
DRIVER cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr);
}
DRIVER cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr); }
DRIVER cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr);
}

DRIVER cuMemsetD8Async(uint64_t to, unsigned char value, size_t count, void* stream) {
    return fill(stream, to, value, count);
}
DRIVER cuMemsetD16Async(uint64_t to, unsigned short value, size_t count, void* stream) {
    return fill(stream, to, value, count);
}
DRIVER cuMemsetD32Async(uint64_t to, unsigned value, size_t count, void* stream) {
    return fill(stream, to, value, count);
}
DRIVER cuMemsetD8_v2(uint64_t to, unsigned char value, size_t count) { return fill(nullptr, to, value, count); }
DRIVER cuMemsetD16_v2(uint64_t to, unsigned short value, size_t count) { return fill(nullptr, to, value, count); }
DRIVER cuMemsetD32_v2(uint64_t to, unsigned value, size_t count) { return fill(nullptr, to, value, count); }

// For tests.

extern "C" __attribute__((visibility("default"))) void retape_emulator_set_memory(uint64_t bytes) {
    memory().set_total(bytes);
}

// The twin of `Counts` in lib.rs.
struct RetapeEmulatorCounts {
    uint64_t allocations, bytes, kept, trims, launches, modules, streams, pinned;
};
extern "C" __attribute__((visibility("default"))) void retape_emulator_counts(RetapeEmulatorCounts* counts) {
    const MemoryCounts now = memory().counts();
    *counts = {now.allocations, now.in_use, now.kept, now.trims, counters.launches, counters.modules,
               all_streams().size() - 1, counters.pinned};
}
