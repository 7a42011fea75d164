// The driver's functions for devices, contexts, modules, launches, streams and events; those for memory are in
// driver_memory.cpp. Declared as in cuda.h, with its handles and enums as pointers and integers.
#include "driver.h"
#include <stdio.h>
#include <string.h>
#include <chrono>
#include <map>
#include <set>
#include "device.h"
#include "memory.h"

using namespace emulator;

namespace emulator {

Counters counters;

namespace {

std::mutex texts_lock;
thread_local const char* last_reason = nullptr;

// Texts that live forever.
const char* keep(const std::string& text) {
    static auto* texts = new std::set<std::string>;
    std::lock_guard<std::mutex> lock(texts_lock);
    return texts->insert(text).first->c_str();
}

std::atomic<bool> was_initialized{false};
std::atomic<int> primary_users{0};
char primary;  // the context, by its address
thread_local void* context = nullptr;

struct Event {
    std::mutex lock;
    std::shared_ptr<Stream> stream;
    std::chrono::steady_clock::time_point time{};
    bool recorded = false;
};
Event* event_of(void* handle) { return static_cast<Event*>(handle); }

// A kernel in a module. The code is in this library, whatever the image says.
struct Function {
    const Kernel* kernel;
    int most_shared = device::SHARED_BY_DEFAULT;
};
struct Module {
    std::mutex lock;
    std::map<std::string, Function> functions;
};

const char* text_of(int code) {
    switch (code) {
        case OK: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case OUT_OF_MEMORY: return "out of memory";
        case NOT_INITIALIZED: return "initialization error";
        case INVALID_DEVICE: return "invalid device ordinal";
        case INVALID_IMAGE: return "device kernel image is invalid";
        case INVALID_CONTEXT: return "invalid device context";
        case FILE_NOT_FOUND: return "file not found";
        case INVALID_HANDLE: return "invalid resource handle";
        case NOT_FOUND: return "named symbol not found";
        case NOT_READY: return "device not ready";
        case ILLEGAL_ADDRESS: return last_reason ? last_reason : "an illegal memory access was encountered";
        case MISALIGNED_ADDRESS: return last_reason ? last_reason : "misaligned address";
        case LAUNCH_FAILED: return last_reason ? last_reason : "unspecified launch failure";
        case NOT_SUPPORTED: return "operation not supported";
        default: return nullptr;
    }
}

}  // namespace

int code(const Outcome& outcome) {
    if (outcome.fault == Fault::none) return OK;
    last_reason = keep(outcome.reason);
    switch (outcome.fault) {
        case Fault::misaligned: return MISALIGNED_ADDRESS;
        case Fault::illegal_address: return ILLEGAL_ADDRESS;
        default: return LAUNCH_FAILED;
    }
}

bool initialized() { return was_initialized; }
bool in_context() { return context != nullptr && primary_users > 0; }

Outcome drain_all() {
    Outcome outcome;
    for (auto& stream : all_streams()) {
        Outcome one = stream->drain();
        if (outcome.fault == Fault::none) outcome = std::move(one);
    }
    return outcome;
}

}  // namespace emulator

// Errors, versions, devices.

DRIVER cuInit(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    was_initialized = true;
    return OK;
}
DRIVER cuDriverGetVersion(int* version) {
    *version = 13000;
    return OK;
}
DRIVER cuGetErrorString(int code, const char** text) {
    *text = text_of(code);
    return *text ? OK : INVALID_VALUE;
}
DRIVER cuGetErrorName(int code, const char** text) { return cuGetErrorString(code, text); }

DRIVER cuDeviceGetCount(int* count) {
    if (!initialized()) return NOT_INITIALIZED;
    *count = 1;
    return OK;
}
DRIVER cuDeviceGet(int* device, int ordinal) {
    if (!initialized()) return NOT_INITIALIZED;
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return OK;
}
DRIVER cuDeviceGetName(char* name, int size, int device) {
    if (device != 0) return INVALID_DEVICE;
    snprintf(name, static_cast<size_t>(size), "retape's CUDA emulator");
    return OK;
}
DRIVER cuDeviceTotalMem_v2(size_t* bytes, int device) {
    if (device != 0) return INVALID_DEVICE;
    *bytes = memory().counts().total;
    return OK;
}
DRIVER cuDeviceGetUuid(void* id, int device) {
    if (device != 0) return INVALID_DEVICE;
    memset(id, 0, 16);
    return OK;
}
DRIVER cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device != 0) return INVALID_DEVICE;
    *value = device::attribute(attribute);
    return OK;
}

