// Runs the multiplication of planted.cuh with the fault whose number it is given; "ok", or what went wrong.
#include "planted.cuh"
#include <stdio.h>
#include <stdlib.h>
#include <utility>
#include <vector>
#include "memory.h"
#include "scheduler.h"

using emulator::Fault;
using emulator::Kernel;
using emulator::memory;
using emulator::Outcome;

namespace {

template <int bug>
void call(const void* parameters) {
    multiply<bug>(*static_cast<const Multiply*>(parameters));
}
template <int... bugs>
Kernel kernel_with(int bug, std::integer_sequence<int, bugs...>) {
    void (*const calls[])(const void*) = {call<bugs>...};
    return {"multiply", sizeof(Multiply), calls[bug]};
}

using Bugs = std::make_integer_sequence<int, STACK_OVERFLOW + 1>;

template <class T>
T* make(size_t count) {
    uint64_t address;
    if (!memory().allocate(count * sizeof(T), false, &address)) abort();
    return reinterpret_cast<T*>(address);
}

// Small whole numbers: their sums are exact.
float number(int i, int salt) { return static_cast<float>((i * 7919 + salt) % 17 - 8); }

}  // namespace

int main(int, char** arguments) {
    const int m = 40, n = 28, k = 40;
    auto *a = make<__nv_bfloat16>(m * k), *b = make<__nv_bfloat16>(n * k);
    auto *c = make<float>(m * n);
    auto* done = make<int>(1);
    for (int i = 0; i < m * k; i++) a[i] = number(i, 3);
    for (int i = 0; i < n * k; i++) b[i] = number(i, 5);
    *done = 0;
    const Multiply parameters{a, b, c, done, m, n, k};
    // First without a fault: what a launch leaves behind must not hide what is wrong with the next one.
    for (const int bug : {int(NONE), atoi(arguments[1])}) {
        const dim3 blocks{(n + COLUMNS - 1) / COLUMNS, (m + ROWS - 1) / ROWS, 1};
        const Outcome outcome = emulator::run(kernel_with(bug, Bugs()), blocks, {64, 1, 1}, SHARED, &parameters);
        if (outcome.fault != Fault::none) return printf("FAULT: %s\n", outcome.reason.c_str()), 1;
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0.0f;
            for (int l = 0; l < k; l++) sum += float(a[i * k + l]) * float(b[j * k + l]);
            if (c[i * n + j] != sum) return printf("WRONG: %g at (%d, %d), not %g\n", c[i * n + j], i, j, sum), 1;
        }
    for (void* p : {(void*)a, (void*)b, (void*)c, (void*)done}) {
        size_t bytes;
        memory().retire(reinterpret_cast<uint64_t>(p), &bytes);
        const std::string wrong = memory().destroy(reinterpret_cast<uint64_t>(p));
        if (!wrong.empty()) return printf("DAMAGE: %s\n", wrong.c_str()), 1;
    }
    return puts("ok"), 0;
}
