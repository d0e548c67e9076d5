// Drawing tokens. What filters can keep is found by block maxima and a threshold on the scores; the
// filters' exact work is done on those candidates, the draw in order of token id.

constexpr int64_t DRAW_BLOCK = 256;
constexpr float CLOSE = 0.999f;  // thresholds in float32 keep what stands at the border

struct Candidate {
    float score, weight;
    int32_t id;
};
inline bool goes_before(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Philox4x32-10 (Salmon et al. 2011): a number in [0, 1) of 53 bits, as kernels/reference/philox.py.
inline double philox_uniform(uint64_t seed, uint64_t index, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                     static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                            static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
        memcpy(c, next, sizeof c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    uint64_t bits = (static_cast<uint64_t>(c[0]) << 21) | (c[1] >> 11);
    return static_cast<double>(bits) * 0x1p-53;
}

// The largest value and each block's, -inf without one; false where a value is NaN or +inf.
inline bool find_largest(const float* x, int64_t vocab, float& most, float* of_blocks) {
    F bad = zero();
    most = -INFINITY;
    for (int64_t start = 0; start < vocab; start += DRAW_BLOCK) {
        int64_t end = start + DRAW_BLOCK < vocab ? start + DRAW_BLOCK : vocab, i = start;
        F top = set1(-INFINITY);
        for (; i + 16 <= end; i += 16) {
            F v = load(x + i);
            top = max(top, v);
            bad = bad + max(set1(-1.0f), v) * zero();
        }
        float best = largest(top);
        for (; i < end; ++i) {
            best = x[i] > best ? x[i] : best;
            if (std::isnan(x[i]) || x[i] == INFINITY) return false;
        }
        of_blocks[start / DRAW_BLOCK] = best;
        most = best > most ? best : most;
    }
    return sum(bad) == 0 && most > -INFINITY;
}

// Sum of e^((x - most) * inverse) over [start, end).
inline double mass_of(const float* x, int64_t start, int64_t end, float most, float inverse) {
    F total = zero();
    int64_t i = start;
    for (; i + 16 <= end; i += 16) total = total + exp((load(x + i) - set1(most)) * set1(inverse));
    double all = sum(total);
    for (; i < end; ++i) all += std::exp((x[i] - most) * inverse);
    return all;
}

inline int64_t draw_from_all(const float* x, int64_t vocab, float most, float inverse, double u) {
    int64_t blocks = (vocab + DRAW_BLOCK - 1) / DRAW_BLOCK;
    std::vector<double> up_to(static_cast<size_t>(blocks));
    double mass = 0;
    auto end_of = [&](int64_t b) { return (b + 1) * DRAW_BLOCK < vocab ? (b + 1) * DRAW_BLOCK : vocab; };
    for (int64_t b = 0; b < blocks; ++b)
        up_to[static_cast<size_t>(b)] = mass += mass_of(x, b * DRAW_BLOCK, end_of(b), most, inverse);
    double target = u * mass;
    auto found = std::upper_bound(up_to.begin(), up_to.end(), target);
    int64_t b = found == up_to.end() ? blocks - 1 : found - up_to.begin();
    double at = b ? up_to[static_cast<size_t>(b - 1)] : 0;
    int64_t last = -1;
    for (int64_t i = b * DRAW_BLOCK; i < end_of(b); ++i) {
        double weight = std::exp((x[i] - most) * inverse);
        if (weight > 0) last = i;
        at += weight;
        if (weight > 0 && at > target) return i;
    }
    // The block's sum was rounded up: its last token that has mass.
    return last;
}

// The place in falling order up to which tokens are kept: the one whose mass crosses `limit`.
inline Candidate crossing(std::vector<Candidate>& all, double limit) {
    auto begin = all.begin(), end = all.end();
    double before = 0;
    while (end - begin > 48) {
        auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, goes_before);
        double left = 0;
        for (auto c = begin; c != middle; ++c) left += c->weight;
        if (before + left < limit) {
            before += left;
            begin = middle;
        } else {
            end = middle;
        }
    }
    std::sort(begin, end, goes_before);
    Candidate last = *begin;
    for (auto c = begin; c != end && before < limit; ++c) {
        last = *c;
        before += c->weight;
    }
    return last;
}

inline int64_t draw_filtered(const float* x, int64_t vocab, const float* of_blocks, float most,
                             float temperature, float inverse, int64_t top_k, float top_p, float min_p,
                             double u) {
    int64_t blocks = (vocab + DRAW_BLOCK - 1) / DRAW_BLOCK;
    double total = 0;
    float floor = -INFINITY;
    if (top_k > 0) {
        // The k-th largest of the blocks' maxima is at most the k-th largest score.
        if (top_k <= blocks) {
            std::vector<float> maxima(of_blocks, of_blocks + blocks);
            std::nth_element(maxima.begin(), maxima.begin() + (top_k - 1), maxima.end(), std::greater<float>());
            floor = maxima[static_cast<size_t>(top_k - 1)];
        }
    } else {
        float least = min_p;
        if (top_p < 1) {
            total = mass_of(x, 0, vocab, most, inverse);
            // All tokens below this weight together have less than 1 - p of the mass.
            float share = (1 - top_p) * static_cast<float>(total / static_cast<double>(vocab));
            least = share > least ? share : least;
        }
        floor = most + temperature * std::log(CLOSE * least);
        floor = std::nextafter(floor, -INFINITY);
    }
    std::vector<Candidate> all;
    for (int64_t b = 0; b < blocks; ++b) {
        if (of_blocks[b] < floor) continue;
        int64_t end = (b + 1) * DRAW_BLOCK < vocab ? (b + 1) * DRAW_BLOCK : vocab;
        for (int64_t i = b * DRAW_BLOCK; i < end; ++i)
            if (x[i] >= floor) all.push_back({x[i], 0, static_cast<int32_t>(i)});
    }
    std::vector<Candidate> ranked;
    Candidate last{-INFINITY, 0, 0x7fffffff};  // of those that stay
    if (top_k > 0 && top_k < static_cast<int64_t>(all.size())) {
        ranked = all;
        std::nth_element(ranked.begin(), ranked.begin() + (top_k - 1), ranked.end(), goes_before);
        last = ranked[static_cast<size_t>(top_k - 1)];
    }
    auto drop = [&] {
        all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return goes_before(last, c); }),
                  all.end());
    };
    drop();
    double mass = 0;
    for (Candidate& c : all) {
        c.weight = static_cast<float>(std::exp((c.score - most) * inverse));
        mass += c.weight;
    }
    if (top_p < 1) {
        ranked = all;
        last = crossing(ranked, static_cast<double>(top_p) * (total > mass ? total : mass));
        drop();
    }
    if (min_p > 0)
        all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return c.weight < min_p; }),
                  all.end());
    mass = 0;
    for (const Candidate& c : all) mass += c.weight;
    double target = u * mass, at = 0;
    int64_t found = -1;
    for (const Candidate& c : all) {
        if (c.weight > 0) found = c.id;
        at += c.weight;
        if (c.weight > 0 && at > target) break;
    }
    return found;
}

