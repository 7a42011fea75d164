// The counter-based random numbers of retape_core::rng: Philox4x32-10 (Salmon et al. 2011), a pure function of seed,
// counter and index.
#pragma once
#include "prim.cuh"

struct RandomStream {
    uint64_t seed, counter;
};

struct Words {
    uint32_t word[4];
};

DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t(a) * b) >> 32); }

// The words of elements 4 index .. 4 index + 3 of the stream.
DEVICE Words philox(const RandomStream& stream, uint64_t index) {
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32);
    uint32_t c2 = uint32_t(stream.counter), c3 = uint32_t(stream.counter >> 32);
    uint32_t k0 = uint32_t(stream.seed), k1 = uint32_t(stream.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t high0 = multiply_high(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const uint32_t high1 = multiply_high(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The word of one element.
DEVICE uint32_t random_word(const RandomStream& stream, uint64_t element) {
    const Words words = philox(stream, element / 4);
    // By selects: an index known only at run time would put the words into memory.
    const uint32_t low = element & 1 ? words.word[1] : words.word[0];
    const uint32_t high = element & 1 ? words.word[3] : words.word[2];
    return element & 2 ? high : low;
}
