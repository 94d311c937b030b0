// The drivers: they cut a kernel call into chunks for the thread pool. Arguments are trusted to be consistent in shape (the
// Python side checks shapes and types); indices read from tensors are checked here and throw std::out_of_range.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernel_table.h"
#include "thread_pool.h"

namespace tokenspeed::cpu {

// Names of the instruction sets that this processor runs, best first.
std::vector<std::string> supported_isas();

struct AttentionCall {
  const void* q;
  void* out;
  DType dtype;
  int64_t q_heads;
  CacheView cache;
  const int32_t* page_table;
  int64_t table_stride;
  int64_t table_columns;
  const int32_t* seq_lens;
  int64_t rows;
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  const float* sinks;  // (q_heads) or null
};

class Runtime {
 public:
  // `isa`: a name of supported_isas(), or empty for the best. Throws std::invalid_argument.
  Runtime(int num_threads, const std::string& isa);

  int num_threads() const { return pool_.num_threads(); }
  const char* isa() const { return table_.name; }

  void linear(const GemmArgs& args, int64_t rows);
  void norm(const NormArgs& args, int64_t rows);
  void rope(const RopeArgs& args, int64_t tokens);
  void cache_write(const CacheWriteArgs& args, int64_t tokens);
  void gated(const void* gate_up, void* out, int64_t rows, int64_t width, DType dtype, Activation activation);
  void lookup(const void* ids, bool ids_64, int64_t count, const void* weight, int64_t vocab, int64_t row_bytes, void* out);
  void argmax(const void* logits, int64_t rows, int64_t stride, int64_t vocab, DType dtype, int64_t* out);

  // Flash decoding: q (rows * width, q_heads, dim). `intervals` (count, 4) as in the plan, rows relative to this call.
  void decode(const AttentionCall& call, int64_t width, const int32_t* intervals, int64_t interval_count);
  // Chunks over prefix and own tokens: q (tokens, q_heads, dim), query_start (rows + 1).
  void extend(const AttentionCall& call, const int32_t* query_start, int64_t tokens);

 private:
  // fn(begin, end) -> error over `count` rows that cost `row_cost` bytes of traffic each.
  template <class Fn>
  void over_rows(int64_t count, int64_t row_cost, const Fn& fn);

  const KernelTable& table_;
  ThreadPool pool_;
};

// Throws std::out_of_range for a kernel's error code.
void throw_on_error(int32_t code);

}  // namespace tokenspeed::cpu