// Contexts: the device's primary one.

DRIVER cuDevicePrimaryCtxRetain(void** made, int device) {
    if (!initialized()) return NOT_INITIALIZED;
    if (device != 0) return INVALID_DEVICE;
    primary_users++;
    *made = &primary;
    return OK;
}
DRIVER cuDevicePrimaryCtxRelease_v2(int) {
    if (primary_users <= 0) return INVALID_CONTEXT;
    primary_users--;
    return OK;
}
DRIVER cuDevicePrimaryCtxSetFlags_v2(int, unsigned) { return OK; }
DRIVER cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = primary_users > 0;
    return OK;
}
DRIVER cuCtxSetCurrent(void* wanted) {
    if (wanted != nullptr && (wanted != &primary || primary_users <= 0)) return INVALID_CONTEXT;
    context = wanted;
    return OK;
}
DRIVER cuCtxGetCurrent(void** found) {
    *found = context;
    return OK;
}
DRIVER cuCtxGetDevice(int* device) {
    IN_CONTEXT;
    *device = 0;
    return OK;
}
DRIVER cuCtxGetApiVersion(void*, unsigned* version) {
    *version = 3020;
    return OK;
}
DRIVER cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    IN_CONTEXT;
    *least = 0;
    *greatest = -5;
    return OK;
}
DRIVER cuCtxSynchronize() {
    IN_CONTEXT;
    return code(drain_all());
}

// Modules and functions.

DRIVER cuModuleLoadDataEx(void** made, const void* image, unsigned, void*, void*) {
    IN_CONTEXT;
    static const unsigned char FATBIN[] = {0x50, 0xed, 0x55, 0xba};
    const bool known = strncmp(static_cast<const char*>(image), "retape emulator", 15) == 0 ||
                       memcmp(image, "\x7f" "ELF", 4) == 0 || memcmp(image, FATBIN, 4) == 0;
    if (!known) return INVALID_IMAGE;
    *made = new Module;
    counters.modules++;
    return OK;
}
DRIVER cuModuleLoadData(void** made, const void* image) { return cuModuleLoadDataEx(made, image, 0, nullptr, nullptr); }
DRIVER cuModuleLoadFatBinary(void** made, const void* image) { return cuModuleLoadData(made, image); }
DRIVER cuModuleUnload(void* module) {
    IN_CONTEXT;
    delete static_cast<Module*>(module);
    counters.modules--;
    return OK;
}
DRIVER cuModuleGetFunction(void** function, void* handle, const char* name) {
    IN_CONTEXT;
    const Kernel* kernel = find_kernel(name);
    if (kernel == nullptr) return NOT_FOUND;
    auto* module = static_cast<Module*>(handle);
    std::lock_guard<std::mutex> lock(module->lock);
    *function = &module->functions.try_emplace(name, Function{kernel}).first->second;
    return OK;
}
DRIVER cuModuleGetGlobal_v2(uint64_t*, size_t*, void*, const char*) { return NOT_FOUND; }

DRIVER cuFuncGetAttribute(int* value, int attribute, void* function) {
    IN_CONTEXT;
    switch (attribute) {
        case 0: *value = device::MOST_THREADS; break;
        case 4: *value = 64; break;                   // registers
        case 5: case 6: *value = 90; break;           // PTX's and the binary's version
        case 8: *value = static_cast<Function*>(function)->most_shared; break;
        default: *value = 0;
    }
    return OK;
}
DRIVER cuFuncSetAttribute(void* function, int attribute, int value) {
    IN_CONTEXT;
    if (attribute == 8) {  // most dynamic shared memory
        if (value < 0 || value > device::MOST_SHARED) return INVALID_VALUE;
        static_cast<Function*>(function)->most_shared = value;
    }
    return OK;
}
DRIVER cuFuncSetCacheConfig(void*, int) { return OK; }
DRIVER cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
    if (index != 0) return INVALID_VALUE;
    *offset = 0;
    *size = static_cast<Function*>(function)->kernel->bytes;
    return OK;
}
DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t shared) {
    IN_CONTEXT;
    *blocks = device::resident_blocks(threads, shared);
    return OK;
}

namespace {

// After a launch: whether it wrote next to the allocations that its parameters point into.
Outcome check_guards(const Kernel& kernel, const std::vector<uint64_t>& parameters) {
    for (uint64_t word : parameters) {
        const std::string wrong = memory().damage_at(word);
        if (!wrong.empty()) return {Fault::illegal_address, std::string(kernel.name) + ": " + wrong};
    }
    return {};
}

}  // namespace

