// Attention of few query rows, which is bound by reading keys and values: they are read where they
// lie, and nothing of them is written elsewhere. All heads of a page are read one after the other.

constexpr int ROWS_AT_ONCE = 4;  // rows whose sums fit the registers
constexpr int LINE = 32;         // bfloat16 numbers in a register

// Queries as `few_scores` multiplies them: of each register's worth of a row, pair c of each lane of
// 128 bits four times, for c = 0..3.
inline void spread_query(const bf16* row, int64_t dim, __m512i* out) {
    for (int64_t i = 0; i < dim; i += LINE, out += 4) {
        __m512i x = _mm512_loadu_si512(row + i);
        out[0] = _mm512_shuffle_epi32(x, _MM_PERM_AAAA);
        out[1] = _mm512_shuffle_epi32(x, _MM_PERM_BBBB);
        out[2] = _mm512_shuffle_epi32(x, _MM_PERM_CCCC);
        out[3] = _mm512_shuffle_epi32(x, _MM_PERM_DDDD);
    }
}

inline __m512 dot2(__m512 acc, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// A block of up to FEW_KEYS keys (or values): runs of 16 within a page. Where SPREAD, pair p of tile t
// is pair t of run p: memory gives eight pages side by side faster than one after the other.
constexpr int RUNS = FEW_KEYS / TILE, PAIRS = TILE / 2;
static_assert(RUNS == PAIRS, "a pair of each run makes a tile");
struct Runs {
    const char* at[RUNS];
    int64_t step;  // bytes from one key to the next
    template <bool SPREAD, int STEP>
    const char* pair(int t, int p) const {
        return SPREAD ? at[p] + 2 * t * step_of<STEP>() : at[t] + 2 * p * step_of<STEP>();
    }
    template <int STEP>
    int64_t step_of() const {
        return STEP ? STEP : step;
    }
    void move(int64_t bytes) {
        for (auto& run : at) run += bytes;
    }
};

// The processor cannot guess where the next page is. Where it is asked for more than memory gives, it
// drops some lines; so what comes soon is asked for a second time.
struct Ahead {
    Runs far, near;
};
#define ALWAYS_INLINE inline __attribute__((always_inline))
// GCC sees no effect in its own prefetch, and leaves out functions that do nothing else.
ALWAYS_INLINE void fetch_line(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
// The lines [offset, offset + size) of pair p of tile t.
template <bool SPREAD, int STEP>
ALWAYS_INLINE void fetch_pair(const Runs& runs, int t, int p, int64_t offset, int64_t size) {
    const char* first = runs.pair<SPREAD, STEP>(t, p) + offset;
    UNROLL for (int64_t i = 0; i < size; i += 64) fetch_line(first + i);
    UNROLL for (int64_t i = 0; i < size; i += 64) fetch_line(first + runs.step_of<STEP>() + i);
}
// So many pairs of a tile are asked for between the products, the others between the exponentials.
constexpr int FAR_PAIRS = 6;
template <bool SPREAD, int STEP>
ALWAYS_INLINE void fetch_ahead(const Ahead& ahead, int t, int p, int64_t offset, int64_t size) {
    if (p < FAR_PAIRS) fetch_pair<SPREAD, STEP>(ahead.far, t, p, offset, size);
    fetch_pair<SPREAD, STEP>(ahead.near, t, p, offset, size);
}

// Scores of the 16 keys of tile t: out[r * out_row + key], without scale.
// DIM is `dim` where it is a common one, or 0: loops of known length are almost twice as fast.
template <int R, bool SPREAD, int DIM>
inline void few_scores(const Runs& keys, const Ahead& ahead, int t, int64_t dim, const __m512i* q,
                       int64_t q_row, float* out, int64_t out_row) {
    __m512 acc[R][4];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int g = 0; g < 4; ++g) acc[r][g] = _mm512_setzero_ps();
    constexpr int STEP = 2 * DIM;
    int64_t step = keys.step_of<STEP>(), size = 2 * (DIM ? DIM : dim);
    UNROLL for (int64_t i = 0; i < size; i += 64) {
        __m512i x[R][4];  // for all keys of the tile
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < 4; ++c) x[r][c] = q[r * q_row + i / 16 + c];
        UNROLL for (int g = 0; g < 4; ++g) {
            const char *first = keys.pair<SPREAD, STEP>(t, 2 * g), *second = keys.pair<SPREAD, STEP>(t, 2 * g + 1);
            fetch_ahead<SPREAD, STEP>(ahead, t, 2 * g, i, 64);
            fetch_ahead<SPREAD, STEP>(ahead, t, 2 * g + 1, i, 64);
            // Four keys side by side in each lane of 128 bits.
            __m512i k0 = _mm512_loadu_si512(first + i), k1 = _mm512_loadu_si512(first + step + i);
            __m512i k2 = _mm512_loadu_si512(second + i), k3 = _mm512_loadu_si512(second + step + i);
            __m512i low = _mm512_unpacklo_epi32(k0, k1), low2 = _mm512_unpacklo_epi32(k2, k3);
            __m512i high = _mm512_unpackhi_epi32(k0, k1), high2 = _mm512_unpackhi_epi32(k2, k3);
            __m512i pairs[4] = {_mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
                                _mm512_unpacklo_epi64(high, high2), _mm512_unpackhi_epi64(high, high2)};
            UNROLL for (int c = 0; c < 4; ++c)
                UNROLL for (int r = 0; r < R; ++r)
                    acc[r][g] = dot2(acc[r][g], pairs[c], x[r][c]);
        }
    }
    // The four lanes of each are summed up, and come to lie side by side.
    const __m512i crossed = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    auto halves = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
    };
    UNROLL for (int r = 0; r < R; ++r) {
        __m512 a = halves(acc[r][0], acc[r][2]), b = halves(acc[r][1], acc[r][3]);
        _mm512_storeu_ps(out + r * out_row, _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a, b),
                                                          _mm512_permutex2var_ps(a, crossed, b)));
    }
}

