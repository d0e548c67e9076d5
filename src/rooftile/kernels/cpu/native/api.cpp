// The C functions, and the choice of instructions.
#include "common.h"
#include "memory.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace rooftile {
namespace {

const Kernels* kernels_of(int level) {
    switch (level) {
        case 0: return &portable_kernels;
#if defined(__x86_64__)
        case 1: return &avx2_kernels;
        case 2: return &avx512_kernels;
        case 3: return &avx512_vnni_kernels;
        case 4: return &avx512_bf16_kernels;
#endif
        default: return nullptr;
    }
}

int best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    if (!__builtin_cpu_supports("avx512vnni")) return 2;
    return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
#else
    return 0;
#endif
}

const Kernels* chosen = nullptr;

const Kernels& kernels() {
    if (chosen == nullptr) chosen = kernels_of(best_level());
    return *chosen;
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

// Takes the best set of instructions that this machine has, at most `level`; returns its name.
EXPORT const char* rooftile_choose(int32_t level) {
    int best = best_level();
    chosen = kernels_of(level < best ? level : best);
    return chosen->name;
}

EXPORT void rooftile_linear(const void* x, int64_t x_row, int32_t x_dtype, int64_t tokens,
                            const Weight* w, void* out, int32_t out_dtype, int32_t threads) {
    kernels().linear(x, x_row, x_dtype, tokens, *w, out, out_dtype, threads);
}

EXPORT void rooftile_pack(const void* x, int32_t dtype, int64_t row_stride, const Weight* w,
                          int64_t first_row, int64_t rows, int32_t threads) {
    kernels().pack(x, dtype, row_stride, *w, first_row, rows, threads);
}

EXPORT void rooftile_embed(const Weight* w, const int64_t* ids, int64_t tokens, float* out) {
    kernels().embed(*w, ids, tokens, out);
}

EXPORT void rooftile_attention(const Attention* a, int32_t threads) { kernels().attention(*a, threads); }

EXPORT void rooftile_append(const void* k, int64_t k_token, int64_t k_head, const void* v,
                            int64_t v_token, int64_t v_head, const Pages* k_pages,
                            const Pages* v_pages, const int64_t* slots, const int64_t* positions,
                            const float* cos_sin, int32_t rotary_half, int32_t interleaved,
                            int64_t tokens, int32_t heads, int32_t k_dim, int32_t v_dim,
                            int32_t page_size, int32_t dtype, int32_t threads) {
    kernels().append(k, k_token, k_head, v, v_token, v_head, *k_pages, *v_pages, slots, positions,
                     cos_sin, rotary_half, interleaved != 0, tokens, heads, k_dim, v_dim, page_size,
                     dtype, threads);
}

EXPORT void rooftile_rms_norm(const void* x, int64_t x_row, const void* residual,
                              int64_t residual_row, const void* weight, float offset, float eps,
                              int64_t rows, int64_t hidden, void* out, void* stream, int32_t dtype,
                              int32_t threads) {
    kernels().rms_norm(x, x_row, residual, residual_row, weight, offset, eps, rows, hidden, out,
                       stream, dtype, threads);
}

EXPORT void rooftile_gated(const void* x, int64_t x_row, int64_t rows, int64_t size,
                           int32_t activation, void* out, int32_t dtype, int32_t threads) {
    kernels().gated(x, x_row, rows, size, activation, out, dtype, threads);
}

EXPORT void rooftile_rotary(const void* x, int64_t x_token, int64_t x_head, const int64_t* positions,
                            const float* cos_sin, int32_t rotary_half, int32_t interleaved,
                            int32_t inverse, int64_t tokens, int32_t heads, int32_t dim, void* out,
                            int32_t dtype, int32_t threads) {
    kernels().rotary(x, x_token, x_head, positions, cos_sin, rotary_half, interleaved != 0,
                     inverse != 0, tokens, heads, dim, out, dtype, threads);
}

EXPORT void rooftile_step(const Decoder* d, const Step* s, int32_t threads) {
    kernels().step(*d, *s, threads);
}

EXPORT void rooftile_sample(const Sampling* s, int32_t threads) { kernels().sample(*s, threads); }
