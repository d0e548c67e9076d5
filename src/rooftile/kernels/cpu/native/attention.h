// Attention over pages (Dao 2023, "FlashAttention-2", algorithm 1), query heads of a group packed
// into rows: few.h and many.h where the machine multiplies bfloat16, else `attend`, which repacks keys
// and values, a block at a time, as the products read weights.

constexpr int ROWS = 48;        // query rows of an item
constexpr int MANY_ROWS = 192;  // the same in many.h
constexpr int BLOCK_KEYS = 64;  // keys whose scores are computed at once
constexpr int KEY_TILES = BLOCK_KEYS / TILE;
constexpr int FEW_ROWS = 12;    // up to so many rows for each key head are computed by few.h,
constexpr int FEW_KEYS = 128;   // so many keys at once
// A request that is one item (decoding) and longer than LONG keys is cut into parts of PART keys: at
// fixed places, so that its result depends on nothing but its length.
constexpr int LONG = 768, PART = 512;

// tanh to a few units in the last place: the rational approximation of Eigen (generic_fast_tanh).
inline F tanh(F x) {
    x = max(set1(-7.90531110763549805f), min(set1(7.90531110763549805f), x));
    F y = x * x;
    F p = set1(-2.76076847742355e-16f);
    p = fma(p, y, set1(2.00018790482477e-13f));
    p = fma(p, y, set1(-8.60467152213735e-11f));
    p = fma(p, y, set1(5.12229709037114e-08f));
    p = fma(p, y, set1(1.48572235717979e-05f));
    p = fma(p, y, set1(6.37261928875436e-04f));
    p = fma(p, y, set1(4.89352455891786e-03f));
    F q = set1(1.19825839466702e-06f);
    q = fma(q, y, set1(1.18534705686654e-04f));
    q = fma(q, y, set1(2.26843463243900e-03f));
    q = fma(q, y, set1(4.89352518554385e-03f));
    return x * p / q;
}

constexpr float LOG2_E = 1.44269504f;

// Weights, and how blocks of keys and values are laid out, in pairs of bfloat16 and in float32.
#if ROOFTILE_BF16
struct Paired {
    using Value = bf16;
    static void put_weight(bf16* to, F x) { store_quick(to, x); }
    static F exp_of(F x, float scale, float shift) {
        return exp2_quick(fma(x, set1(scale * LOG2_E), set1(-shift * LOG2_E)));
    }
};
#endif

struct Single {
    using Value = float;
    using Packed = float;
    static constexpr int DEPTH = 1;

    static void pack_keys(const char* const* rows, int32_t dtype, int64_t dim, int64_t padded, float* out) {
        float* row = scratch(padded);
        for (int lane = 0; lane < TILE; ++lane) {
            get(row, rows[lane], 0, dim, dtype);
            for (int64_t i = 0; i < dim; ++i) out[i * TILE + lane] = row[i];
            for (int64_t i = dim; i < padded; ++i) out[i * TILE + lane] = 0;
        }
    }
    static void pack_values(const char* const* rows, int32_t dtype, int64_t keys, int64_t dim,
                            int64_t tile, float* out) {
        float* row = scratch(up(dim, TILE));
        for (int64_t j = 0; j < keys; ++j) {
            for (int64_t i = dim; i < up(dim, TILE); ++i) row[i] = 0;
            get(row, rows[j], 0, dim, dtype);
            for (int64_t i = 0; i < dim; i += TILE) store(out + i / TILE * tile + j * TILE, load(row + i));
        }
    }
    template <int N>
    static void product(int m, const float* x, int64_t x_row, const float* w, int64_t w_tile,
                        int64_t depth, float* out, int64_t out_row, bool add) {
        product_f32_of<N>(m, x, x_row, w, w_tile, depth, out, out_row, add);
    }
    static void put_weight(float* to, F x) { store(to, x); }
    static F exp_of(F x, float scale, float shift) { return exp(x * set1(scale) - set1(shift)); }
};

