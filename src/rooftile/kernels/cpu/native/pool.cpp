#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace rooftile {
namespace {

// Longer than the gap between two operators of a step, shorter than anybody would notice as load.
constexpr auto SPIN = std::chrono::microseconds(60);
constexpr int SPINS_BEFORE_YIELD = 4000;
// Where other processes want the cores, a worker is suspended with a chunk in its hands and everybody
// waits for it, or it wakes up too late and its spinning takes the caller's time. Then jobs run on
// the calling thread alone for a while: longer each time, until jobs run through again.
constexpr auto STALL = std::chrono::microseconds(150), NO_HELP = std::chrono::microseconds(1000);
constexpr auto LEAST_PAUSE = std::chrono::milliseconds(2), MOST_PAUSE = std::chrono::milliseconds(64);
constexpr int JOBS_TO_FORGIVE = 400;
constexpr int64_t MOST_CHUNKS = (1 << 20) - 4096;
constexpr int MOST_THREADS = 512;

using Clock = std::chrono::steady_clock;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What there is to claim, in one word, so that a late thread can never take a chunk of one job for
// that of another: generation (24 bits), chunks (20 bits), next chunk (20 bits).
inline uint64_t chunks_of(uint64_t state) { return state >> 20 & 0xfffff; }
inline uint64_t next_of(uint64_t state) { return state & 0xfffff; }
inline uint64_t generation_of(uint64_t state) { return state >> 40; }

struct Pool {
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<int64_t> done{0};
    // Written only while no chunk is claimed; read only by who has claimed one.
    alignas(64) void (*function)(void*, int64_t) = nullptr;
    void* context = nullptr;
    std::atomic<int> allowed{0};  // workers with a lower number take part
    std::atomic<int> sleeping{0};
    std::mutex sleep_mutex;
    std::condition_variable wake;
    std::mutex owner;
    int workers = 0;
    Clock::time_point alone_until{};
    Clock::duration pause = LEAST_PAUSE;
    Clock::time_point unhelped_since{};
    int smooth_jobs = 0, unhelped = 0;

    bool take_one() {
        uint64_t seen = state.load(std::memory_order_acquire);
        if (next_of(seen) >= chunks_of(seen)) return false;
        uint64_t mine = state.fetch_add(1, std::memory_order_acq_rel);
        if (next_of(mine) >= chunks_of(mine)) return false;
        function(context, static_cast<int64_t>(next_of(mine)));
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    bool has_work(int number) const {
        uint64_t seen = state.load(std::memory_order_acquire);
        return next_of(seen) < chunks_of(seen) && number < allowed.load(std::memory_order_relaxed);
    }

    void work(int number) {
        for (;;) {
            auto until = std::chrono::steady_clock::now() + SPIN;
            bool found = false;
            for (int i = 0;; ++i) {
                if (has_work(number)) {
                    found = true;
                    break;
                }
                relax();
                if (i % 64 == 63 && std::chrono::steady_clock::now() > until) break;
            }
            if (!found) {
                std::unique_lock<std::mutex> lock(sleep_mutex);
                sleeping.fetch_add(1, std::memory_order_seq_cst);
                wake.wait(lock, [&] { return has_work(number); });
                sleeping.fetch_sub(1, std::memory_order_relaxed);
            }
            while (has_work(number) && take_one()) {
            }
        }
    }

    void run(int threads, int64_t chunks, void (*f)(void*, int64_t), void* c) {
        while (workers < threads - 1) {
            std::thread(&Pool::work, this, workers).detach();
            ++workers;
        }
        function = f;
        context = c;
        allowed.store(threads - 1, std::memory_order_relaxed);
        done.store(0, std::memory_order_relaxed);
        uint64_t generation = generation_of(state.load(std::memory_order_relaxed)) + 1;
        state.store(generation << 40 | static_cast<uint64_t>(chunks) << 20,
                    std::memory_order_seq_cst);
        if (sleeping.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(sleep_mutex); }
            wake.notify_all();
        }
        Clock::time_point began = Clock::now();
        int mine = 0;
        while (take_one()) ++mine;
        Clock::time_point idle = Clock::now();
        if (mine == chunks) {
            if (unhelped++ == 0) unhelped_since = began;
            if (unhelped >= 8 && idle - unhelped_since > NO_HELP) stay_alone(idle);
            return;
        }
        unhelped = 0;
        for (int i = 0; done.load(std::memory_order_acquire) < chunks; ++i) {
            if (i < SPINS_BEFORE_YIELD) {
                relax();
            } else {
                sched_yield();  // whoever holds the last chunk may be waiting for this core
            }
        }
        // Another's last chunk may take as long as one of ours.
        Clock::duration fair = mine ? 3 * (idle - began) / mine : Clock::duration(LEAST_PAUSE);
        Clock::time_point now = Clock::now();
        if (now - idle < STALL + fair) {
            forgive();
            return;
        }
        stay_alone(now);
    }

    void stay_alone(Clock::time_point now) {
        alone_until = now + pause;
        pause = 2 * pause < MOST_PAUSE ? 2 * pause : Clock::duration(MOST_PAUSE);
        smooth_jobs = unhelped = 0;
    }

    void forgive() {
        if (++smooth_jobs < JOBS_TO_FORGIVE) return;
        smooth_jobs = 0;
        if (pause > LEAST_PAUSE) pause /= 2;
    }
};

// Never destroyed: its threads may outlive main.
std::atomic<Pool*> pool{nullptr};
thread_local bool inside = false;

void forget_after_fork() { pool.store(new Pool); }  // the child has none of the threads

Pool* the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool.store(new Pool);
        pthread_atfork(nullptr, nullptr, forget_after_fork);
    });
    return pool.load();
}

}  // namespace

// In the order in which one of `threads` would claim chunks, and then the next: see `place_of`.
static void run_alone(int threads, int64_t chunks, void (*f)(void*, int64_t), void* context) {
    for (int share = 0; share < threads; ++share)
        for (int64_t i = share; i < chunks; i += threads) f(context, i);
}

void run_chunks(int threads, int64_t chunks, void (*f)(void*, int64_t), void* context) {
    Pool* p = the_pool();
    int asked = threads > 1 ? threads : 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > chunks) threads = static_cast<int>(chunks);
    if (inside || threads <= 1 || !p->owner.try_lock()) {
        run_alone(asked, chunks, f, context);
        return;
    }
    std::lock_guard<std::mutex> lock(p->owner, std::adopt_lock);
    if (Clock::now() < p->alone_until) {
        run_alone(asked, chunks, f, context);
        return;
    }
    inside = true;
    if (chunks <= MOST_CHUNKS) {
        p->run(threads, chunks, f, context);
    } else {
        struct Wide {
            void (*f)(void*, int64_t);
            void* context;
            int64_t chunks, each;
        } wide{f, context, chunks, (chunks + MOST_CHUNKS - 1) / MOST_CHUNKS};
        auto several = [](void* w, int64_t chunk) {
            auto* wide = static_cast<Wide*>(w);
            int64_t end = (chunk + 1) * wide->each;
            if (end > wide->chunks) end = wide->chunks;
            for (int64_t i = chunk * wide->each; i < end; ++i) wide->f(wide->context, i);
        };
        p->run(threads, (chunks + wide.each - 1) / wide.each, several, &wide);
    }
    inside = false;
}

}  // namespace rooftile
