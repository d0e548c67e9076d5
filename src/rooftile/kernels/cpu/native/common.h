// What every part of the library speaks: element types, and the arguments of its C functions.
// `arguments.py` beside this directory mirrors the structures, field by field.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace rooftile {

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Format : int32_t { TILED_FLOAT32 = 0, TILED_BFLOAT16 = 1, INT8 = 2, INT8_BLOCKS = 3, INT4 = 4 };
enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

constexpr int TILE = 16;   // rows of a weight side by side in the lanes of a register
constexpr int GROUP = 32;  // columns that share a scale

// A matrix [rows, columns] in tiles of 16 rows, zero-padded to whole tiles and groups:
//   TILED_FLOAT32   data float32 [tiles, columns, 16]
//   TILED_BFLOAT16  data bfloat16 [tiles, columns / 2, 16, 2]
//   INT8            data uint8 (value + 128) [tiles, columns / 4, 16, 4], scales float32 [tiles, 16]
//   INT8_BLOCKS     the same data, scales float16 [tiles, groups, 16]
//   INT4            data uint8 [tiles, groups, 4, 16, 4]: byte j of step s holds column 8 s + j in
//                   its low and 8 s + 4 + j in its high bits; scales float16 [tiles, groups, 2, 16]:
//                   scale, minimum
struct Weight {
    const void* data;
    const void* scales;
    const float* bias;  // [rows] or null
    int64_t rows, columns;
    int32_t format;
};

struct Pages {
    char* data;
    int64_t page, head, slot;  // strides in elements; the last dimension is dense
};

struct Attention {
    const void* q;
    int64_t q_token, q_head;  // strides in elements
    Pages k, v;
    const int32_t* cu_seqlens_q;
    const int32_t* kv_lens;
    const int32_t* page_table;
    int64_t table_row;   // stride
    const float* sink;   // [num_q_heads] or null
    void* out;           // [tokens, num_q_heads, v_dim]
    float* lse;          // [tokens, num_q_heads] or null
    int64_t batch, tokens;
    int32_t num_q_heads, num_kv_heads, k_dim, v_dim, page_size;
    int32_t left, right;
    float softcap, scale;
    int32_t q_dtype, dtype, out_dtype;  // dtype: of the pages
};

struct Layer {
    const float* attention_norm;       // [hidden], as are the next three; null: none
    const float* attention_post_norm;
    const float* mlp_norm;
    const float* mlp_post_norm;
    const float* q_norm;  // [head_dim] or null
    const float* k_norm;
    Weight qkv, out, gate_up, down;
    const float* cos_sin;  // [max_position, 2, rotary_half] or null
    Pages k, v;
    int32_t rotary_half, group;  // group: which of the step's KV groups
    int32_t num_q_heads, num_kv_heads, head_dim;
    int32_t left;
    float softcap, scale;
    int32_t activation;
};

struct KvGroup {
    const int64_t* slots;  // [tokens], -1: not written
    const int32_t* page_table;
    int64_t table_row;
    int32_t page_size;
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers;
    Weight embedding;    // in a packed format, or
    const void* embedding_rows;  // [vocab, hidden] of embedding_dtype
    const float* norm;
    int64_t hidden;
    float eps, embedding_scale, residual_scale;
    int32_t embedding_dtype;
    int32_t dtype;  // of pages and of the result
};

struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int32_t* cu_seqlens_q;
    const int32_t* kv_lens;
    const KvGroup* groups;
    int64_t tokens, batch;
    void* out;  // [tokens, hidden] of the decoder's dtype
};

struct Sampling {
    const float *logits, *scores;  // [rows, vocab]; scores: logits after penalties, bias and bans
    int64_t logits_row, scores_row, rows, vocab;
    const float* temperature;      // [rows], as are the others; null: 0
    const int64_t* top_k;          // null: off
    const float* top_p;
    const float* min_p;
    const int64_t *seeds, *sample_index, *position;
    int64_t* tokens;
    float* logprobs;
};

inline float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline uint32_t to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(half x) {
    uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3ff;
    if (exponent == 0) {
        float f = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -f : f;
    }
    if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bf16& to) {
    uint32_t u = to_bits(x);
    to.bits = x != x ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline void narrow(float x, half& to) {
    uint32_t u = to_bits(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        to.bits = static_cast<uint16_t>(sign | 0x7e00u);
    } else if (magnitude >= 0x47800000u) {  // 65536 and above
        to.bits = static_cast<uint16_t>(sign | 0x7c00u);
    } else if (magnitude < 0x38800000u) {  // below the least normal number: adding rounds it
        to.bits = static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u));
    } else {
        uint32_t odd = magnitude >> 13 & 1;
        to.bits = static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfff + odd) >> 13);
    }
}

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t tiles_of(const Weight& w) { return (w.rows + TILE - 1) / TILE; }
inline int64_t groups_of(const Weight& w) { return (w.columns + GROUP - 1) / GROUP; }
inline bool is_quantised(int32_t format) { return format >= INT8; }

// The functions that exist once for each set of instructions.
struct Kernels {
    const char* name;
    void (*linear)(const void* x, int64_t x_row, int32_t x_dtype, int64_t tokens, const Weight& w,
                   void* out, int32_t out_dtype, int threads);
    void (*pack)(const void* x, int32_t dtype, int64_t row_stride, const Weight& w,
                 int64_t first_row, int64_t rows, int threads);
    void (*embed)(const Weight& w, const int64_t* ids, int64_t tokens, float* out);
    void (*attention)(const Attention& a, int threads);
    void (*append)(const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                   int64_t v_head, const Pages& k_pages, const Pages& v_pages, const int64_t* slots,
                   const int64_t* positions, const float* cos_sin, int32_t rotary_half,
                   bool interleaved, int64_t tokens, int32_t heads, int32_t k_dim, int32_t v_dim,
                   int32_t page_size, int32_t dtype, int threads);
    void (*rms_norm)(const void* x, int64_t x_row, const void* residual, int64_t residual_row,
                     const void* weight, float offset, float eps, int64_t rows, int64_t hidden,
                     void* out, void* stream, int32_t dtype, int threads);
    void (*gated)(const void* x, int64_t x_row, int64_t rows, int64_t size, int32_t activation,
                  void* out, int32_t dtype, int threads);
    void (*rotary)(const void* x, int64_t x_token, int64_t x_head, const int64_t* positions,
                   const float* cos_sin, int32_t rotary_half, bool interleaved, bool inverse,
                   int64_t tokens, int32_t heads, int32_t dim, void* out, int32_t dtype,
                   int threads);
    void (*step)(const Decoder& d, const Step& s, int threads);
    void (*sample)(const Sampling& s, int threads);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels, avx512_vnni_kernels,
    avx512_bf16_kernels;

}  // namespace rooftile
