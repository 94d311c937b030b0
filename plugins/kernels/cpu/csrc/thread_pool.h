// A fixed set of worker threads that share the chunks of one job at a time with the thread that submits it.
//
// Every thread has a range of consecutive chunks (weights are then read as one stream), takes them one by one, and goes on with
// what is left of the other ranges: a core that is taken away for a while delays one chunk, not half of the work, and the
// submitter never waits for a worker that has not begun. Workers spin for a few tens of microseconds
// after a job (the next kernel of a step usually follows), then sleep on a condition variable. Any number of threads may
// submit: one at a time has the workers, the others run their jobs by themselves.
//
// Lock order: `lease_mutex_` before `sleep_mutex_`. The job fields are written by the holder of `lease_mutex_` while no worker
// is inside (`active_` == 0 and the ticket is closed), and read by workers only between entering and leaving.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenspeed::cpu {

// Memory of one thread for the duration of a chunk: grows, never shrinks, 64-byte aligned.
class Scratch {
 public:
  float* floats(int64_t count);

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

class ThreadPool {
 public:
  using Chunk = int32_t (*)(const void* context, int64_t index, Scratch& scratch);

  // REQUIRES: num_threads >= 1 (the submitting thread counts as one).
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // The right to submit, held for one kernel call. Without the workers it runs everything on the calling thread.
  class Lease {
   public:
    explicit Lease(ThreadPool& pool);

    // fn(index, scratch) -> error code for each index below `chunks`; returns 0 or the first error seen. Throws the first exception
    // of a chunk, on whichever thread it ran; the other chunks have ended then.
    template <class Fn>
    int32_t run(int64_t chunks, const Fn& fn) {
      return run_erased(chunks, [](const void* context, int64_t index, Scratch& scratch) {
        return (*static_cast<const Fn*>(context))(index, scratch);
      }, &fn);
    }

    // Memory of the call itself, beside the chunks' own.
    float* call_floats(int64_t count) { return call_scratch_->floats(count); }

   private:
    int32_t run_erased(int64_t chunks, Chunk chunk, const void* context);

    ThreadPool& pool_;
    std::unique_lock<std::mutex> lock_;
    std::unique_ptr<Scratch[]> own_;  // where another thread has the workers
    Scratch* chunk_scratch_;
    Scratch* call_scratch_;
  };

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void worker_loop(int number);
  void work(int number, Scratch& scratch);
  bool wait_for_job(uint64_t seen);

  static constexpr uint64_t kClosed = 1;
  static constexpr std::chrono::microseconds kSpin{50};

  std::mutex lease_mutex_;
  Scratch chunk_scratch_;  // of the submitting thread; guarded by lease_mutex_
  Scratch call_scratch_;

  Chunk chunk_ = nullptr;
  const void* context_ = nullptr;
  std::unique_ptr<Range[]> ranges_;  // one a thread, the submitter's first
  std::atomic<int32_t> error_{0};
  std::atomic<bool> threw_{false};
  std::exception_ptr thrown_;  // written by the thread that set threw_, read by the submitter when no worker is inside

  alignas(64) std::atomic<uint64_t> ticket_{kClosed};  // (job number << 1) | closed flag
  alignas(64) std::atomic<int32_t> active_{0};         // workers inside the current job
  alignas(64) std::atomic<int32_t> sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace tokenspeed::cpu
