// The table of kernels, filled as the library is loaded.
#include <map>
#include <string>
#include "scheduler.h"

namespace emulator {
namespace {
std::map<std::string, Kernel>& table() {
    static std::map<std::string, Kernel> kernels;
    return kernels;
}
}  // namespace

void add_kernel(const Kernel& kernel) { table()[kernel.name] = kernel; }

const Kernel* find_kernel(const char* name) {
    auto found = table().find(name);
    return found == table().end() ? nullptr : &found->second;
}
}  // namespace emulator
