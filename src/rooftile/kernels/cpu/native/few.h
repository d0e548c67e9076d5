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

// The processor cannot guess where the next page is. Lines are asked for one by one: it drops what is
// more than some at once.
inline void fetch_line(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

// A block of up to FEW_KEYS keys (or values): runs of 16 within a page. Where SPREAD, pair p of tile t
// is pair t of run p: memory gives eight pages side by side faster than one after the other.
constexpr int RUNS = FEW_KEYS / TILE, PAIRS = TILE / 2;
static_assert(RUNS == PAIRS, "a pair of each run makes a tile");
struct Runs {
    const char* at[RUNS];
    int64_t step;  // bytes from one key to the next
    template <bool SPREAD>
    const char* pair(int t, int p) const {
        return SPREAD ? at[p] + 2 * t * step : at[t] + 2 * p * step;
    }
};

// Scores of the 16 keys of tile t: out[r * out_row + key], without scale. ahead: what to fetch meanwhile.
// DIM is `dim` where it is a common one, or 0: loops of known length are almost twice as fast.
template <int R, bool SPREAD, int DIM>
inline void few_scores(const Runs& keys, const Runs& ahead, int t, int64_t dim, const __m512i* q,
                       int64_t q_row, float* out, int64_t out_row) {
    __m512 acc[R][4];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int g = 0; g < 4; ++g) acc[r][g] = _mm512_setzero_ps();
    UNROLL for (int g = 0; g < 4; ++g) {
        const char *first = keys.pair<SPREAD>(t, 2 * g), *second = keys.pair<SPREAD>(t, 2 * g + 1);
        const char *far = ahead.pair<SPREAD>(t, 2 * g), *far2 = ahead.pair<SPREAD>(t, 2 * g + 1);
        int64_t step = keys.step;
        // In the order of addresses, which the processor's own prefetching follows.
        for (const char* line : {far, far + step, far2, far2 + step})
            UNROLL for (int64_t i = 0; i < 2 * (DIM ? DIM : dim); i += 64) fetch_line(line + i);
        UNROLL for (int64_t i = 0; i < 2 * (DIM ? DIM : dim); i += 64) {
            const __m512i* x = q + i / 16;
            // Four keys side by side in each lane of 128 bits.
            __m512i k0 = _mm512_loadu_si512(first + i), k1 = _mm512_loadu_si512(first + step + i);
            __m512i k2 = _mm512_loadu_si512(second + i), k3 = _mm512_loadu_si512(second + step + i);
            __m512i low = _mm512_unpacklo_epi32(k0, k1), low2 = _mm512_unpacklo_epi32(k2, k3);
            __m512i high = _mm512_unpackhi_epi32(k0, k1), high2 = _mm512_unpackhi_epi32(k2, k3);
            __m512i pairs[4] = {_mm512_unpacklo_epi64(low, low2), _mm512_unpackhi_epi64(low, low2),
                                _mm512_unpacklo_epi64(high, high2), _mm512_unpackhi_epi64(high, high2)};
            UNROLL for (int c = 0; c < 4; ++c)
                UNROLL for (int r = 0; r < R; ++r)
                    acc[r][g] = dot2(acc[r][g], pairs[c], x[r * q_row + c]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) {
        __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(acc[r][0], acc[r][1], 0x44),
                                 _mm512_shuffle_f32x4(acc[r][0], acc[r][1], 0xee));
        __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(acc[r][2], acc[r][3], 0x44),
                                 _mm512_shuffle_f32x4(acc[r][2], acc[r][3], 0xee));
        _mm512_storeu_ps(out + r * out_row, _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88),
                                                          _mm512_shuffle_f32x4(a, b, 0xdd)));
    }
}

