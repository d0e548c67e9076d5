// Matrix products: 16 rows of a weight in the lanes, some tokens in as many registers.

// A weight is read in one stream, tile after tile. Where some products wait for each line, the processor's
// own prefetching runs only as far ahead as they do, so that memory and products take turns; asked for
// so many bytes ahead, they overlap. For few tokens it does better alone.
constexpr int64_t AHEAD = 16384, AHEAD_INT = 8192;
inline void fetch(const void* p, int64_t ahead) {
    __builtin_prefetch(static_cast<const char*>(p) + ahead, 0, 2);
}

// out[m * out_row + 16 n + lane] (+)= sum over k of x[m][k] w[n][k][lane]
template <int M, int N>
inline void product_f32(const float* x, int64_t x_row, const float* w, int64_t w_tile, int64_t depth,
                        float* out, int64_t out_row, bool add) {
    F acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = add ? load(out + m * out_row + 16 * n) : zero();
    for (int64_t k = 0; k < depth; ++k) {
        F column[N];
        UNROLL for (int n = 0; n < N; ++n) column[n] = load(w + n * w_tile + 16 * k);
        UNROLL for (int m = 0; m < M; ++m) {
            F value = set1(x[m * x_row + k]);
            UNROLL for (int n = 0; n < N; ++n) acc[m][n] = fma(value, column[n], acc[m][n]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(out + m * out_row + 16 * n, acc[m][n]);
}

// The same over pairs of bfloat16; x is float32 where the machine cannot multiply bfloat16.
#if ROOFTILE_BF16
template <int M, int N>
inline void product_bf16(const uint32_t* x, int64_t x_row, const uint32_t* w, int64_t w_tile,
                         int64_t pairs, float* out, int64_t out_row, bool add) {
    F acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = add ? load(out + m * out_row + 16 * n) : zero();
    for (int64_t k = 0; k < pairs; ++k) {
        UNROLL for (int m = 0; m < M; ++m) {
            UNROLL for (int n = 0; n < N; ++n)
                acc[m][n] = dot2(acc[m][n], w + n * w_tile + 16 * k, x + m * x_row + k);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(out + m * out_row + 16 * n, acc[m][n]);
}
// One tile that comes from memory.
template <int M>
inline void product_tile(const uint32_t* x, int64_t x_row, const uint32_t* w, int64_t pairs, float* out,
                         int64_t out_row) {
    constexpr int SUMS = M <= 2 ? 4 : M <= 4 ? 2 : 1;  // so many that none waits for the one before
    F acc[SUMS][M];
    UNROLL for (int s = 0; s < SUMS; ++s)
        UNROLL for (int m = 0; m < M; ++m) acc[s][m] = zero();
    for (int64_t k = 0; k < pairs; k += SUMS) {  // there are whole groups of 32 columns
        UNROLL for (int s = 0; s < SUMS; ++s) {
            if (M >= 6) fetch(w + 16 * (k + s), AHEAD);
            UNROLL for (int m = 0; m < M; ++m)
                acc[s][m] = dot2(acc[s][m], w + 16 * (k + s), x + m * x_row + k + s);
        }
    }
    UNROLL for (int m = 0; m < M; ++m) {
        F sum = acc[0][m];
        UNROLL for (int s = 1; s < SUMS; ++s) sum = sum + acc[s][m];
        store(out + m * out_row, sum);
    }
}
#else
template <int M, int N>
inline void product_bf16(const float* x, int64_t x_row, const uint32_t* w, int64_t w_tile,
                         int64_t pairs, float* out, int64_t out_row, bool add) {
    F acc[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) acc[m][n] = add ? load(out + m * out_row + 16 * n) : zero();
    for (int64_t k = 0; k < pairs; ++k) {
        UNROLL for (int n = 0; n < N; ++n) {
            F even = even_bf16(w + n * w_tile + 16 * k), odd = odd_bf16(w + n * w_tile + 16 * k);
            UNROLL for (int m = 0; m < M; ++m) {
                acc[m][n] = fma(set1(x[m * x_row + 2 * k]), even, acc[m][n]);
                acc[m][n] = fma(set1(x[m * x_row + 2 * k + 1]), odd, acc[m][n]);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(out + m * out_row + 16 * n, acc[m][n]);
}
#endif

// Tokens as the products read them.
struct Tokens {
    // float32 or bfloat16 rows, zero-padded to whole groups, or bytes with a scale for each group
    char* values;
    float* scales;     // [tokens, groups]: value = byte * scale
    float* sums;       // [tokens, groups]: of the values
    int32_t* offsets;  // [tokens, groups]: -128 * the sum of the bytes
    int64_t row;       // bytes from one token to the next
    int64_t groups;
};

inline int64_t value_bytes(int32_t format) {
    if (is_quantised(format)) return 1;
    return format == TILED_BFLOAT16 && ROOFTILE_BF16 ? 2 : 4;
}
inline int64_t tokens_bytes(int64_t tokens, int64_t columns, int32_t format) {
    int64_t groups = up(columns, GROUP) / GROUP;
    int64_t bytes = up(tokens * groups * GROUP * value_bytes(format), 64);
    if (is_quantised(format)) bytes += 3 * up(tokens * groups * 4, 64);
    return bytes + 64;
}
inline Tokens place_tokens(char* memory, int64_t tokens, int64_t columns, int32_t format) {
    Tokens t;
    t.groups = up(columns, GROUP) / GROUP;
    t.row = t.groups * GROUP * value_bytes(format);
    t.values = memory;
    char* at = memory + up(tokens * t.row, 64);
    int64_t each = up(tokens * t.groups * 4, 64);
    t.scales = reinterpret_cast<float*>(at);
    t.sums = reinterpret_cast<float*>(at + each);
    t.offsets = reinterpret_cast<int32_t*>(at + 2 * each);
    return t;
}

// One row of values; those from `columns` to the end of its last group are zero.
inline void prepare(const float* row, int64_t columns, int32_t format, const Tokens& t, int64_t m) {
    int64_t padded = t.groups * GROUP;
    char* to = t.values + m * t.row;
    auto at = [&](int64_t i) {
        return i + 16 <= columns ? load(row + i)
               : i < columns     ? load_part(row + i, static_cast<int>(columns - i))
                                 : zero();
    };
    if (!is_quantised(format)) {
        for (int64_t i = 0; i < padded; i += 16) {
#if ROOFTILE_BF16
            if (format == TILED_BFLOAT16) {
                store(reinterpret_cast<bf16*>(to) + i, at(i));
                continue;
            }
#endif
            store(reinterpret_cast<float*>(to) + i, at(i));
        }
        return;
    }
    for (int64_t g = 0; g < t.groups; ++g) {
        F a = at(g * GROUP), b = at(g * GROUP + 16);
        float most = largest(max(abs(a), abs(b)));
        // A number that is not finite makes the whole group, and so the result, not a number.
        float bad = sum((a + b) * zero());
        float scale = most / 127.0f, inverse = most > 0 && bad == 0 ? 127.0f / most : 0.0f;
        if (inverse > 3e38f) inverse = 0;  // most is so small that it is nothing
        I qa = to_int(a * set1(inverse)), qb = to_int(b * set1(inverse));
        auto bytes = reinterpret_cast<int8_t*>(to) + g * GROUP;
        store_bytes(bytes, qa);
        store_bytes(bytes + 16, qb);
        int32_t total = sum(qa + qb);
        int64_t i = m * t.groups + g;
        t.scales[i] = bad == 0 ? scale : NAN;
        t.sums[i] = t.scales[i] * static_cast<float>(total);
        t.offsets[i] = -128 * total;
    }
}

// One tile of a quantised weight: out[m * out_row + lane]. FETCH: it comes from memory.
template <int M, bool FETCH>
inline void product_int8(const Tokens& t, int64_t m0, const uint8_t* w, const half* block_scales,
                         float* out, int64_t out_row) {
    F acc[M];
    UNROLL for (int m = 0; m < M; ++m) acc[m] = zero();
    const int8_t* x = reinterpret_cast<const int8_t*>(t.values) + m0 * t.row;
    for (int64_t g = 0; g < t.groups; ++g) {
        I dot[M];
        UNROLL for (int m = 0; m < M; ++m) dot[m] = set1(t.offsets[(m0 + m) * t.groups + g]);
        UNROLL for (int s = 0; s < 8; ++s) {
            if (FETCH) fetch(w + (g * 8 + s) * 64, AHEAD_INT);
            B columns = load(w + (g * 8 + s) * 64);
            UNROLL for (int m = 0; m < M; ++m)
                dot[m] = dot4(dot[m], columns, x + m * t.row + g * GROUP + 4 * s);
        }
        if (block_scales) {
            F scale = load(block_scales + g * TILE);
            UNROLL for (int m = 0; m < M; ++m)
                acc[m] = fma(to_float(dot[m]) * set1(t.scales[(m0 + m) * t.groups + g]), scale,
                             acc[m]);
        } else {
            UNROLL for (int m = 0; m < M; ++m)
                acc[m] = fma(to_float(dot[m]), set1(t.scales[(m0 + m) * t.groups + g]), acc[m]);
        }
    }
    UNROLL for (int m = 0; m < M; ++m) store(out + m * out_row, acc[m]);
}

template <int M, bool FETCH>
inline void product_int4(const Tokens& t, int64_t m0, const uint8_t* w, const half* scales,
                         float* out, int64_t out_row) {
    F acc[M];
    UNROLL for (int m = 0; m < M; ++m) acc[m] = zero();
    const int8_t* x = reinterpret_cast<const int8_t*>(t.values) + m0 * t.row;
    for (int64_t g = 0; g < t.groups; ++g) {
        I dot[M];
        UNROLL for (int m = 0; m < M; ++m) dot[m] = set1(0);
        UNROLL for (int s = 0; s < 4; ++s) {
            if (FETCH) fetch(w + (g * 4 + s) * 64, AHEAD_INT);
            B both = load(w + (g * 4 + s) * 64), low = low_nibbles(both), high = high_nibbles(both);
            const int8_t* xs = x + g * GROUP + 8 * s;
            UNROLL for (int m = 0; m < M; ++m) dot[m] = dot4(dot[m], low, xs + m * t.row);
            UNROLL for (int m = 0; m < M; ++m) dot[m] = dot4(dot[m], high, xs + m * t.row + 4);
        }
        if (FETCH) fetch(scales + g * 2 * TILE, AHEAD_INT / 4);
        F scale = load(scales + g * 2 * TILE), minimum = load(scales + g * 2 * TILE + TILE);
        UNROLL for (int m = 0; m < M; ++m) {
            int64_t i = (m0 + m) * t.groups + g;
            acc[m] = fma(to_float(dot[m]) * set1(t.scales[i]), scale, acc[m]);
            acc[m] = fma(set1(t.sums[i]), minimum, acc[m]);
        }
    }
    UNROLL for (int m = 0; m < M; ++m) store(out + m * out_row, acc[m]);
}

// Tokens and tiles that fit the registers at once. The rest of a number of tokens takes the next
// smaller of these.
#if ROOFTILE_AVX512
constexpr int MOST_TOKENS = 12, MOST_TOKENS_INT = 12, TILES_AT_ONCE = 2;
#define FOR_TOKENS(M, call) \
    switch (M) { \
        case 12: call(12); break; \
        case 8: call(8); break; \
        case 6: call(6); break; \
        case 4: call(4); break; \
        case 3: call(3); break; \
        case 2: call(2); break; \
        default: call(1); \
    }
inline int tokens_at_once(int64_t left) {
    return left >= 12 ? 12 : left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : static_cast<int>(left);
}
inline int tokens_at_once_int(int64_t left) { return tokens_at_once(left); }
#else
constexpr int MOST_TOKENS = 4, MOST_TOKENS_INT = 2, TILES_AT_ONCE = 1;
#define FOR_TOKENS(M, call) \
    switch (M) { \
        case 4: call(4); break; \
        case 3: call(3); break; \
        case 2: call(2); break; \
        default: call(1); \
    }
inline int tokens_at_once(int64_t left) { return left >= 4 ? 4 : static_cast<int>(left); }
inline int tokens_at_once_int(int64_t left) { return left >= 2 ? 2 : 1; }
#endif

template <int N>
inline void product_f32_of(int m, const float* x, int64_t x_row, const float* w, int64_t w_tile,
                           int64_t depth, float* out, int64_t out_row, bool add) {
#define CALL(M) product_f32<M, N>(x, x_row, w, w_tile, depth, out, out_row, add)
    FOR_TOKENS(m, CALL)
#undef CALL
}
template <int N, class X>
inline void product_bf16_of(int m, const X* x, int64_t x_row, const uint32_t* w, int64_t w_tile,
                            int64_t pairs, float* out, int64_t out_row, bool add) {
#define CALL(M) product_bf16<M, N>(x, x_row, w, w_tile, pairs, out, out_row, add)
    FOR_TOKENS(m, CALL)
#undef CALL
}

constexpr int BLOCK_ROW = TILES_AT_ONCE * TILE;

// Tokens [m0, m0 + m) and tiles [tile, tile + n): out [m][BLOCK_ROW], scaled and biased. first: no other
// tokens have been there just before.
inline void block(const Weight& w, int64_t tile, int n, const Tokens& t, int64_t m0, int m, bool first,
                  float* out) {
    int64_t padded = t.groups * GROUP;
    if (w.format == TILED_FLOAT32) {
        auto x = reinterpret_cast<const float*>(t.values + m0 * t.row);
        auto data = static_cast<const float*>(w.data) + tile * padded * TILE;
        if (n == 1)
            product_f32_of<1>(m, x, padded, data, 0, padded, out, BLOCK_ROW, false);
        else
            product_f32_of<TILES_AT_ONCE>(m, x, padded, data, padded * TILE, padded, out, BLOCK_ROW,
                                          false);
    } else if (w.format == TILED_BFLOAT16) {
#if ROOFTILE_BF16
        auto x = reinterpret_cast<const uint32_t*>(t.values + m0 * t.row);
        int64_t row = padded / 2;
#else
        auto x = reinterpret_cast<const float*>(t.values + m0 * t.row);
        int64_t row = padded;
#endif
        auto data = static_cast<const uint32_t*>(w.data) + tile * (padded / 2) * TILE;
#if ROOFTILE_BF16
        if (first) {
#define CALL(M) product_tile<M>(x, row, data + i * row * TILE, row, out + i * TILE, BLOCK_ROW)
            for (int i = 0; i < n; ++i) FOR_TOKENS(m, CALL)
#undef CALL
        } else
#endif
        if (n == 1)
            product_bf16_of<1>(m, x, row, data, 0, padded / 2, out, BLOCK_ROW, false);
        else
            product_bf16_of<TILES_AT_ONCE>(m, x, row, data, padded / 2 * TILE, padded / 2, out,
                                           BLOCK_ROW, false);
    } else {
        for (int i = 0; i < n; ++i) {
            float* to = out + i * TILE;
            int64_t at = tile + i;
            if (w.format == INT4) {
                auto data = static_cast<const uint8_t*>(w.data) + at * padded * TILE / 2;
                auto scales = static_cast<const half*>(w.scales) + at * t.groups * 2 * TILE;
#define CALL(M) \
    first && M >= 4 ? product_int4<M, true>(t, m0, data, scales, to, BLOCK_ROW) \
                    : product_int4<M, false>(t, m0, data, scales, to, BLOCK_ROW)
                FOR_TOKENS(m, CALL)
#undef CALL
                continue;
            }
            auto data = static_cast<const uint8_t*>(w.data) + at * padded * TILE;
            const half* blocks = w.format == INT8_BLOCKS
                                     ? static_cast<const half*>(w.scales) + at * t.groups * TILE
                                     : nullptr;
#define CALL(M) \
    first && M >= 6 ? product_int8<M, true>(t, m0, data, blocks, to, BLOCK_ROW) \
                    : product_int8<M, false>(t, m0, data, blocks, to, BLOCK_ROW)
            FOR_TOKENS(m, CALL)
#undef CALL
            if (w.format == INT8) {
                F scale = load(static_cast<const float*>(w.scales) + at * TILE);
                for (int j = 0; j < m; ++j)
                    store(to + j * BLOCK_ROW, load(to + j * BLOCK_ROW) * scale);
            }
        }
    }
    if (w.bias == nullptr) return;
    for (int i = 0; i < n; ++i) {
        int64_t first = (tile + i) * TILE, left = w.rows - first;
        F bias = left >= TILE ? load(w.bias + first) : load_part(w.bias + first, static_cast<int>(left));
        for (int j = 0; j < m; ++j) {
            float* to = out + j * BLOCK_ROW + i * TILE;
            store(to, load(to) + bias);
        }
    }
}

// Tokens that pass over a weight before the next ones do: their values stay in the L2 cache.
constexpr int64_t PASS = 192;

inline int64_t chunk_tiles(int64_t tiles, int64_t tokens, int threads) {
    // About eight chunks a thread, of even sizes; for many tokens one pair of tiles is much work.
    int64_t each = tokens >= 64 ? TILES_AT_ONCE : tiles / (8 * static_cast<int64_t>(threads));
    return up(each < TILES_AT_ONCE ? TILES_AT_ONCE : each, TILES_AT_ONCE);
}

// Chunks are claimed in turn: each thread's ones lie one after the other, so that it reads ahead what it
// will need.
inline int64_t place_of(int64_t chunk, int64_t chunks, int threads) {
    int64_t share = chunk % threads, each = chunks / threads, more = chunks % threads;
    return share * each + (share < more ? share : more) + chunk / threads;
}

// finish(token, first row, rows, values[rows]) for each token and group of up to 32 rows.
template <class Finish>
inline void multiply(const Weight& w, const Tokens& t, int64_t tokens, int threads,
                     Finish&& finish) {
    int64_t tiles = tiles_of(w), each = chunk_tiles(tiles, tokens, threads);
    int64_t row_chunks = (tiles + each - 1) / each, passes = (tokens + PASS - 1) / PASS;
    parallel(threads, row_chunks * passes, [&](int64_t chunk) {
        int64_t first = place_of(chunk % row_chunks, row_chunks, threads) * each;
        int64_t last = first + each < tiles ? first + each : tiles;
        int64_t begin = chunk / row_chunks * PASS, end = begin + PASS < tokens ? begin + PASS : tokens;
        alignas(64) float out[MOST_TOKENS * BLOCK_ROW];
        for (int64_t tile = first; tile < last; tile += TILES_AT_ONCE) {
            int n = tile + TILES_AT_ONCE <= last ? TILES_AT_ONCE : 1;
            int64_t rows = w.rows - tile * TILE < n * TILE ? w.rows - tile * TILE : n * TILE;
            for (int64_t m = begin; m < end;) {
                int count = is_quantised(w.format) ? tokens_at_once_int(end - m) : tokens_at_once(end - m);
                block(w, tile, n, t, m, count, m == begin, out);
                for (int i = 0; i < count; ++i)
                    finish(m + i, tile * TILE, static_cast<int>(rows), out + i * BLOCK_ROW);
                m += count;
            }
        }
    });
}

template <class T>
inline void put(T* to, const float* from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}
template <class T>
inline void get(float* to, const T* from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}
inline void get(float* to, const void* from, int64_t index, int64_t n, int32_t dtype) {
    if (dtype == FLOAT32) get(to, static_cast<const float*>(from) + index, n);
    else if (dtype == BFLOAT16) get(to, static_cast<const bf16*>(from) + index, n);
    else get(to, static_cast<const half*>(from) + index, n);
}
inline void put(void* to, int64_t index, const float* from, int64_t n, int32_t dtype) {
    if (dtype == FLOAT32) put(static_cast<float*>(to) + index, from, n);
    else if (dtype == BFLOAT16) put(static_cast<bf16*>(to) + index, from, n);
    else put(static_cast<half*>(to) + index, from, n);
}

// Tokens of one thread's work at least, so that small batches do not pay for handing work out.
inline int64_t token_chunks(int64_t tokens, int64_t width, int threads) {
    int64_t least = 1 + 4096 / (width + 1), chunks = (tokens + least - 1) / least;
    int64_t most = 4 * static_cast<int64_t>(threads);
    return chunks < most ? chunks : most;
}
template <class Function>
inline void each_token(int64_t tokens, int64_t width, int threads, Function&& f) {
    int64_t chunks = token_chunks(tokens, width, threads);
    parallel(threads, chunks, [&](int64_t c) {
        for (int64_t m = tokens * c / chunks; m < tokens * (c + 1) / chunks; ++m) f(m);
    });
}

void linear(const void* x, int64_t x_row, int32_t x_dtype, int64_t tokens, const Weight& w, void* out,
            int32_t out_dtype, int threads) {
    Memory memory(tokens_bytes(tokens, w.columns, w.format));
    Tokens t = place_tokens(memory.data, tokens, w.columns, w.format);
    each_token(tokens, w.columns, threads, [&](int64_t m) {
        float* row = scratch(w.columns);
        get(row, x, m * x_row, w.columns, x_dtype);
        prepare(row, w.columns, w.format, t, m);
    });
    multiply(w, t, tokens, threads, [&](int64_t m, int64_t first, int rows, const float* values) {
        put(out, m * w.rows + first, values, rows, out_dtype);
    });
}
