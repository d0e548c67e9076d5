// The kernels for one set of instructions: compiled once for each ROOFTILE_LEVEL.
#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "common.h"
#include "memory.h"
#include "pool.h"

#if ROOFTILE_LEVEL > 0
#include <immintrin.h>
#endif

#define ROOFTILE_AVX512 (ROOFTILE_LEVEL >= 2)
#define ROOFTILE_VNNI (ROOFTILE_LEVEL >= 3)
#define ROOFTILE_BF16 (ROOFTILE_LEVEL >= 4)

#if ROOFTILE_LEVEL == 0
#define ROOFTILE_NAME portable
#elif ROOFTILE_LEVEL == 1
#define ROOFTILE_NAME avx2
#define ROOFTILE_TARGET "avx2,fma,f16c"
#elif ROOFTILE_LEVEL == 2
#define ROOFTILE_NAME avx512
#define ROOFTILE_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#elif ROOFTILE_LEVEL == 3
#define ROOFTILE_NAME avx512_vnni
#define ROOFTILE_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#else
#define ROOFTILE_NAME avx512_bf16
#define ROOFTILE_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
#endif

#define ROOFTILE_PASTE(a, b) a##b
#define ROOFTILE_JOIN(a, b) ROOFTILE_PASTE(a, b)
#define ROOFTILE_TABLE(name) ROOFTILE_JOIN(name, _kernels)
#define ROOFTILE_TEXT(x) #x
#define ROOFTILE_STRING(x) ROOFTILE_TEXT(x)
#define ROOFTILE_PRAGMA(x) _Pragma(#x)
#define UNROLL ROOFTILE_PRAGMA(GCC unroll 16)

// Function by function, not for the whole file: the standard library's inline functions, which
// the linker shares between levels, stay runnable everywhere.
#if defined(__clang__) && defined(ROOFTILE_TARGET)
#define ROOFTILE_BEGIN(target) \
    ROOFTILE_PRAGMA(clang attribute push(__attribute__((target(target))), apply_to = function))
ROOFTILE_BEGIN(ROOFTILE_TARGET)
#elif defined(ROOFTILE_TARGET)
#pragma GCC push_options
#define ROOFTILE_BEGIN(t) ROOFTILE_PRAGMA(GCC target(t))
ROOFTILE_BEGIN(ROOFTILE_TARGET)
#endif

namespace rooftile {
namespace ROOFTILE_NAME {

#if ROOFTILE_LEVEL >= 2
#include "vec_avx512.h"
#elif ROOFTILE_LEVEL == 1
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

#include "gemm.h"
#include "pack.h"
#include "rows.h"
#include "sampling.h"
#include "attention.h"
#include "step.h"

}  // namespace ROOFTILE_NAME

const Kernels ROOFTILE_TABLE(ROOFTILE_NAME) = {
    ROOFTILE_STRING(ROOFTILE_NAME),
    ROOFTILE_NAME::linear,
    ROOFTILE_NAME::pack,
    ROOFTILE_NAME::embed,
    ROOFTILE_NAME::attention,
    ROOFTILE_NAME::append,
    ROOFTILE_NAME::rms_norm,
    ROOFTILE_NAME::gated,
    ROOFTILE_NAME::rotary,
    ROOFTILE_NAME::step,
    ROOFTILE_NAME::sample,
};

}  // namespace rooftile

#if defined(__clang__) && defined(ROOFTILE_TARGET)
#pragma clang attribute pop
#elif defined(ROOFTILE_TARGET)
#pragma GCC pop_options
#endif