// sums[r * row + i] += sum over keys j of weights[r][j] values[j][i], for N registers' worth of values
// of the keys [from, to) of tile t; of each register's worth first the lower, then the upper four of
// each eight (`in_order`).
template <int R, int N, bool SPREAD>
inline void few_sums(const Runs& values, const Runs& ahead, int t, int64_t offset, int from, int to,
                     const bf16* weights, int64_t weights_row, float* sums, int64_t row) {
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
    if (SPREAD || (from == 0 && to == TILE)) {
        UNROLL for (int p = 0; p < PAIRS; ++p) {
            const char *first = values.pair<SPREAD>(t, p) + offset, *far = ahead.pair<SPREAD>(t, p) + offset;
            UNROLL for (int n = 0; n < N; ++n) fetch_line(far + 64 * n);
            UNROLL for (int n = 0; n < N; ++n) fetch_line(far + values.step + 64 * n);
            add(first, first + values.step, weights + 2 * p);
        }
    } else {
        // Values outside [from, to) may be anything: another's stand for them, without a weight.
        for (int j = from / 2 * 2; j < to; j += 2) {
            int first = j < from ? from : j, second = j + 1 < to ? j + 1 : to - 1;
            const char* at = values.at[t] + offset;
            add(at + first * values.step, at + second * values.step, weights + j);
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

inline void attend_few(const Attention& a, const Item& item, const Item* following,
                       const Partials& partials) {
    int64_t group = a.num_q_heads / a.num_kv_heads, rows = item.rows, q_row = a.k_dim / LINE * 4;
    int64_t begin = a.cu_seqlens_q[item.request], v_dim = a.v_dim;
    int64_t q_len = a.cu_seqlens_q[item.request + 1] - begin, kv_len = a.kv_lens[item.request];
    int64_t all_rows = item.heads * rows;

    Memory memory(all_rows * (q_row * 64 + v_dim * 4 + TILE * 4 + 4) + up(rows * FEW_KEYS * 6, 64) +
                  up(a.k_dim * 2, 64) + 64 * 7);
    char* at = memory.data;
    auto take = [&](int64_t size) { char* here = at; at += up(size, 64); return here; };
    auto q = reinterpret_cast<__m512i*>(take(all_rows * q_row * 64));
    auto sums = reinterpret_cast<float*>(take(all_rows * v_dim * 4));
    auto totals = reinterpret_cast<float*>(take(all_rows * TILE * 4));
    auto most = reinterpret_cast<float*>(take(all_rows * 4));
    auto scores = reinterpret_cast<float*>(take(rows * FEW_KEYS * 4));
    auto weights = reinterpret_cast<bf16*>(take(rows * FEW_KEYS * 2));
    auto query = reinterpret_cast<bf16*>(take(a.k_dim * 2));
    Sight sight[FEW_ROWS];
    for (int64_t r = 0; r < rows; ++r) sight[r] = sight_of(a, kv_len - q_len + r / group, kv_len);
    for (int64_t i = 0; i < all_rows; ++i) {
        int64_t r = i % rows, head = (item.kv_head + i / rows) * group + r % group;
        float* wide = scratch(a.k_dim);
        get(wide, a.q, (begin + r / group) * a.q_token + head * a.q_head, a.k_dim, a.q_dtype);
        put(query, wide, a.k_dim);
        spread_query(query, a.k_dim, q + i * q_row);
        most[i] = -INFINITY;
        store(totals + i * TILE, zero());
        for (int64_t j = 0; j < v_dim; j += TILE) store(sums + i * v_dim + j, zero());
    }

    struct Place {
        Runs keys, values;  // of the item's first head
    } places[2];
    auto locate = [&](const Item& one, int32_t first, Place& place) {
        const int32_t* table = a.page_table + one.request * a.table_row;
        place.keys.step = a.k.slot * 2;
        place.values.step = a.v.slot * 2;
        for (int i = 0; i < RUNS; ++i) {
            // A run that is not there is not read; fetching the last one again costs little.
            int32_t key = first + i * TILE < one.end ? first + i * TILE : (one.end - 1) / TILE * TILE;
            int64_t page = table[key / a.page_size], slot = key % a.page_size;
            place.keys.at[i] = a.k.data + (page * a.k.page + one.kv_head * a.k.head + slot * a.k.slot) * 2;
            place.values.at[i] = a.v.data + (page * a.v.page + one.kv_head * a.v.head + slot * a.v.slot) * 2;
        }
    };
    auto move = [](Runs& runs, int64_t bytes) {
        for (auto& run : runs.at) run += bytes;
    };
    int32_t seen_from = 0, seen_to = item.end;  // by all rows
    for (int64_t r = 0; r < rows; ++r) {
        seen_from = sight[r].low > seen_from ? sight[r].low : seen_from;
        seen_to = sight[r].high < seen_to ? sight[r].high : seen_to;
    }
    int now = 0;
    int32_t start = item.first / TILE * TILE;
    if (item.first < item.end) locate(item, start, places[0]);
    for (int32_t first = start; first < item.end; first += FEW_KEYS, now ^= 1) {
        Place &here = places[now], &next = places[now ^ 1];
        bool last = first + FEW_KEYS >= item.end;
        if (!last) locate(item, first + FEW_KEYS, next);
        else if (following && following->first < following->end)
            locate(*following, following->first / TILE * TILE, next);
        else next = here;
        Place ahead = next;
        int count = last ? item.end - first : FEW_KEYS, tiles = (count + TILE - 1) / TILE;
        bool spread = count == FEW_KEYS && first >= item.first && first >= seen_from && first + FEW_KEYS <= seen_to;
        for (int64_t h = 0; h < item.heads; ++h) {
            int64_t row = h * rows;
            for (int t = 0; t < tiles; ++t) {
                for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
                    float* to = scores + r * FEW_KEYS + t * TILE;
                    const __m512i* x = q + (row + r) * q_row;
#define SCORES(R, S, D) few_scores<R, S, D>(here.keys, ahead.keys, t, a.k_dim, x, q_row, to, FEW_KEYS)
#define CALL(R) \
    if (!spread) SCORES(R, false, 0); \
    else if (a.k_dim == 64) SCORES(R, true, 64); \
    else if (a.k_dim == 128) SCORES(R, true, 128); \
    else SCORES(R, true, 0)
                    FOR_ROWS(rows - r, CALL)
#undef CALL
#undef SCORES
                }
            }
            for (int64_t r = 0; r < rows; ++r) {
                Sight seen = sight[r];
                seen.low = seen.low > item.first ? seen.low : item.first;
                seen.high = seen.high < item.end ? seen.high : item.end;
                weigh<Paired>(a, seen, first, tiles, scores + r * FEW_KEYS, weights + r * FEW_KEYS,
                              most[row + r], totals + (row + r) * TILE, sums + (row + r) * v_dim, v_dim);
            }
            for (int64_t i = 0; i < v_dim;) {
                bool two = i + 2 * LINE <= v_dim;
                for (int t = 0; t < tiles; ++t) {
                    int from = item.first > first + t * TILE ? item.first - first - t * TILE : 0;
                    int to = count - t * TILE < TILE ? count - t * TILE : TILE;
                    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
                        float* out = sums + (row + r) * v_dim + i;
                        const bf16* w = weights + r * FEW_KEYS + t * TILE;
#define SUMS(R, N, S) few_sums<R, N, S>(here.values, ahead.values, t, 2 * i, from, to, w, FEW_KEYS, out, v_dim)
#define CALL(R) \
    spread ? (two ? SUMS(R, 2, true) : SUMS(R, 1, true)) : two ? SUMS(R, 2, false) : SUMS(R, 1, false)
                        FOR_ROWS(rows - r, CALL)
#undef CALL
#undef SUMS
                    }
                }
                i += two ? 2 * LINE : LINE;
            }
            for (Place* place : {&here, &ahead}) {
                move(place->keys, a.k.head * 2);
                move(place->values, a.v.head * 2);
            }
        }
    }
    for (int64_t i = 0; i < all_rows; ++i) in_order(sums + i * v_dim, v_dim);
    for (int32_t h = 0; h < item.heads; ++h)
        deliver(a, item, item.kv_head + h, partials, sums + h * rows * v_dim, most + h * rows,
                totals + h * rows * TILE);
}
