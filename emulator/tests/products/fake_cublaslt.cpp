// A stand-in for cuBLASLt over the emulator's memory, to test how crates/cuda/src/cublas.rs calls it. It aborts on any
// argument that the documentation forbids, finds one "algorithm" that works only for what it was asked for, and
// computes each element by itself. At the end of the process it writes what it was used for to the file in
// FAKE_CUBLASLT_LOG.
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <atomic>
#include <initializer_list>
#include "halves.h"

namespace {

enum Status { SUCCESS = 0, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum Compute { COMPUTE_32F = 68, COMPUTE_64F = 70 };

std::atomic<int> products{0}, heuristics{0}, alive{0};

struct AtExit {
    ~AtExit() {
        const char* path = getenv("FAKE_CUBLASLT_LOG");
        FILE* log = path == nullptr ? nullptr : fopen(path, "w");
        if (log == nullptr) return;
        fprintf(log, "products %d heuristics %d alive %d\n", products.load(), heuristics.load(), alive.load());
        fclose(log);
    }
} at_exit;

[[noreturn]] void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "fake cuBLASLt: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    abort();
}
#define REQUIRE(condition) ((condition) ? void() : fail("line %d: not %s", __LINE__, #condition))

// What a handle points to; each kind knows itself by a number.
struct Handle {
    static constexpr uint64_t KIND = 0xA1;
    uint64_t kind = KIND;
};
struct Desc {
    static constexpr uint64_t KIND = 0xA2;
    uint64_t kind = KIND;
    int compute, scale, transposed[2] = {0, 0};
};
struct Layout {
    static constexpr uint64_t KIND = 0xA3;
    uint64_t kind = KIND;
    int type;
    int64_t rows, columns, ld;
    int32_t batch = 1;
    int64_t batch_stride = 0;

    bool operator==(const Layout& o) const {
        return type == o.type && rows == o.rows && columns == o.columns && ld == o.ld && batch == o.batch &&
               batch_stride == o.batch_stride;
    }
};
struct Preference {
    static constexpr uint64_t KIND = 0xA4;
    uint64_t kind = KIND;
    uint64_t workspace = 0;
    uint32_t reductions = 7, alignment[4] = {256, 256, 256, 256};
};

template <class T>
T& the(void* p) {
    REQUIRE(p != nullptr);
    T& one = *static_cast<T*>(p);
    REQUIRE(one.kind == T::KIND);
    return one;
}
template <class T>
void* make(T one) {
    alive++;
    return new T(one);
}
template <class T>
int destroy(void* p) {
    the<T>(p).kind = 0;
    delete static_cast<T*>(p);
    alive--;
    return SUCCESS;
}
template <class T>
T value(const void* p, size_t bytes) {
    REQUIRE(bytes == sizeof(T));
    T x;
    memcpy(&x, p, sizeof(T));
    return x;
}

// An algorithm's 64 bytes: what it was found for.
struct Algorithm {
    uint64_t kind;  // 0xA5
    uint64_t shapes;
    uint32_t alignment[4];
    uint64_t workspace;
    uint64_t unused[3];
};
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t");
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Heuristic) == 96, "cublasLtMatmulHeuristicResult_t");

uint64_t hash(const Desc& desc, std::initializer_list<const Layout*> layouts) {
    uint64_t sum = 0;
    const auto add = [&](int64_t x) { sum = (sum ^ static_cast<uint64_t>(x)) * 0x9E3779B97F4A7C15u; };
    for (int x : {desc.compute, desc.scale, desc.transposed[0], desc.transposed[1]}) add(x);
    for (const Layout* l : layouts)
        for (int64_t x : {int64_t(l->type), l->rows, l->columns, l->ld, int64_t(l->batch), l->batch_stride}) add(x);
    return sum;
}

