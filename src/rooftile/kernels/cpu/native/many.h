// Attention of many query rows in pairs of bfloat16. The lanes of a register are query rows, so that
// keys are read as they lie, largest scores and sums need no step across lanes, and scores become
// weights in the registers that they were summed up in.

constexpr int LANE_TILES = 3;    // registers of rows at most
constexpr int KEYS_AT_ONCE = 8;  // keys (or columns of values) for each of them
// A row is scaled to a new largest score only where its weights would grow above 2^8, which costs 16-bit
// weights nothing: their rounding is relative (FlashAttention-4).
constexpr float LAZY = 8;

// acc[m][n] += sum over pairs p of x[m * x_row + p * x_step] w[p][n]
template <int N>
inline void many_product(__m512 (&acc)[KEYS_AT_ONCE][N], const uint32_t* x, int64_t x_row, int64_t x_step,
                         const uint32_t* w, int64_t pairs) {
    for (int64_t p = 0; p < pairs; ++p, x += x_step, w += N * TILE) {
        __m512i rows[N];
        UNROLL for (int n = 0; n < N; ++n) rows[n] = _mm512_load_si512(w + n * TILE);
        UNROLL for (int m = 0; m < KEYS_AT_ONCE; ++m) {
            __m512i value = _mm512_set1_epi32(static_cast<int32_t>(x[m * x_row]));
            UNROLL for (int n = 0; n < N; ++n) acc[m][n] = dot2(acc[m][n], value, rows[n]);
        }
    }
}

// What is known of N registers of rows.
template <int N>
struct RowState {
    const Attention* a;
    int64_t columns;      // of values, in whole lines
    uint32_t* q;          // [k pairs][N][16]
    uint32_t* weights;    // [key pairs of a block][N][16]
    float* sums;          // [columns][N][16]
    __m512 most[N];       // largest score that weights are relative to, times log2(e); -inf: none yet
    __m512 shift[N];      // the same, 0 where there is none yet
    __m512 totals[N];
    __m512i low[N], high[N];  // keys that a row sees
    int32_t seen_from, seen_to, end;  // keys that all rows see, and the end of those that any does
};

template <int N>
inline void many_sums(RowState<N>& s, const uint32_t* values, int from, int to) {
    if (from == to) return;
    for (int64_t i = 0; i < s.columns; i += KEYS_AT_ONCE) {
        __m512 acc[KEYS_AT_ONCE][N];
        float* at = s.sums + i * N * TILE;
        UNROLL for (int m = 0; m < KEYS_AT_ONCE; ++m)
            UNROLL for (int n = 0; n < N; ++n) acc[m][n] = _mm512_load_ps(at + (m * N + n) * TILE);
        many_product<N>(acc, values + from * s.columns + i, 1, s.columns, s.weights + from * N * TILE, to - from);
        UNROLL for (int m = 0; m < KEYS_AT_ONCE; ++m)
            UNROLL for (int n = 0; n < N; ++n) _mm512_store_ps(at + (m * N + n) * TILE, acc[m][n]);
    }
}

// Scores that need more than the scale: in units of log2(e), -inf where a row does not see the key.
template <int N>
inline void many_special(const RowState<N>& s, __m512 (&acc)[KEYS_AT_ONCE][N], int32_t first, bool whole) {
    const Attention& a = *s.a;
    UNROLL for (int m = 0; m < KEYS_AT_ONCE; ++m) {
        __m512i key = _mm512_set1_epi32(first + m);
        UNROLL for (int n = 0; n < N; ++n) {
            F x = F{acc[m][n]} * set1(a.scale);
            if (a.softcap != 0) x = tanh(x * set1(1 / a.softcap)) * set1(a.softcap);
            x = x * set1(LOG2_E);
            if (!whole) {
                __mmask16 seen = _mm512_cmple_epi32_mask(s.low[n], key) & _mm512_cmplt_epi32_mask(key, s.high[n]);
                x.v = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x.v);
            }
            acc[m][n] = x.v;
        }
    }
}

