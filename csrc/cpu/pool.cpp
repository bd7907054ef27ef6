#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "kvasir_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvasir {
namespace {

constexpr size_t HUGE_PAGE = 2 << 20;
constexpr int SPINS = 4000;  // about 50 us, longer than the pause between two parts of a step

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  // The system may grant fewer threads; size() is their number.
  Pool(int threads, const std::vector<int> &cpus) : shares_(size_t(threads)), owner_(getpid()) {
    for (int index = 1; index < threads; index++) {
      std::thread worker;
      try {
        worker = std::thread([this, index] { work(index); });
      } catch (const std::system_error &) {
        break;
      }
#if defined(__linux__)
      if (!cpus.empty()) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(size_t(cpus[size_t(index) % cpus.size()]), &set);
        pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);  // optional: results do not depend on it
      }
#endif
      workers_.push_back(std::move(worker));
    }
    threads_ = 1 + int(workers_.size());  // set before there is work, so before any worker reads it
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_);
      stop_ = true;
      job_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
  }

  int size() const { return threads_; }
  bool is_ours() const { return owner_ == getpid(); }  // threads do not survive a fork

  void run(int count, Task task, void *context) {
    std::lock_guard<std::mutex> turn(turn_);
    task_ = task;
    context_ = context;
    int threads = size();
    for (int i = 0; i < threads; i++) {
      shares_[size_t(i)].end = int(int64_t(count) * (i + 1) / threads);
      shares_[size_t(i)].next.store(int(int64_t(count) * i / threads), std::memory_order_relaxed);
    }
    busy_.store(threads - 1, std::memory_order_relaxed);
    job_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    help(0);
    for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; spins++)
      spins < SPINS ? pause_briefly() : std::this_thread::yield();
  }

 private:
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
  };

  void help(int index) {
    int threads = size();
    for (int i = 0; i < threads; i++) {
      Share &share = shares_[size_t((index + i) % threads)];
      for (int task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) task_(context_, task);
    }
  }

  void work(int index) {
    for (uint64_t seen = 0;;) {
      uint64_t now = job_.load(std::memory_order_acquire);
      for (int spins = 0; now == seen && spins < SPINS; spins++) {
        pause_briefly();
        now = job_.load(std::memory_order_acquire);
      }
      if (now == seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        sleepers_.fetch_sub(1);
        now = job_.load();
      }
      if (stop_) return;
      seen = now;
      help(index);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<Share> shares_;
  int threads_ = 1;
  pid_t owner_;
  std::vector<std::thread> workers_;
  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> job_{0};
  std::atomic<int> busy_{0}, sleepers_{0};
  Task task_ = nullptr;
  void *context_ = nullptr;
  std::atomic<bool> stop_{false};
};

using Shared = std::shared_ptr<Pool>;  // keeps a pool alive while it is used, even if it has been replaced

std::mutex configuring;
Shared &pool = *new Shared;  // never freed: at exit the system ends the threads
int wanted_threads = 0;
std::vector<int> wanted_cpus;

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(size_t(cpu), &set)) cpus.push_back(cpu);
#endif
  return cpus;
}

// The caller holds `configuring`. A pool from before a fork is left alone: its threads do not exist here.
void replace_pool() {
  if (pool && !pool->is_ours()) new Shared(std::move(pool));
  pool.reset();
  pool = std::make_shared<Pool>(wanted_threads, wanted_cpus);
}

Shared current_pool() {
  std::lock_guard<std::mutex> lock(configuring);
  if (!pool || !pool->is_ours()) {
    if (wanted_threads == 0) {
      wanted_cpus = allowed_cpus();
      wanted_threads = int(wanted_cpus.empty() ? 1 : wanted_cpus.size());
    }
    replace_pool();
  }
  return pool;
}

}  // namespace

int configure_pool(int threads, const int *cpus) {
  std::lock_guard<std::mutex> lock(configuring);
  wanted_threads = threads;
  wanted_cpus = cpus ? std::vector<int>(cpus, cpus + threads) : allowed_cpus();
  // With fewer threads than CPUs the system places them, since other processes may use the same CPUs.
  if (!cpus && int(wanted_cpus.size()) != threads) wanted_cpus.clear();
  replace_pool();
  return pool->size();
}

int pool_threads() { return current_pool()->size(); }

void run_tasks(int count, Task task, void *context) {
  if (count > 1) {
    Shared threads = current_pool();
    if (threads->size() > 1) return threads->run(count, task, context);
  }
  for (int i = 0; i < count; i++) task(context, i);
}

void *thread_buffer(int slot, size_t bytes) {
  struct Buffers {
    void *memory[8] = {};
    size_t size[8] = {};
    ~Buffers() {
      for (void *p : memory) free(p);
    }
  };
  thread_local Buffers buffers;
  if (buffers.size[slot] < bytes) {
    free(buffers.memory[slot]);
    size_t page = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, rounded = (bytes + bytes / 4 + page - 1) / page * page;
    buffers.memory[slot] = aligned_alloc(page, rounded);
    if (!buffers.memory[slot]) {
      fprintf(stderr, "Kvasir's CPU library finds no memory for %zu bytes of intermediate results.\n", rounded);
      abort();
    }
#if defined(__linux__)
    if (page == HUGE_PAGE) madvise(buffers.memory[slot], rounded, MADV_HUGEPAGE);
#endif
    buffers.size[slot] = rounded;
  }
  return buffers.memory[slot];
}

}  // namespace kvasir

int32_t kv_configure(int32_t threads, const int32_t *cpus) { return kvasir::configure_pool(threads, cpus); }
int32_t kv_threads() { return kvasir::pool_threads(); }