struct Item {
    int32_t request, kv_head, heads;  // key heads: one, but for few rows
    int32_t row, rows;                // rows of the request's queries x heads of the group
    int32_t first, end;               // keys
    int32_t part, parts, split;       // split: which of the cut (item, head)s; -1: whole
    bool few;                         // for `attend_few`
};

struct Partials {
    float* values;  // of each part: [rows][v_padded] sums, then largest scores, then denominators
    int64_t rows;   // the most that an item cut into parts has
    int64_t each;
    std::atomic<int32_t>* finished;  // parts of each split
    const int32_t* start;            // of each split: its first part
};

// Rows' results from their sums: out = sums / denominator, with the sink.
inline void finish_row(const Attention& a, int64_t token, int64_t head, const float* sums, float most,
                       float denominator, float* row) {
    float factor = 1;
    if (a.sink) {
        float sink = a.sink[head], top = sink > most ? sink : most;
        if (top > -INFINITY) {
            factor = most > -INFINITY ? std::exp(most - top) : 0;
            denominator = denominator * factor + std::exp(sink - top);
            most = top;
        }
    }
    // NaN is not equal to 0, and so comes out.
    float scale = denominator == 0 ? 0 : factor / denominator;
    for (int64_t i = 0; i < a.v_dim; ++i) row[i] = sums[i] * scale;
    int64_t at = token * a.num_q_heads + head;
    put(a.out, at * a.v_dim, row, a.v_dim, a.out_dtype);
    if (a.lse) a.lse[at] = denominator == 0 ? -INFINITY : most + std::log(denominator);
}

// The sums of one key head's rows go to the result, or to the other parts' ones: in `own` where this thread
// computes all of them.
inline void deliver(const Attention& a, const Item& item, int32_t kv_head, const Partials& partials,
                    float* sums, const float* most, const float* totals, float* own = nullptr) {
    int64_t group = a.num_q_heads / a.num_kv_heads, begin = a.cu_seqlens_q[item.request];
    int64_t v_padded = up(a.v_dim, TILE);
    auto finish = [&](int r, float peak, float denominator) {
        int64_t query = (item.row + r) / group, head = kv_head * group + (item.row + r) % group;
        finish_row(a, begin + query, head, sums + r * v_padded, peak, denominator, scratch(v_padded));
    };
    if (item.split < 0) {
        for (int r = 0; r < item.rows; ++r) finish(r, most[r], sum(load(totals + r * TILE)));
        return;
    }
    int32_t split = item.split + kv_head - item.kv_head;
    int64_t each = partials.each, peaks = partials.rows * v_padded, denominators = peaks + partials.rows;
    float* all = own ? own : partials.values + partials.start[split] * each;
    float* mine = all + item.part * each;
    for (int r = 0; r < item.rows; ++r) {
        memcpy(mine + r * v_padded, sums + r * v_padded, static_cast<size_t>(v_padded) * 4);
        mine[peaks + r] = most[r];
        mine[denominators + r] = sum(load(totals + r * TILE));
    }
    // Whoever finishes a split merges all its parts, always in their order.
    int32_t done = own ? item.part : partials.finished[split].fetch_add(1, std::memory_order_acq_rel);
    if (done + 1 < item.parts) return;
    for (int r = 0; r < item.rows; ++r) {
        float peak = -INFINITY, denominator = 0;
        for (int p = 0; p < item.parts; ++p) {
            float one = all[p * each + peaks + r];
            peak = one > peak ? one : peak;
        }
        for (int64_t i = 0; i < v_padded; ++i) sums[r * v_padded + i] = 0;
        for (int p = 0; p < item.parts; ++p) {
            const float* one = all + p * each;
            float top = one[peaks + r], factor = top > -INFINITY ? std::exp(top - peak) : 0;
            denominator += factor * one[denominators + r];
            for (int64_t i = 0; i < v_padded; ++i) sums[r * v_padded + i] += factor * one[r * v_padded + i];
        }
        finish(r, peak, denominator);
    }
}