void check(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    const int64_t m = desc.transposed[0] ? a.columns : a.rows, k = desc.transposed[0] ? a.rows : a.columns;
    const int64_t n = desc.transposed[1] ? b.rows : b.columns;
    REQUIRE(k == (desc.transposed[1] ? b.columns : b.rows));
    REQUIRE(d.rows == m && d.columns == n && c == d);
    REQUIRE(a.batch == b.batch && a.batch == d.batch);
    REQUIRE(d.batch == 1 || d.batch_stride >= m);  // matrices that are written don't overlap
    REQUIRE(a.type == b.type);
    if (desc.compute == COMPUTE_64F) REQUIRE(desc.scale == R_64F && a.type == R_64F && d.type == R_64F);
    else
        REQUIRE(desc.compute == COMPUTE_32F && desc.scale == R_32F && a.type != R_64F &&
                (d.type == a.type || d.type == R_32F));
}

double read(int type, const void* p, int64_t at) {
    switch (type) {
        case R_64F: return static_cast<const double*>(p)[at];
        case R_32F: return static_cast<const float*>(p)[at];
        case R_16F: return static_cast<const __half*>(p)[at];
        default: return static_cast<const __nv_bfloat16*>(p)[at];
    }
}
void write(int type, void* p, int64_t at, double x) {
    switch (type) {
        case R_64F: static_cast<double*>(p)[at] = x; break;
        case R_32F: static_cast<float*>(p)[at] = static_cast<float>(x); break;
        case R_16F: static_cast<__half*>(p)[at] = __half(static_cast<float>(x)); break;
        default: static_cast<__nv_bfloat16*>(p)[at] = __nv_bfloat16(static_cast<float>(x));
    }
}

// The device's memory is the host's, once all work before has been done.
void wait_for(void* stream) {
    void* driver = dlopen(getenv("RETAPE_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(driver != nullptr);
    auto synchronize = reinterpret_cast<int (*)(void*)>(dlsym(driver, "cuStreamSynchronize"));
    REQUIRE(synchronize != nullptr && stream != nullptr);
    REQUIRE(synchronize(stream) == 0);
    dlclose(driver);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cublasLtCreate(void** handle) {
    *handle = make(Handle());
    return SUCCESS;
}
API cublasLtDestroy(void* handle) { return destroy<Handle>(handle); }

API cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    Desc one;
    one.compute = compute;
    one.scale = scale;
    *desc = make(one);
    return SUCCESS;
}
API cublasLtMatmulDescSetAttribute(void* desc, int attribute, const void* p, size_t bytes) {
    REQUIRE(attribute == 3 || attribute == 4);
    const int32_t operation = value<int32_t>(p, bytes);
    REQUIRE(operation == 0 || operation == 1);
    the<Desc>(desc).transposed[attribute - 3] = operation;
    return SUCCESS;
}
API cublasLtMatmulDescDestroy(void* desc) { return destroy<Desc>(desc); }

API cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    REQUIRE(type == R_32F || type == R_64F || type == R_16F || type == R_16BF);
    REQUIRE(rows > 0 && columns > 0 && rows <= INT32_MAX && columns <= INT32_MAX && ld >= static_cast<int64_t>(rows));
    Layout one;
    one.type = type;
    one.rows = static_cast<int64_t>(rows);
    one.columns = static_cast<int64_t>(columns);
    one.ld = ld;
    *layout = make(one);
    return SUCCESS;
}
API cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* p, size_t bytes) {
    if (attribute == 5) {
        the<Layout>(layout).batch = value<int32_t>(p, bytes);
        REQUIRE(the<Layout>(layout).batch > 0);
    } else {
        REQUIRE(attribute == 6);
        the<Layout>(layout).batch_stride = value<int64_t>(p, bytes);
        REQUIRE(the<Layout>(layout).batch_stride >= 0);
    }
    return SUCCESS;
}
API cublasLtMatrixLayoutDestroy(void* layout) { return destroy<Layout>(layout); }

API cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = make(Preference());
    return SUCCESS;
}
API cublasLtMatmulPreferenceSetAttribute(void* preference, int attribute, const void* p, size_t bytes) {
    Preference& one = the<Preference>(preference);
    if (attribute == 1) {
        one.workspace = value<uint64_t>(p, bytes);
    } else if (attribute == 3) {
        one.reductions = value<uint32_t>(p, bytes);
    } else {
        REQUIRE(attribute >= 5 && attribute <= 8);
        const uint32_t alignment = value<uint32_t>(p, bytes);
        REQUIRE(alignment > 0 && alignment <= 256 && (alignment & (alignment - 1)) == 0);
        one.alignment[attribute - 5] = alignment;
    }
    return SUCCESS;
}
API cublasLtMatmulPreferenceDestroy(void* preference) { return destroy<Preference>(preference); }

API cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                                   int wanted, Heuristic* found, int* count) {
    the<Handle>(handle);
    const Layout &la = the<Layout>(a), &lb = the<Layout>(b), &lc = the<Layout>(c), &ld = the<Layout>(d);
    const Preference& preferred = the<Preference>(preference);
    check(the<Desc>(desc), la, lb, lc, ld);
    REQUIRE(wanted >= 1 && preferred.reductions == 2 && preferred.workspace > 0);
    heuristics++;
    *count = 0;
    // Some products have no algorithm.
    if (lb.columns == 17) return NOT_SUPPORTED;
    *found = Heuristic();
    found->algorithm.kind = 0xA5;
    found->algorithm.shapes = hash(the<Desc>(desc), {&la, &lb, &lc, &ld});
    memcpy(found->algorithm.alignment, preferred.alignment, sizeof(preferred.alignment));
    found->algorithm.workspace = found->workspace = preferred.workspace / 2;
    *count = 1;
    return SUCCESS;
}

API cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,
                   void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
    the<Handle>(handle);
    const Desc& how = the<Desc>(desc);
    const Layout &la = the<Layout>(a_layout), &lb = the<Layout>(b_layout), &lc = the<Layout>(c_layout),
                 &ld = the<Layout>(d_layout);
    check(how, la, lb, lc, ld);
    REQUIRE(algorithm->kind == 0xA5 && algorithm->shapes == hash(how, {&la, &lb, &lc, &ld}));
    REQUIRE(workspace != nullptr && workspace_bytes >= algorithm->workspace &&
            reinterpret_cast<uintptr_t>(workspace) % 256 == 0);
    REQUIRE(c == d);
    const void* addresses[4] = {a, b, c, d};
    const Layout* layouts[4] = {&la, &lb, &lc, &ld};
    for (int i = 0; i < 4; i++) {
        const uint64_t size = layouts[i]->type == R_64F ? 8 : layouts[i]->type == R_32F ? 4 : 2;
        REQUIRE(reinterpret_cast<uintptr_t>(addresses[i]) % algorithm->alignment[i] == 0);
        REQUIRE(layouts[i]->batch_stride * size % algorithm->alignment[i] == 0);
    }
    const bool wide = how.scale == R_64F;
    const double factor = wide ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha);
    const double before = wide ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
    REQUIRE(factor != 0.0 && (before == 0.0 || before == 1.0));
    wait_for(stream);
    const int64_t m = ld.rows, n = ld.columns, k = how.transposed[0] ? la.rows : la.columns;
    for (int64_t batch = 0; batch < ld.batch; batch++) {
        for (int64_t i = 0; i < m; i++) {
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t l = 0; l < k; l++) {
                    const int64_t at_a = batch * la.batch_stride + (how.transposed[0] ? i * la.ld + l : l * la.ld + i);
                    const int64_t at_b = batch * lb.batch_stride + (how.transposed[1] ? l * lb.ld + j : j * lb.ld + l);
                    sum += read(la.type, a, at_a) * read(lb.type, b, at_b);
                }
                const int64_t at = batch * ld.batch_stride + j * ld.ld + i;
                write(ld.type, d, at, factor * sum + (before == 0.0 ? 0.0 : read(ld.type, c, at)));
            }
        }
    }
    products++;
    return SUCCESS;
}