// Rows take a new largest score; weights of the block so far are summed up relative to the old one.
template <int N>
inline void many_rescale(RowState<N>& s, const __m512 (&top)[N], const uint32_t* values, int& from, int to) {
    many_sums<N>(s, values, from, to);
    from = to;
    __m512 factor[N];
    UNROLL for (int n = 0; n < N; ++n) {
        __m512 most = max(F{s.most[n]}, F{top[n]}).v;
        // Without a score so far, sums and totals are 0, and any factor will do.
        __mmask16 some = _mm512_cmp_ps_mask(s.most[n], _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ);
        factor[n] = _mm512_maskz_mov_ps(some, exp2_quick(F{s.most[n]} - F{most}).v);
        s.most[n] = most;
        __mmask16 none = _mm512_cmp_ps_mask(most, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
        s.shift[n] = _mm512_mask_blend_ps(none, most, _mm512_setzero_ps());
        s.totals[n] = _mm512_mul_ps(s.totals[n], factor[n]);
    }
    for (int64_t i = 0; i < s.columns; ++i)
        UNROLL for (int n = 0; n < N; ++n) {
            float* at = s.sums + (i * N + n) * TILE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor[n]));
        }
}

// A block of `padded` keys from first on, a multiple of 8. ahead: fetched meanwhile.
template <int N>
inline void many_block(RowState<N>& s, const uint32_t* keys, int64_t k_pairs, const uint32_t* values,
                       int32_t first, int padded, const Block* ahead) {
    const __m512i pair_lanes = _mm512_setr_epi32(0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004,
                                                 0x00150005, 0x00160006, 0x00170007, 0x00180008, 0x00190009,
                                                 0x001a000a, 0x001b000b, 0x001c000c, 0x001d000d, 0x001e000e,
                                                 0x001f000f);
    int count = s.end - first < padded ? static_cast<int>(up(s.end - first, KEYS_AT_ONCE)) : padded, from = 0;
    for (int j = 0; j < count; j += KEYS_AT_ONCE) {
        bool whole = first + j >= s.seen_from && first + j + KEYS_AT_ONCE <= s.seen_to;
        bool special = !whole || s.a->softcap != 0 || !(s.a->scale > 0);
        const F scale = set1(special ? 1.0f : s.a->scale * LOG2_E);
        for (int m = j; ahead && m < j + KEYS_AT_ONCE && m < ahead->count; ++m) {
            for (int64_t i = 0; i < 2 * s.a->k_dim; i += 64) fetch_line(ahead->keys[m] + i);
            for (int64_t i = 0; i < 2 * s.a->v_dim; i += 64) fetch_line(ahead->values[m] + i);
        }
        __m512 acc[KEYS_AT_ONCE][N];
        UNROLL for (int m = 0; m < KEYS_AT_ONCE; ++m)
            UNROLL for (int n = 0; n < N; ++n) acc[m][n] = _mm512_setzero_ps();
        many_product<N>(acc, keys + j * k_pairs, k_pairs, 1, s.q, k_pairs);
        if (special) many_special<N>(s, acc, first + j, whole);
        __m512 top[N];
        __mmask16 grown = 0;
        UNROLL for (int n = 0; n < N; ++n) {
            F most = F{acc[0][n]};
            UNROLL for (int m = 1; m < KEYS_AT_ONCE; ++m) most = max(most, F{acc[m][n]});
            top[n] = (most * scale).v;
            grown |= _mm512_cmp_ps_mask(top[n], (F{s.most[n]} + set1(LAZY)).v, _CMP_GT_OQ);
        }
        if (grown) many_rescale<N>(s, top, values, from, j / 2);
        UNROLL for (int n = 0; n < N; ++n) {
            F total{s.totals[n]}, shift = zero() - F{s.shift[n]};
            UNROLL for (int m = 0; m < KEYS_AT_ONCE; m += 2) {
                F a = exp2_quick(fma(F{acc[m][n]}, scale, shift));
                F b = exp2_quick(fma(F{acc[m + 1][n]}, scale, shift));
                total = total + (a + b);
                auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
                _mm512_store_si512(s.weights + ((j + m) / 2 * N + n) * TILE,
                                   _mm512_permutexvar_epi16(pair_lanes, both));
            }
            s.totals[n] = total.v;
        }
    }
    many_sums<N>(s, values, from, count / 2);
}

inline void copy_key(const char* from, int64_t dim, uint32_t* to) {
    if (dim % 2) to[dim / 2] = 0;
    auto x = reinterpret_cast<const bf16*>(from);
    auto out = reinterpret_cast<bf16*>(to);
    int64_t i = 0;
    for (; i + LINE <= dim; i += LINE) _mm512_storeu_si512(out + i, _mm512_loadu_si512(x + i));
    if (i < dim) {
        __mmask32 some = (__mmask32(1) << (dim - i)) - 1;
        _mm512_mask_storeu_epi16(out + i, some, _mm512_maskz_loadu_epi16(some, x + i));
    }
}