// 2^x to 2^-18 for x up to 127, at least 2^-126, in other execution units than products.
inline F exp2_few(F x) {
    const F whole = set1(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
    x = max(set1(-126.0f), x);
    F shifted = x + whole, r = x - (shifted - whole);
    F p = fma(set1(0.00958285294f), r, set1(0.0559064262f));
    p = fma(p, r, set1(0.240240991f));
    p = fma(p, r, set1(0.693124175f));
    p = fma(p, r, set1(1.0f));
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), exponent))};
}

// Weights of the keys that all are seen, with nothing but a scale: as `weigh`, but that a row takes a
// new largest score only where its weights would grow above e^6, as their roundings are relative.
constexpr float LAZY_FEW = 6;
template <class Fetch>
inline void few_weights(float scale, const float* scores, bf16* weights, float& most, float* totals,
                        float* sums, int64_t size, Fetch&& fetch) {
    F x[RUNS];
    UNROLL for (int t = 0; t < RUNS; ++t) x[t] = load(scores + t * TILE);
    F top = x[0];
    UNROLL for (int t = 1; t < RUNS; ++t) top = max(top, x[t]);
    float peak = largest(top) * scale;
    F total = load(totals);
    if (peak > most + LAZY_FEW) {
        F factor = set1(most > -INFINITY ? std::exp(most - peak) : 0);
        most = peak;
        total = total * factor;
        for (int64_t i = 0; i < size; i += TILE) store(sums + i, load(sums + i) * factor);
    }
    float shift = most > -INFINITY ? most : 0;
    UNROLL for (int t = 0; t < RUNS; ++t) {
        F weight = exp2_few(fma(x[t], set1(scale * LOG2_E), set1(-shift * LOG2_E)));
        total = total + weight;
        Paired::put_weight(weights + t * TILE, weight);
        fetch(t);
    }
    store(totals, total);
}

