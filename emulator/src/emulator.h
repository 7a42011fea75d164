// What CUDA's compiler and headers offer to kernels/*.cu, for a host compiler: kernels/prim.cuh includes this instead
// of them. Each CUDA thread is a fiber (see scheduler.cpp); the operations that threads do together are in warp.h.
#pragma once
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

#if defined(RETAPE_EMULATOR_SCAN)
// For build.rs, which looks for this word in the preprocessed source to find the kernels' names.
#define KERNEL RETAPE_EMULATOR_KERNEL
#else
#define KERNEL extern "C" void
#endif
#define DEVICE inline __attribute__((always_inline))
#define SHARED_MEMORY(name) unsigned char* const name = emulator::shared_memory()

#include "vector_types.h"
#include "halves.h"
#include "runtime.h"
#include "warp.h"
#include "functions.h"

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->threads)
#define gridDim (emulator::current->blocks)
constexpr int warpSize = 32;