// A token of each row's scores, and its log softmax among the logits; -1 and NaN where logits or scores
// have NaN, +inf, or nothing finite.
void sample(const Sampling& s, int threads) {
    parallel(threads, s.rows, [&](int64_t m) {
        const float *x = s.scores + m * s.scores_row, *logits = s.logits + m * s.logits_row;
        int64_t vocab = s.vocab, token;
        Memory memory(((vocab + DRAW_BLOCK - 1) / DRAW_BLOCK) * 4);
        auto of_blocks = reinterpret_cast<float*>(memory.data);
        float most, most_logit;
        bool valid = find_largest(logits, vocab, most_logit, of_blocks);
        most = most_logit;
        if (valid && x != logits) valid = find_largest(x, vocab, most, of_blocks);
        if (!valid) {
            s.tokens[m] = -1;
            s.logprobs[m] = NAN;
            return;
        }
        float temperature = s.temperature ? s.temperature[m] : 0;
        if (temperature > 0) {
            double u = philox_uniform(static_cast<uint64_t>(s.seeds[m]),
                                      s.sample_index ? static_cast<uint64_t>(s.sample_index[m]) : 0,
                                      static_cast<uint64_t>(s.position[m]));
            int64_t top_k = s.top_k && s.top_k[m] < vocab ? s.top_k[m] : 0;
            float top_p = s.top_p ? s.top_p[m] : 1, min_p = s.min_p ? s.min_p[m] : 0;
            float inverse = temperature > 1e-30f ? 1 / temperature : 1e30f;
            token = top_k > 0 || top_p < 1 || min_p > 0
                        ? draw_filtered(x, vocab, of_blocks, most, temperature, inverse, top_k, top_p, min_p, u)
                        : draw_from_all(x, vocab, most, inverse, u);
        } else {
            int64_t b = 0;
            while (of_blocks[b] != most) ++b;
            token = b * DRAW_BLOCK;
            while (x[token] != most) ++token;
        }
        s.tokens[m] = token;
        double all = mass_of(logits, 0, vocab, most_logit, 1.0f);
        s.logprobs[m] = static_cast<float>(static_cast<double>(logits[token]) - most_logit - std::log(all));
    });
}
