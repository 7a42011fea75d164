// Runs the kernels of primitives.cuh and compares what they give with what prim.cuh says that they give, worked out
// here in the plainest way. Prints what differs, and "ok" at the end.
#include "primitives.cu"
#include <stdio.h>
#include <functional>
#include <vector>
#include "scheduler.h"

using emulator::Register;

namespace {

const Register<case_mma_bf16> a("mma_bf16");
const Register<case_mma_f16> b("mma_f16");
const Register<case_ldmatrix> c("ldmatrix");
const Register<case_ldmatrix_trans> d("ldmatrix_trans");
const Register<case_cp_async> e("cp_async");
const Register<case_shuffles> f("shuffles");
const Register<case_barriers> g("barriers");
const Register<case_atomics> h("atomics");
const Register<case_exp2> i("exp2");

int failures = 0;

template <class Out, class In>
std::vector<Out> launch(const char* name, unsigned threads, size_t shared, const std::vector<In>& in,
                        size_t out_count) {
    std::vector<Out> out(out_count);
    const Case parameters{in.data(), out.data()};
    const auto outcome = emulator::run(*emulator::find_kernel(name), {1, 1, 1}, {threads, 1, 1}, shared, &parameters);
    if (outcome.fault != emulator::Fault::none) printf("FAULT: %s\n", outcome.reason.c_str()), failures++;
    return out;
}

template <class T>
void expect(const char* name, const std::vector<T>& out, const std::function<T(int)>& expected) {
    for (size_t i = 0; i < out.size(); i++) {
        if (out[i] == expected(int(i))) continue;
        printf("%s: %.17g at %zu, not %.17g\n", name, double(out[i]), i, double(expected(int(i))));
        failures++;
        return;
    }
}

float number(int i) {
    return static_cast<float>((i * 7919 + 5) % 31 - 15) / 4;
}  // exact in 16 bits, and so are the sums

template <class Half>
void check_multiplication(const char* name) {
    std::vector<Half> in(256 + 128);
    for (size_t i = 0; i < in.size(); i++) in[i] = number(int(i));
    expect<float>(name, launch<float>(name, 32, 0, in, 128), [&](int at) {
        float sum = 1.0f;
        for (int k = 0; k < 16; k++) sum += number(at / 8 * 16 + k) * number(256 + at % 8 * 16 + k);
        return sum;
    });
}

void check_matrices() {
    std::vector<uint16_t> in(256);
    for (int i = 0; i < 256; i++) in[i] = static_cast<uint16_t>(i * 257 + 1);
    auto element = [&](int m, int i, int j) { return uint32_t(in[64 * m + 8 * i + j]); };
    expect<uint32_t>("ldmatrix", launch<uint32_t>("ldmatrix", 32, 512, in, 128), [&](int at) {
        const int lane = at / 4, m = at % 4;
        return element(m, lane / 4, 2 * (lane % 4)) | element(m, lane / 4, 2 * (lane % 4) + 1) << 16;
    });
    expect<uint32_t>("ldmatrix_trans", launch<uint32_t>("ldmatrix_trans", 32, 512, in, 128), [&](int at) {
        const int lane = at / 4, m = at % 4;
        return element(m, 2 * (lane % 4), lane / 4) | element(m, 2 * (lane % 4) + 1, lane / 4) << 16;
    });
}

void check_copies() {
    struct alignas(16) Piece {
        unsigned char at[16];
    };
    std::vector<Piece> in(17);
    for (int i = 0; i < 17 * 16; i++) in[i / 16].at[i % 16] = static_cast<unsigned char>(i + 1);
    expect<unsigned char>("cp_async", launch<unsigned char>("cp_async", 17, 17 * 32, in, 17 * 32), [&](int at) {
        const int thread = at / 16, byte = at % 16;
        if (thread < 17) return byte < thread ? in[thread].at[byte] : static_cast<unsigned char>(0);
        return in[16 - (thread - 17)].at[byte];
    });
}

void check_shuffles() {
    std::vector<double> in(32);
    for (int i = 0; i < 32; i++) in[i] = (i * 11 + 3) % 32;
    expect<double>("shuffles", launch<double>("shuffles", 32, 0, in, 12 * 32), [&](int at) {
        const int lane = at % 32;
        uint32_t thirds = 0;
        for (int i = 0; i < 32; i++) thirds |= uint32_t(int(in[i]) % 3 == 0) << i;
        switch (at / 32) {
            case 0: return in[5];
            case 1: return in[lane * 7 % 32];
            case 2: return in[lane / 8 * 8 + 3];
            case 3: return in[lane ^ 16];
            case 4: return in[lane ^ 5];
            case 5: return in[lane + 3 < 32 ? lane + 3 : lane];
            case 6: return in[lane % 16 + 3 < 16 ? lane + 3 : lane];
            case 7: return in[lane >= 2 ? lane - 2 : lane];
            case 8: return in[lane % 16 >= 9 ? lane - 9 : lane] * 0x1p40;
            case 9: return double(thirds);
            case 10: return 3.0;
            default: return in[lane < 16 ? lane ^ 1 : lane ^ 2];
        }
    });
}

void check_barriers() {
    expect<int>("barriers", launch<int>("barriers", 70, 280, std::vector<int>(1), 3 * 66), [](int at) {
        return at % 3 == 0 ? 65 - at / 3 : at % 3 == 1 ? 33 : 3;
    });
}

void check_atomics() {
    const auto out = launch<unsigned long long>("atomics", 300, 0, std::vector<int>(1), 10);
    int ints[3];
    unsigned words[3];
    memcpy(ints, out.data(), sizeof ints);
    memcpy(words, out.data() + 4, sizeof words);
    const bool right = ints[0] == 299 * 150 && ints[1] == -299 && ints[2] == 299 && words[0] == ~0u && words[1] == 7 &&
                       words[2] == 1 && out[8] == 300ull << 33 && out[9] == 299ull << 40;
    if (!right) printf("atomics\n"), failures++;
}

void check_exp2() {
    std::vector<float> in(64);
    for (int i = 0; i < 60; i++) in[i] = static_cast<float>(i) * 4.7f - 150.0f;
    in[60] = -INFINITY, in[61] = INFINITY, in[62] = 1e-42f, in[63] = 0.0f;
    expect<float>("exp2", launch<float>("exp2", 64, 0, in, 64), [&](int at) {
        const float y = exp2f(in[at]);
        return y < FLT_MIN ? 0.0f : y;
    });
    in[0] = NAN;
    if (!isnan(launch<float>("exp2", 64, 0, in, 64)[0])) printf("exp2 of NaN\n"), failures++;
}

}  // namespace

int main() {
    check_multiplication<__nv_bfloat16>("mma_bf16");
    check_multiplication<__half>("mma_f16");
    check_matrices();
    check_copies();
    check_shuffles();
    check_barriers();
    check_atomics();
    check_exp2();
    if (failures == 0) puts("ok");
    return failures;
}