DRIVER cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void* stream_handle, void** parameters,
                      void** extra) {
    IN_CONTEXT;
    auto stream = find_stream(stream_handle);
    if (handle == nullptr || stream == nullptr) return INVALID_HANDLE;
    if (extra != nullptr) return NOT_SUPPORTED;
    const Function& function = *static_cast<Function*>(handle);
    const dim3 grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
    if (!device::can_launch(grid, block) || shared > static_cast<unsigned>(function.most_shared)) return INVALID_VALUE;
    const Kernel& kernel = *function.kernel;
    auto copied = std::make_shared<std::vector<uint64_t>>((kernel.bytes + 7) / 8);
    memcpy(copied->data(), parameters[0], kernel.bytes);
    counters.launches++;
    if (stream_handle == nullptr) drain_all();
    const Outcome outcome = stream->push([=, &kernel] {
        Outcome ran = run(kernel, grid, block, shared, copied->data());
        return ran.fault == Fault::none ? check_guards(kernel, *copied) : ran;
    });
    return code(outcome);
}
DRIVER cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    return code(stream->push([=] {
        function(data);
        return Outcome{};
    }));
}

// Streams and events.

DRIVER cuStreamCreateWithPriority(void** made, unsigned flags, int) {
    IN_CONTEXT;
    *made = add_stream(flags);
    return OK;
}
DRIVER cuStreamCreate(void** made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }
DRIVER cuStreamSynchronize(void* handle) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    return code(handle == nullptr ? drain_all() : stream->drain());
}
DRIVER cuStreamQuery(void* handle) {
    IN_CONTEXT;
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    const bool ready = stream->empty();
    const int result = code(stream->drain());  // so that whoever asks again and again isn't disappointed
    return result != OK ? result : ready ? OK : NOT_READY;
}
DRIVER cuStreamDestroy_v2(void* handle) { return remove_stream(handle) ? OK : INVALID_HANDLE; }
DRIVER cuStreamGetPriority(void*, int* priority) {
    *priority = 0;
    return OK;
}
DRIVER cuStreamGetFlags(void* handle, unsigned* flags) {
    auto stream = find_stream(handle);
    if (stream == nullptr) return INVALID_HANDLE;
    *flags = stream->flags;
    return OK;
}

DRIVER cuEventCreate(void** made, unsigned) {
    IN_CONTEXT;
    *made = new Event;
    counters.events++;
    return OK;
}
DRIVER cuEventDestroy_v2(void* handle) {
    auto stream = event_of(handle)->stream;
    if (stream != nullptr) stream->drain();
    delete event_of(handle);
    counters.events--;
    return OK;
}
DRIVER cuEventRecord(void* handle, void* stream_handle) {
    IN_CONTEXT;
    auto stream = find_stream(stream_handle);
    if (stream == nullptr) return INVALID_HANDLE;
    Event* event = event_of(handle);
    {
        std::lock_guard<std::mutex> lock(event->lock);
        event->stream = stream;
        event->recorded = false;
    }
    return code(stream->push([=] {
        std::lock_guard<std::mutex> lock(event->lock);
        event->time = std::chrono::steady_clock::now();
        event->recorded = true;
        return Outcome{};
    }));
}
DRIVER cuEventSynchronize(void* handle) {
    IN_CONTEXT;
    auto stream = event_of(handle)->stream;
    return stream == nullptr ? int(OK) : code(stream->drain());
}
DRIVER cuEventQuery(void* handle) {
    IN_CONTEXT;
    Event* event = event_of(handle);
    if (event->stream == nullptr) return OK;
    {
        std::lock_guard<std::mutex> lock(event->lock);
        if (event->recorded) return OK;
    }
    event->stream->drain();
    return NOT_READY;
}
DRIVER cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    Event *first = event_of(from), *second = event_of(to);
    if (first->stream == nullptr || second->stream == nullptr) return INVALID_HANDLE;
    if (!first->recorded || !second->recorded) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
    return OK;
}
// What the event comes after is done now: earlier than on a device, and in an order that is allowed.
DRIVER cuStreamWaitEvent(void* handle, void* event, unsigned) {
    IN_CONTEXT;
    if (find_stream(handle) == nullptr) return INVALID_HANDLE;
    auto stream = event_of(event)->stream;
    return stream == nullptr ? int(OK) : code(stream->drain());
}