// Keys that a row sees.
struct Sight {
    int32_t low, high;
};
inline Sight sight_of(const Attention& a, int64_t position, int64_t kv_len) {
    int64_t low = a.left < 0 ? 0 : position - a.left, high = a.right < 0 ? kv_len : position + a.right + 1;
    return {static_cast<int32_t>(low < 0 ? 0 : low), static_cast<int32_t>(high > kv_len ? kv_len : high)};
}

// Where each key and value of a block lies, up to a whole tile.
struct Block {
    const char *keys[BLOCK_KEYS], *values[BLOCK_KEYS];
    int count, tiles;
};
inline void locate(const Attention& a, const Item& item, int32_t first, Block& b) {
    const int32_t* table = a.page_table + item.request * a.table_row;
    int64_t bytes = dtype_bytes(a.dtype), k_step = a.k.slot * bytes, v_step = a.v.slot * bytes;
    int count = item.end - first < BLOCK_KEYS ? item.end - first : BLOCK_KEYS;
    b.count = count = count < 0 ? 0 : count;
    b.tiles = (count + TILE - 1) / TILE;
    for (int j = 0; j < count;) {
        int32_t column = (first + j) / a.page_size, offset = (first + j) - column * a.page_size;
        int64_t page = table[column];
        const char* k = a.k.data + (page * a.k.page + item.kv_head * a.k.head + offset * a.k.slot) * bytes;
        const char* v = a.v.data + (page * a.v.page + item.kv_head * a.v.head + offset * a.v.slot) * bytes;
        int end = j + a.page_size - offset < count ? j + a.page_size - offset : count;
        for (; j < end; ++j, k += k_step, v += v_step) {
            b.keys[j] = k;
            b.values[j] = v;
        }
    }
}
// Of the 16 rows from here on, as the processor cannot guess where the next page is.
inline void fetch(const char* const* rows, int64_t offset, int64_t size) {
    for (int j = 0; j < TILE; ++j)
        for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(rows[j] + offset + i, 0, 2);
}

// One row of a block of scores becomes weights; what has been summed up so far is scaled to the new
// largest score. The exponent's base is 2 for 16 bits, whose roundings are far above exp2's error.
template <class Layout>
inline void weigh(const Attention& a, Sight sight, int32_t first, int tiles, float* scores,
                  typename Layout::Value* weights, float& most, float* totals, float* sums, int64_t size) {
    bool whole = sight.low <= first && sight.high >= first + tiles * TILE;
    float scale = a.scale;
    if (!whole || a.softcap != 0 || !(scale > 0)) {
        for (int t = 0; t < tiles; ++t) {
            F x = load(scores + t * TILE) * set1(scale);
            if (a.softcap != 0) x = tanh(x * set1(1 / a.softcap)) * set1(a.softcap);
            if (!whole) x = keep(x, sight.low - first - t * TILE, sight.high - first - t * TILE);
            store(scores + t * TILE, x);
        }
        scale = 1;
    }
    F top = set1(-INFINITY);
    for (int t = 0; t < tiles; ++t) top = max(top, load(scores + t * TILE));
    float peak = largest(top) * scale;
    F total = load(totals);
    if (peak > most) {
        F factor = set1(most > -INFINITY ? std::exp(most - peak) : 0);
        most = peak;
        total = total * factor;
        for (int64_t i = 0; i < size; i += TILE) store(sums + i, load(sums + i) * factor);
    }
    float shift = most > -INFINITY ? most : 0;
    for (int t = 0; t < tiles; ++t) {
        F weight = Layout::exp_of(load(scores + t * TILE), scale, shift);
        total = total + weight;
        Layout::put_weight(weights + t * TILE, weight);
    }
    store(totals, total);
}

#if ROOFTILE_BF16
#include "few.h"
#include "many.h"
#endif

