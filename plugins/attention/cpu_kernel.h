// What the attention kernels of both precisions share: the interface to Python, threads, scratch memory, and which keys
// a query sees.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

extern "C" {

// A tensor [B, H or K, S, N] whose last stride is 1; strides are in numbers.
struct View {
    void* data;
    int64_t batch, head, row;
};

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, which OpenMP libraries share

struct Problem {
    int64_t batch, heads, kv_heads, length, width, window;  // window 0: none
    float scale;
    int32_t threads;
    Parallel parallel;         // null: threads of our own
    const int64_t* documents;  // [B, S] without gaps; null: one document
    float* lse;                // [B, H, S] without gaps
    View q, k, v, out, grad, dq, dk, dv;
};

}  // extern "C"

namespace {

constexpr int64_t BLOCK = 64;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float NONE = -1e30f;  // below every score; infinity less infinity would be NaN

// --- threads and memory ---------------------------------------------------------------------------------------------

// Runs task(index, worker) for every index; a worker takes the next index when it has finished one.
template <class Task>
void run(const Problem& problem, int64_t count, const Task& task) {
    const auto threads = static_cast<unsigned>(std::min<int64_t>(problem.threads, count));
    struct Shared {
        const Task& task;
        int64_t count;
        std::atomic<int64_t> next{0}, workers{0};
    } shared{task, count};
    void (*region)(void*) = [](void* given) {
        auto& mine = *static_cast<Shared*>(given);
        const int64_t worker = mine.workers.fetch_add(1);
        for (int64_t index; (index = mine.next.fetch_add(1)) < mine.count;) mine.task(index, worker);
    };
    if (threads <= 1) {
        region(&shared);
    } else if (problem.parallel) {
        problem.parallel(region, &shared, threads, 0);
    } else {
        std::vector<std::thread> others;
        others.reserve(threads - 1);
        try {
            for (unsigned other = 1; other < threads; ++other) others.emplace_back(region, &shared);
        } catch (const std::exception&) {
            // The machine has no more threads, or no memory for one: those that there are take all indexes.
        }
        region(&shared);
        for (auto& other : others) other.join();
    }
}

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(int64_t bytes) {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) throw std::bad_alloc();
    return Memory(static_cast<char*>(memory));
}

// Hands out parts of one piece of memory, each at a multiple of 64 bytes; of null it only counts.
struct Parts {
    char* at;
    int64_t used = 0;

    template <class T>
    T* take(int64_t numbers) {
        T* part = at ? reinterpret_cast<T*>(at + used) : nullptr;
        used += (numbers * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return part;
    }
};

// --- what attends to what -------------------------------------------------------------------------------------------

// The first key that each query sees, [B, padded length]: it never decreases along a sequence. The last is itself.
std::vector<int32_t> first_keys(const Problem& problem, int64_t padded) {
    std::vector<int32_t> first(problem.batch * padded);
    for (int64_t b = 0; b < problem.batch; ++b) {
        const int64_t* documents = problem.documents ? problem.documents + b * problem.length : nullptr;
        int64_t begin = 0;
        for (int64_t s = 0; s < padded; ++s) {
            if (s < problem.length) {
                if (documents && s && documents[s] != documents[s - 1]) begin = s;
                if (problem.window) begin = std::max(begin, s - problem.window + 1);
            }
            first[b * padded + s] = static_cast<int32_t>(begin);
        }
    }
    return first;
}

// Whether any query of the block that begins at `query`, or of a later one, sees a key of the block.
inline bool reaches(const int32_t* first, int64_t query, int64_t key) { return first[query] < key + BLOCK; }

}  // namespace
