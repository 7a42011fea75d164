// What the files of the driver's functions share.
#pragma once
#include <atomic>
#include "stream.h"

#define DRIVER extern "C" __attribute__((visibility("default"))) int

namespace emulator {

// CUresult.
enum Code {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

// The code of what went wrong on a stream; cuGetErrorString tells the reason to this thread from now on.
int code(const Outcome& outcome);

// Whether cuInit was called; whether the thread has a context that lives.
bool initialized();
bool in_context();
#define IN_CONTEXT \
    if (!in_context()) return INVALID_CONTEXT

// The work of all streams, as the null stream's operations wait for it.
Outcome drain_all();

struct Counters {
    std::atomic<uint64_t> launches{0}, modules{0}, pinned{0}, events{0};
};
extern Counters counters;

}  // namespace emulator