// sums[r * row + i] += sum over keys j of weights[r][j] values[j][i], for N registers' worth of values;
// of each register's worth first the lower, then the upper four of each eight (`in_order`).
// Of the block's keys, those in [from, to) count.
template <int R, int N, bool SPREAD, int DIM>
inline void few_sums(const Runs& values, const Ahead& ahead, int64_t offset, int from, int to,
                     const bf16* weights, int64_t weights_row, float* sums, int64_t row) {
    constexpr int STEP = 2 * DIM;
    int64_t step = values.step_of<STEP>();
    F acc[R][2 * N];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int i = 0; i < 2 * N; ++i) acc[r][i] = load(sums + r * row + i * TILE);
    auto add = [&](const char* first, const char* second, const bf16* w) {
        __m512i weight[R];
        UNROLL for (int r = 0; r < R; ++r) {
            int32_t two;
            memcpy(&two, w + r * weights_row, 4);
            weight[r] = _mm512_set1_epi32(two);
        }
        UNROLL for (int n = 0; n < N; ++n) {
            __m512i a = _mm512_loadu_si512(first + 64 * n), b = _mm512_loadu_si512(second + 64 * n);
            __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
            UNROLL for (int r = 0; r < R; ++r) {
                acc[r][2 * n].v = dot2(acc[r][2 * n].v, low, weight[r]);
                acc[r][2 * n + 1].v = dot2(acc[r][2 * n + 1].v, high, weight[r]);
            }
        }
    };
    for (int t = from / TILE; t * TILE < to; ++t) {
        if (SPREAD || (from <= t * TILE && to >= (t + 1) * TILE)) {
            UNROLL for (int p = 0; p < PAIRS; ++p) {
                const char* first = values.pair<SPREAD, STEP>(t, p) + offset;
                fetch_ahead<SPREAD, STEP>(ahead, t, p, offset, 64 * N);
                add(first, first + step, weights + t * TILE + 2 * p);
            }
            continue;
        }
        // Values outside [from, to) may be anything: another's stand for them, without a weight.
        int low = from > t * TILE ? from - t * TILE : 0, high = to - t * TILE < TILE ? to - t * TILE : TILE;
        for (int j = low / 2 * 2; j < high; j += 2) {
            int first = j < low ? low : j, second = j + 1 < high ? j + 1 : high - 1;
            const char* at = values.at[t] + offset;
            add(at + first * step, at + second * step, weights + t * TILE + j);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int i = 0; i < 2 * N; ++i) store(sums + r * row + i * TILE, acc[r][i]);
}

inline void in_order(float* sums, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t i = 0; i < dim; i += LINE) {
        __m512 low = _mm512_loadu_ps(sums + i), high = _mm512_loadu_ps(sums + i + TILE);
        _mm512_storeu_ps(sums + i, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(sums + i + TILE, _mm512_permutex2var_ps(low, second, high));
    }
}

inline bool few_fits(const Attention& a) {
    return a.dtype == BFLOAT16 && a.k_dim % LINE == 0 && a.v_dim % LINE == 0 && a.page_size % TILE == 0;
}

#define FOR_ROWS(R, call) \
    switch (R) { \
        default: call(4); break; \
        case 3: call(3); break; \
        case 2: call(2); break; \
        case 1: call(1); \
    }

