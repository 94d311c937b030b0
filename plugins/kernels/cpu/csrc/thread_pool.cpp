#include "thread_pool.h"

#include <new>
#include <utility>

namespace tokenspeed::cpu {

namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

inline uint64_t job_of(uint64_t ticket) { return ticket >> 1; }

}  // namespace

float* Scratch::floats(int64_t count) {
  if (count > capacity_) {
    data_.reset();
    capacity_ = 0;
    const int64_t wanted = (count + 1023) / 1024 * 1024;
    data_.reset(static_cast<float*>(::operator new[](static_cast<size_t>(wanted) * sizeof(float), std::align_val_t{64})));
    capacity_ = wanted;
  }
  return data_.get();
}

ThreadPool::ThreadPool(int num_threads) : ranges_(std::make_unique<Range[]>(static_cast<size_t>(num_threads))) {
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { worker_loop(i); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard guard(sleep_mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::work(int number, Scratch& scratch) {
  const int threads = num_threads();
  for (int i = 0; i < threads; ++i) {
    Range& range = ranges_[static_cast<size_t>((number + i) % threads)];
    for (;;) {
      const int64_t index = range.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= range.end) break;
      try {
        const int32_t error = chunk_(context_, index, scratch);
        if (error != 0) {
          int32_t none = 0;
          error_.compare_exchange_strong(none, error);
        }
      } catch (...) {  // out of memory, mostly: a worker must not end the process, nor the submitter leave the ticket open
        if (!threw_.exchange(true)) thrown_ = std::current_exception();
      }
    }
  }
}

// Returns false when the pool is being destroyed.
bool ThreadPool::wait_for_job(uint64_t seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (job_of(ticket_.load(std::memory_order_acquire)) != seen) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock lock(sleep_mutex_);
  sleeping_.fetch_add(1, std::memory_order_seq_cst);  // before the predicate reads the ticket: see run_erased
  wake_.wait(lock, [&] { return stop_.load() || job_of(ticket_.load(std::memory_order_seq_cst)) != seen; });
  sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  return !stop_.load();
}

void ThreadPool::worker_loop(int number) {
  Scratch scratch;
  uint64_t seen = 0;
  while (wait_for_job(seen)) {
    active_.fetch_add(1, std::memory_order_seq_cst);
    // If the ticket reads as open here, its submitter closes it later and then sees this worker in `active_`: the job fields
    // stay valid until this worker leaves.
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    seen = job_of(ticket);
    if ((ticket & kClosed) == 0) work(number, scratch);
    active_.fetch_sub(1, std::memory_order_release);
  }
}

ThreadPool::Lease::Lease(ThreadPool& pool) : pool_(pool), lock_(pool.lease_mutex_, std::try_to_lock) {
  if (lock_.owns_lock()) {
    chunk_scratch_ = &pool.chunk_scratch_;
    call_scratch_ = &pool.call_scratch_;
  } else {
    own_ = std::make_unique<Scratch[]>(2);
    chunk_scratch_ = &own_[0];
    call_scratch_ = &own_[1];
  }
}

int32_t ThreadPool::Lease::run_erased(int64_t chunks, Chunk chunk, const void* context) {
  ThreadPool& pool = pool_;
  if (chunks <= 1 || !lock_.owns_lock() || pool.workers_.empty()) {
    int32_t first = 0;
    for (int64_t i = 0; i < chunks; ++i) {
      const int32_t error = chunk(context, i, *chunk_scratch_);
      if (first == 0) first = error;
    }
    return first;
  }
  pool.chunk_ = chunk;
  pool.context_ = context;
  pool.error_.store(0, std::memory_order_relaxed);
  const int64_t threads = pool.num_threads();
  for (int64_t i = 0; i < threads; ++i) {
    Range& range = pool.ranges_[static_cast<size_t>(i)];
    range.next.store(chunks * i / threads, std::memory_order_relaxed);
    range.end = chunks * (i + 1) / threads;
  }
  const uint64_t job = job_of(pool.ticket_.load(std::memory_order_relaxed)) + 1;
  pool.ticket_.store(job << 1, std::memory_order_seq_cst);
  if (pool.sleeping_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard guard(pool.sleep_mutex_); }
    pool.wake_.notify_all();
  }
  pool.work(0, *chunk_scratch_);
  pool.ticket_.fetch_or(kClosed, std::memory_order_seq_cst);
  for (int spins = 0; pool.active_.load(std::memory_order_seq_cst) != 0; ++spins) {
    if (spins < 2000) {
      relax();
    } else {
      std::this_thread::yield();  // a worker lost its core inside its chunk: let it have this one
    }
  }
  if (pool.threw_.load(std::memory_order_relaxed)) {  // nobody is inside any more
    pool.threw_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(pool.thrown_, nullptr));
  }
  return pool.error_.load(std::memory_order_relaxed);
}

}  // namespace tokenspeed::cpu