template <class Layout>
inline void attend(const Attention& a, const Item& item, const Partials& partials, const char* zeros) {
    using Value = typename Layout::Value;
    using Packed = typename Layout::Packed;
    int64_t group = a.num_q_heads / a.num_kv_heads, k_padded = up(a.k_dim, 2 * Layout::DEPTH);
    int64_t v_padded = up(a.v_dim, TILE), v_tiles = v_padded / TILE;
    int64_t begin = a.cu_seqlens_q[item.request];
    int64_t q_len = a.cu_seqlens_q[item.request + 1] - begin, kv_len = a.kv_lens[item.request];
    int64_t v_tile = BLOCK_KEYS / Layout::DEPTH * TILE, k_tile = k_padded / Layout::DEPTH * TILE;
    int64_t bytes = dtype_bytes(a.dtype);

    Memory memory(up(ROWS * k_padded * 4, 64) + up(KEY_TILES * k_tile * 4, 64) +
                  up(v_tiles * v_tile * 4, 64) + ROWS * (BLOCK_KEYS * 8 + v_padded * 4 + TILE * 4));
    char* at = memory.data;
    auto take = [&](int64_t size) { char* here = at; at += up(size, 64); return here; };
    auto q = reinterpret_cast<Value*>(take(ROWS * k_padded * static_cast<int64_t>(sizeof(Value))));
    auto keys = reinterpret_cast<Packed*>(take(KEY_TILES * k_tile * 4));
    auto values = reinterpret_cast<Packed*>(take(v_tiles * v_tile * 4));
    auto scores = reinterpret_cast<float*>(take(ROWS * BLOCK_KEYS * 4));
    auto weights = reinterpret_cast<Value*>(take(ROWS * BLOCK_KEYS * 4));
    auto sums = reinterpret_cast<float*>(take(ROWS * v_padded * 4));
    auto totals = reinterpret_cast<float*>(take(ROWS * TILE * 4));
    float most[ROWS];
    Sight sight[ROWS];

    for (int r = 0; r < item.rows; ++r) {
        int64_t query = (item.row + r) / group, head = item.kv_head * group + (item.row + r) % group;
        float* row = scratch(k_padded);
        for (int64_t i = a.k_dim; i < k_padded; ++i) row[i] = 0;
        get(row, a.q, (begin + query) * a.q_token + head * a.q_head, a.k_dim, a.q_dtype);
        put(q + r * k_padded, row, k_padded);
        sight[r] = sight_of(a, kv_len - q_len + query, kv_len);
        most[r] = -INFINITY;
        store(totals + r * TILE, zero());
        for (int64_t i = 0; i < v_padded; i += 16) store(sums + r * v_padded + i, zero());
    }

    Block blocks[2];
    auto locate_padded = [&](int32_t first, Block& b) {
        locate(a, item, first, b);
        for (int j = b.count; j < b.tiles * TILE; ++j) b.keys[j] = b.values[j] = zeros;
    };
    locate_padded(item.first, blocks[0]);
    int now = 0;
    for (int32_t first = item.first; first < item.end; first += BLOCK_KEYS, now ^= 1) {
        const Block& b = blocks[now];
        Block& next = blocks[now ^ 1];
        locate_padded(first + BLOCK_KEYS, next);
        int tiles = b.tiles;
        for (int t = 0; t < tiles; ++t) {
            if (t < next.tiles) fetch(next.keys + t * TILE, 0, a.k_dim * bytes);
            Layout::pack_keys(b.keys + t * TILE, a.dtype, a.k_dim, k_padded, keys + t * k_tile);
        }
        for (int r = 0; r < item.rows;) {
            int m = tokens_at_once(item.rows - r);
            for (int t = 0; t < tiles;) {
                int n = t + TILES_AT_ONCE <= tiles ? TILES_AT_ONCE : 1;
                float* to = scores + r * BLOCK_KEYS + t * TILE;
                if (n == 1)
                    Layout::template product<1>(m, q + r * k_padded, k_padded, keys + t * k_tile,
                                                k_tile, k_padded, to, BLOCK_KEYS, false);
                else
                    Layout::template product<TILES_AT_ONCE>(m, q + r * k_padded, k_padded,
                                                            keys + t * k_tile, k_tile, k_padded, to,
                                                            BLOCK_KEYS, false);
                t += n;
            }
            r += m;
        }
        for (int r = 0; r < item.rows; ++r)
            weigh<Layout>(a, sight[r], first, tiles, scores + r * BLOCK_KEYS, weights + r * BLOCK_KEYS,
                          most[r], totals + r * TILE, sums + r * v_padded, v_padded);
        for (int t = 0; t < tiles; ++t) {
            if (t < next.tiles) fetch(next.values + t * TILE, 0, a.v_dim * bytes);
            Layout::pack_values(b.values + t * TILE, a.dtype, TILE, a.v_dim, v_tile,
                                values + t * TILE / Layout::DEPTH * TILE);
        }
        for (int r = 0; r < item.rows;) {
            int m = tokens_at_once(item.rows - r);
            for (int64_t t = 0; t < v_tiles;) {
                int n = t + TILES_AT_ONCE <= v_tiles ? TILES_AT_ONCE : 1;
                float* to = sums + r * v_padded + t * TILE;
                if (n == 1)
                    Layout::template product<1>(m, weights + r * BLOCK_KEYS, BLOCK_KEYS,
                                                values + t * v_tile, v_tile, tiles * TILE, to,
                                                v_padded, true);
                else
                    Layout::template product<TILES_AT_ONCE>(m, weights + r * BLOCK_KEYS, BLOCK_KEYS,
                                                            values + t * v_tile, v_tile,
                                                            tiles * TILE, to, v_padded, true);
                t += n;
            }
            r += m;
        }
    }

    deliver(a, item, item.kv_head, partials, sums, most, totals);
}