// `count` parts of one request and head in a row; following: the item that this thread takes next.
inline void attend_few(const Attention& a, const Item* items, int64_t count, const Item* following,
                       const Partials& partials) {
    const Item& one = *items;
    int64_t group = a.num_q_heads / a.num_kv_heads, rows = one.rows, q_row = a.k_dim / LINE * 4;
    int64_t begin = a.cu_seqlens_q[one.request], v_dim = a.v_dim;
    int64_t q_len = a.cu_seqlens_q[one.request + 1] - begin, kv_len = a.kv_lens[one.request];
    int64_t all_rows = one.heads * rows;

    // Parts that this call computes all of stay here.
    bool alone = one.split >= 0 && count == one.parts;
    int64_t own_bytes = alone ? one.heads * one.parts * partials.each * 4 : 0;
    Memory memory(own_bytes + all_rows * (q_row * 64 + v_dim * 4 + TILE * 4 + 4) + up(rows * FEW_KEYS * 6, 64) +
                  up(a.k_dim * 2, 64) + 64 * 8);
    char* at = memory.data;
    auto take = [&](int64_t size) { char* here = at; at += up(size, 64); return here; };
    auto q = reinterpret_cast<__m512i*>(take(all_rows * q_row * 64));
    auto sums = reinterpret_cast<float*>(take(all_rows * v_dim * 4));
    auto totals = reinterpret_cast<float*>(take(all_rows * TILE * 4));
    auto most = reinterpret_cast<float*>(take(all_rows * 4));
    auto scores = reinterpret_cast<float*>(take(rows * FEW_KEYS * 4));
    auto weights = reinterpret_cast<bf16*>(take(rows * FEW_KEYS * 2));
    auto query = reinterpret_cast<bf16*>(take(a.k_dim * 2));
    float* own = alone ? reinterpret_cast<float*>(take(own_bytes)) : nullptr;
    Sight sight[FEW_ROWS];
    int32_t seen_from = 0, seen_to = static_cast<int32_t>(kv_len);  // by all rows
    for (int64_t r = 0; r < rows; ++r) {
        sight[r] = sight_of(a, kv_len - q_len + r / group, kv_len);
        seen_from = sight[r].low > seen_from ? sight[r].low : seen_from;
        seen_to = sight[r].high < seen_to ? sight[r].high : seen_to;
    }
    for (int64_t i = 0; i < all_rows; ++i) {
        int64_t r = i % rows, head = (one.kv_head + i / rows) * group + r % group;
        float* wide = scratch(a.k_dim);
        get(wide, a.q, (begin + r / group) * a.q_token + head * a.q_head, a.k_dim, a.q_dtype);
        put(query, wide, a.k_dim);
        spread_query(query, a.k_dim, q + i * q_row);
    }

    struct Place {
        Runs keys, values;  // of the item's first head
    } places[2];
    auto locate = [&](const Item& item, int32_t first, Place& place) {
        const int32_t* table = a.page_table + item.request * a.table_row;
        place.keys.step = a.k.slot * 2;
        place.values.step = a.v.slot * 2;
        for (int i = 0; i < RUNS; ++i) {
            // A run that is not there is not read; fetching the last one again costs little.
            int32_t key = first + i * TILE < item.end ? first + i * TILE : (item.end - 1) / TILE * TILE;
            int64_t page = table[key / a.page_size], slot = key % a.page_size;
            place.keys.at[i] = a.k.data + (page * a.k.page + item.kv_head * a.k.head + slot * a.k.slot) * 2;
            place.values.at[i] = a.v.data + (page * a.v.page + item.kv_head * a.v.head + slot * a.v.slot) * 2;
        }
    };
    bool plain = a.softcap == 0 && a.scale > 0;
    // A common dimension, with rows side by side, or 0.
    bool dense = a.k_dim == v_dim && a.k.slot == a.k_dim && a.v.slot == v_dim;
    int64_t known = dense && (v_dim == 64 || v_dim == 128) ? v_dim : 0;
    int now = 0;
    if (one.first < one.end) locate(one, one.first / TILE * TILE, places[0]);
    for (int64_t part = 0; part < count; ++part) {
        const Item& item = items[part];
        const Item* after = part + 1 < count ? items + part + 1 : following;
        for (int64_t i = 0; i < all_rows; ++i) {
            most[i] = -INFINITY;
            store(totals + i * TILE, zero());
            for (int64_t j = 0; j < v_dim; j += TILE) store(sums + i * v_dim + j, zero());
        }
        for (int32_t first = item.first / TILE * TILE; first < item.end; first += FEW_KEYS, now ^= 1) {
            Place &here = places[now], &next = places[now ^ 1];
            bool last = first + FEW_KEYS >= item.end;
            if (!last) locate(item, first + FEW_KEYS, next);
            else if (after && after->first < after->end) locate(*after, after->first / TILE * TILE, next);
            else next = here;
            Place far = next;
            int keys = last ? item.end - first : FEW_KEYS, tiles = (keys + TILE - 1) / TILE;
            bool spread = keys == FEW_KEYS && first >= item.first && first >= seen_from &&
                          first + FEW_KEYS <= seen_to;
            for (int64_t h = 0; h < item.heads; ++h) {
                int64_t row = h * rows;
                Ahead ahead{far.keys, here.values};
                for (int t = 0; t < tiles; ++t) {
                    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
                        float* to = scores + r * FEW_KEYS + t * TILE;
                        const __m512i* x = q + (row + r) * q_row;
#define SCORES(R, S, D) few_scores<R, S, D>(here.keys, ahead, t, a.k_dim, x, q_row, to, FEW_KEYS)
#define CALL(R) \
    if (known == 64) spread ? SCORES(R, true, 64) : SCORES(R, false, 64); \
    else if (known == 128) spread ? SCORES(R, true, 128) : SCORES(R, false, 128); \
    else spread ? SCORES(R, true, 0) : SCORES(R, false, 0)
                        FOR_ROWS(rows - r, CALL)
#undef CALL
#undef SCORES
                    }
                }
                for (int64_t r = 0; r < rows; ++r) {
                    float *x = scores + r * FEW_KEYS, *sum = sums + (row + r) * v_dim;
                    float* total = totals + (row + r) * TILE;
                    bf16* w = weights + r * FEW_KEYS;
                    auto fetch = [&](int t) {
#define FETCH(S, D, K, V) \
    UNROLL for (int p = FAR_PAIRS; p < PAIRS; ++p) { \
        if (r == 0) fetch_pair<S, D>(far.keys, t, p, 0, K); \
        if (r == rows - 1) fetch_pair<S, D>(far.values, t, p, 0, V); \
    }
                        if (spread && known == 64) { FETCH(true, 128, 128, 128) }
                        else if (spread) { FETCH(true, 0, 2 * a.k_dim, 2 * v_dim) }
                        else { FETCH(false, 0, 2 * a.k_dim, 2 * v_dim) }
#undef FETCH
                    };
                    if (spread && plain) {
                        few_weights(a.scale, x, w, most[row + r], total, sum, v_dim, fetch);
                        continue;
                    }
                    Sight seen = sight[r];
                    seen.low = seen.low > item.first ? seen.low : item.first;
                    seen.high = seen.high < item.end ? seen.high : item.end;
                    weigh<Paired>(a, seen, first, tiles, x, w, most[row + r], total, sum, v_dim);
                    for (int t = 0; t < tiles; ++t) fetch(t);
                }
                here.keys.move(a.k.head * 2);
                ahead.far = far.values;
                ahead.near = h + 1 < item.heads ? here.keys : next.keys;
                for (int64_t i = 0; i < v_dim;) {
                    bool two = i + 2 * LINE <= v_dim;
                    int from = item.first > first ? item.first - first : 0;
                    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
                        float* out = sums + (row + r) * v_dim + i;
                        const bf16* w = weights + r * FEW_KEYS;
#define SUMS(R, N, S, D) few_sums<R, N, S, D>(here.values, ahead, 2 * i, from, keys, w, FEW_KEYS, out, v_dim)
#define CALL(R) \
    if (known == 64) spread ? SUMS(R, 2, true, 64) : SUMS(R, 2, false, 64); \
    else if (known == 128) spread ? SUMS(R, 2, true, 128) : SUMS(R, 2, false, 128); \
    else if (two) spread ? SUMS(R, 2, true, 0) : SUMS(R, 2, false, 0); \
    else spread ? SUMS(R, 1, true, 0) : SUMS(R, 1, false, 0)
                        FOR_ROWS(rows - r, CALL)
#undef CALL
#undef SUMS
                    }
                    i += two ? 2 * LINE : LINE;
                }
                here.values.move(a.v.head * 2);
                far.keys.move(a.k.head * 2);
                far.values.move(a.v.head * 2);
            }
        }
        for (int64_t i = 0; i < all_rows; ++i) in_order(sums + i * v_dim, v_dim);
        for (int32_t h = 0; h < item.heads; ++h)
            deliver(a, item, item.kv_head + h, partials, sums + h * rows * v_dim, most + h * rows,
                    totals + h * rows * TILE, own ? own + h * one.parts * partials.each : nullptr);
    }
}