// Two rows of values -> pairs: of each line first the lower, then the upper four of each eight numbers.
inline void pair_values(const bf16* a, const bf16* b, int64_t dim, uint32_t* out) {
    for (int64_t i = 0; i < dim; i += LINE) {
        __mmask32 some = dim - i >= LINE ? ~__mmask32(0) : (__mmask32(1) << (dim - i)) - 1;
        __m512i x = _mm512_maskz_loadu_epi16(some, a + i), y = _mm512_maskz_loadu_epi16(some, b + i);
        _mm512_store_si512(out + i, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(out + i + TILE, _mm512_unpackhi_epi16(x, y));
    }
}

// Rows [item.row + first_row, ...) of an item: N registers of them.
template <int N>
inline RowState<N> many_rows(const Attention& a, const Item& item, int first_row, char* memory) {
    int64_t group = a.num_q_heads / a.num_kv_heads, k_pairs = up(a.k_dim, 2) / 2, lanes = N * TILE;
    int64_t begin = a.cu_seqlens_q[item.request];
    int64_t q_len = a.cu_seqlens_q[item.request + 1] - begin, kv_len = a.kv_lens[item.request];
    RowState<N> s{&a, up(a.v_dim, LINE)};
    s.q = reinterpret_cast<uint32_t*>(memory);
    s.weights = s.q + lanes * k_pairs;
    s.sums = reinterpret_cast<float*>(s.weights + lanes * BLOCK_KEYS / 2);
    int32_t low[N * TILE], high[N * TILE];
    s.seen_from = 0;
    s.seen_to = item.end;
    s.end = 0;
    int64_t row_words = up(k_pairs, TILE);
    alignas(64) uint32_t turned[TILE * TILE];
    Memory stage(TILE * row_words * 4);  // 16 rows in bfloat16
    auto staged = reinterpret_cast<uint32_t*>(stage.data);
    const uint32_t* row_at[TILE];
    for (int i = 0; i < TILE; ++i) row_at[i] = staged + i * row_words;
    for (int n = 0; n < N; ++n) {
        memset(staged, 0, static_cast<size_t>(TILE * row_words * 4));
        for (int i = 0, r = n * TILE; i < TILE; ++i, ++r) {
            low[r] = high[r] = 0;
            if (first_row + r >= item.rows) continue;
            int64_t at = item.row + first_row + r, query = at / group, head = item.kv_head * group + at % group;
            float* row = scratch(a.k_dim);
            get(row, a.q, (begin + query) * a.q_token + head * a.q_head, a.k_dim, a.q_dtype);
            put(reinterpret_cast<bf16*>(staged + i * row_words), row, a.k_dim);
            Sight seen = sight_of(a, kv_len - q_len + query, kv_len);
            low[r] = seen.low > item.first ? seen.low : item.first;
            high[r] = seen.high < item.end ? seen.high : item.end;
            s.seen_from = low[r] > s.seen_from ? low[r] : s.seen_from;
            s.seen_to = high[r] < s.seen_to ? high[r] : s.seen_to;
            s.end = high[r] > s.end ? high[r] : s.end;
        }
        for (int64_t p = 0; p < k_pairs; p += TILE) {
            transpose(row_at, p, turned);
            for (int64_t i = 0; i < TILE && p + i < k_pairs; ++i)
                memcpy(s.q + ((p + i) * N + n) * TILE, turned + i * TILE, TILE * 4);
        }
    }
    for (int n = 0; n < N; ++n) {
        s.most[n] = _mm512_set1_ps(-INFINITY);
        s.shift[n] = s.totals[n] = _mm512_setzero_ps();
        s.low[n] = _mm512_loadu_si512(low + n * TILE);
        s.high[n] = _mm512_loadu_si512(high + n * TILE);
    }
    memset(s.sums, 0, static_cast<size_t>(lanes * s.columns * 4));
    return s;
}

// Delivers them; memory: floats [N * 16][v_padded + 17].
template <int N>
inline void many_finish(const RowState<N>& s, const Item& item, int first_row, const Partials& partials,
                        float* memory) {
    int64_t v_padded = up(s.a->v_dim, TILE), lanes = N * TILE;
    float *rows = memory, *totals = rows + lanes * v_padded, *most = totals + lanes * TILE;
    for (int n = 0; n < N; ++n) {
        float total[TILE];
        store(total, F{s.totals[n]});
        store(most + n * TILE, F{s.most[n]} * set1(1 / LOG2_E));
        for (int i = 0; i < TILE; ++i) {
            store(totals + (n * TILE + i) * TILE, zero());
            totals[(n * TILE + i) * TILE] = total[i];
        }
    }
    Item mine = item;
    mine.row += first_row;
    mine.rows = item.rows - first_row < lanes ? item.rows - first_row : static_cast<int32_t>(lanes);
    alignas(64) uint32_t turned[TILE * TILE];
    for (int64_t i = 0; i < v_padded; i += TILE)
        for (int n = 0; n < N; ++n) {
            const uint32_t* column_at[TILE];
            for (int64_t j = i; j < i + TILE; ++j) {
                int64_t column = j / LINE * LINE + j % 8 / 4 * TILE + j % LINE / 8 * 4 + j % 4;
                column_at[j - i] = reinterpret_cast<const uint32_t*>(s.sums) + (column * N + n) * TILE;
            }
            transpose(column_at, 0, turned);
            for (int r = 0; r < TILE; ++r) memcpy(rows + (n * TILE + r) * v_padded + i, turned + r * TILE, TILE * 4);
        }
    deliver(*s.a, mine, item.kv_head, partials, rows, most, totals);
}

// Rows by 3 registers at once, and by REST registers what is left (0: nothing).
template <int REST>
inline void attend_many(const Attention& a, const Item& item, const Partials& partials, const char* zeros) {
    constexpr int N = LANE_TILES, LANES = N * TILE;
    int64_t k_pairs = up(a.k_dim, 2) / 2, columns = up(a.v_dim, LINE);
    int64_t each = LANES * (k_pairs + BLOCK_KEYS / 2 + columns), parts = (item.rows - REST * TILE + LANES - 1) / LANES;
    int64_t finish = LANES * (up(a.v_dim, TILE) + TILE + 1);
    Memory memory((BLOCK_KEYS * k_pairs + BLOCK_KEYS / 2 * columns + (parts + 1) * each + finish) * 4);
    auto keys = reinterpret_cast<uint32_t*>(memory.data), values = keys + BLOCK_KEYS * k_pairs;
    uint32_t* of_rows = values + BLOCK_KEYS / 2 * columns;
    auto place = [&](int64_t i) { return reinterpret_cast<char*>(of_rows + i * each); };
    RowState<N> states[MANY_ROWS / LANES] = {};
    for (int i = 0; i < parts; ++i) states[i] = many_rows<N>(a, item, i * LANES, place(i));
    RowState<REST ? REST : 1> rest{};
    if (REST) rest = many_rows<REST ? REST : 1>(a, item, static_cast<int>(parts) * LANES, place(parts));

    Block blocks[2];
    int now = 0;
    locate(a, item, item.first, blocks[0]);
    for (int32_t first = item.first; first < item.end; first += BLOCK_KEYS, now ^= 1) {
        Block &block = blocks[now], &ahead = blocks[now ^ 1];
        locate(a, item, first + BLOCK_KEYS, ahead);
        int count = block.count, padded = static_cast<int>(up(count, KEYS_AT_ONCE));
        for (int j = count; j < padded; ++j) block.keys[j] = block.values[j] = zeros;
        for (int j = 0; j < padded; ++j) copy_key(block.keys[j], a.k_dim, keys + j * k_pairs);
        for (int j = 0; j < padded; j += 2)
            pair_values(reinterpret_cast<const bf16*>(block.values[j]),
                        reinterpret_cast<const bf16*>(block.values[j + 1]), a.v_dim, values + j / 2 * columns);
        const Block* fetched = &ahead;
        for (int i = 0; i < parts; ++i) {
            if (first >= states[i].end) continue;
            many_block(states[i], keys, k_pairs, values, first, padded, fetched);
            fetched = nullptr;
        }
        if (REST && first < rest.end) many_block(rest, keys, k_pairs, values, first, padded, fetched);
    }
    auto result = reinterpret_cast<float*>(place(parts + 1));
    for (int i = 0; i < parts; ++i) many_finish(states[i], item, i * LANES, partials, result);
    if (REST) many_finish(rest, item, static_cast<int>(parts) * LANES, partials, result);
}

inline void attend_many(const Attention& a, const Item& item, const Partials& partials, const char* zeros) {
    switch ((item.rows + TILE - 1) / TILE % LANE_TILES) {
        case 1: attend_many<1>(a, item, partials, zeros); break;
        case 2: attend_many<2>(a, item, partials, zeros); break;
        default: attend_many<0>(a, item, partials, zeros);
    }
}