void attention(const Attention& a, int threads) {
    int64_t group = a.num_q_heads / a.num_kv_heads, v_padded = up(a.v_dim, TILE);
    std::vector<Item> items;
    std::vector<int32_t> starts;
    int32_t parts_in_all = 0;
    int64_t cut_rows = 0;
#if ROOFTILE_BF16
    bool paired = a.dtype == BFLOAT16, few = few_fits(a);
#else
    bool paired = false, few = false;
#endif
    int64_t keys_of_few = 0;
    for (int32_t i = 0; few && i < a.batch; ++i) {
        bool fits = (a.cu_seqlens_q[i + 1] - a.cu_seqlens_q[i]) * group <= FEW_ROWS;
        keys_of_few += fits ? a.kv_lens[i] : 0;
    }
    // Heads are shared out only where there is little to do, which changes no result.
    bool together = keys_of_few / PART >= 4 * threads;
    for (int32_t i = 0; i < a.batch; ++i) {
        int64_t q_len = a.cu_seqlens_q[i + 1] - a.cu_seqlens_q[i], kv_len = a.kv_lens[i];
        int64_t rows = q_len * group;
        // The last rows see the most keys where attention is causal: they go first.
        int64_t most_rows = paired ? MANY_ROWS : ROWS;
        for (int64_t row = up(rows, most_rows) - most_rows; row >= 0; row -= most_rows) {
            int64_t count = rows - row < most_rows ? rows - row : most_rows;
            int64_t first_position = kv_len - q_len + row / group;
            int64_t last_position = kv_len - q_len + (row + count - 1) / group;
            int64_t first = a.left < 0 ? 0 : first_position - a.left;
            int64_t end = a.right < 0 ? kv_len : last_position + a.right + 1;
            first = first < 0 ? 0 : first;
            end = end > kv_len ? kv_len : end;
            if (end < first) end = first;
            bool cut = rows <= ROWS && end - first > LONG;
            if (cut && rows > cut_rows) cut_rows = rows;
            int64_t base = first / TILE * TILE;
            int32_t parts = cut ? static_cast<int32_t>((end - base + PART - 1) / PART) : 1;
            int32_t heads = together && rows <= FEW_ROWS ? a.num_kv_heads : 1;
            for (int32_t h = 0; h < a.num_kv_heads; h += heads) {
                int32_t split = cut ? static_cast<int32_t>(starts.size()) : -1;
                for (int32_t i = 0; cut && i < heads; ++i, parts_in_all += parts) starts.push_back(parts_in_all);
                for (int32_t p = 0; p < parts; ++p) {
                    int64_t from = p ? base + p * PART : first, to = p + 1 < parts ? base + (p + 1) * PART : end;
                    items.push_back({i, h, heads, static_cast<int32_t>(row), static_cast<int32_t>(count),
                                     static_cast<int32_t>(from), static_cast<int32_t>(to), p, parts,
                                     split, few && rows <= FEW_ROWS});
                }
            }
        }
    }
    std::vector<std::atomic<int32_t>> finished(starts.size());
    for (auto& f : finished) f.store(0, std::memory_order_relaxed);
    int64_t each = cut_rows * (v_padded + 2), widest = a.k_dim > a.v_dim ? a.k_dim : a.v_dim;
    int64_t zero_bytes = up(widest * 4 + 64, 64);
    Memory memory(zero_bytes + parts_in_all * each * 4);
    memset(memory.data, 0, static_cast<size_t>(zero_bytes));
    Partials partials{reinterpret_cast<float*>(memory.data + zero_bytes), cut_rows, each, finished.data(), starts.data()};
    // Where there is much for few.h, a thread takes a stretch of items, of one request where it can, and the
    // next stretch before it is through with this one, so that it can fetch its keys meanwhile.
    int64_t count = static_cast<int64_t>(items.size()), longest = together ? count / (8 * threads) : 1;
    std::vector<int64_t> stretches{0};  // where each begins
    for (int64_t i = 1; i <= count; ++i) {
        int64_t begin = stretches.back();
        bool goes_on = i < count && i - begin < longest && items[i].few &&
                       items[i].part == items[i - 1].part + 1 && items[i].request == items[begin].request;
        if (!goes_on) stretches.push_back(i);
    }
    int64_t all = static_cast<int64_t>(stretches.size()) - 1;
    auto work = [&](int64_t stretch, int64_t next) {
        const Item* item = &items[stretches[stretch]];
#if ROOFTILE_BF16
        if (item->few) {
            const Item* following = next < all && items[stretches[next]].few ? &items[stretches[next]] : nullptr;
            attend_few(a, item, stretches[stretch + 1] - stretches[stretch], following, partials);
        } else if (paired) {
            attend_many(a, *item, partials, memory.data);
        } else
#endif
            attend<Single>(a, *item, partials, memory.data);
    };
    if (together) {
        std::atomic<int64_t> taken{0};
        auto take = [&] { return taken.fetch_add(1, std::memory_order_relaxed); };
        parallel(threads, threads, [&](int64_t) {
            for (int64_t stretch = take(), next = 0; stretch < all; stretch = next) {
                next = take();
                work(stretch, next);
            }
        });
    } else {
        parallel(threads, all, [&](int64_t stretch) { work(stretch, all); });
    }
    // Tokens after the last request are padding.
    int64_t used = a.batch ? a.cu_seqlens_q[a.batch] : 0, heads = a.num_q_heads;
    int64_t bytes = dtype_bytes(a.out_dtype) * heads * a.v_dim;
    if (a.tokens > used)
        memset(static_cast<char*>(a.out) + used * bytes, 0, static_cast<size_t>((a.tokens - used) * bytes));
    if (a.lse)
        for (int64_t i = used * heads; i < a.tokens * heads; ++i) a.lse[i] = -INFINITY;
}
