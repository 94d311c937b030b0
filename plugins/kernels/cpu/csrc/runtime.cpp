#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace tokenspeed::cpu {

namespace {

struct Candidate {
  const KernelTable* table;
  bool supported;
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  all.push_back({&kAvx512Bf16Table, avx512 && __builtin_cpu_supports("avx512bf16")});
  all.push_back({&kAvx512Table, avx512});
  all.push_back({&kAvx2Table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
  all.push_back({&kPortableTable, true});
  return all;
}

const KernelTable& choose_table(const std::string& isa) {
  std::string known;
  for (const Candidate& candidate : candidates()) {
    if (candidate.supported && (isa.empty() || isa == candidate.table->name)) return *candidate.table;
    known += std::string(known.empty() ? "" : ", ") + candidate.table->name + (candidate.supported ? "" : " (not on this processor)");
  }
  throw std::invalid_argument("isa '" + isa + "' cannot run here; choose of: " + known);
}

int checked_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("num_threads must be 1 to 1024, not " + std::to_string(num_threads));
  return num_threads;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates()) {
    if (candidate.supported) names.emplace_back(candidate.table->name);
  }
  return names;
}

void throw_on_error(int32_t code) {
  switch (code) {
    case kOk: return;
    case kPositionOutOfRange: throw std::out_of_range("a position lies outside cos_sin; enlarge the rotary table to the model length");
    case kSlotOutOfRange: throw std::out_of_range("slot_mapping names a slot beyond the last page of the cache");
    case kPageOutOfRange: throw std::out_of_range("page_table names a page outside the cache for a position below seq_lens");
    default: throw std::runtime_error("kernel error " + std::to_string(code));
  }
}

Runtime::Runtime(int num_threads, const std::string& isa) : table_(choose_table(isa)), pool_(checked_threads(num_threads)) {}

void Runtime::linear(const GemmArgs& args, int64_t rows) {
  if (rows == 0 || args.n == 0) return;
  // Input rows of a block stay in a second-level cache next to the weights that pass through it.
  const int64_t most_rows = std::max<int64_t>(24, 96 * 1024 / args.k);
  const int64_t m_blocks = ceil_div(rows, most_rows);
  const int64_t m_step = ceil_div(ceil_div(rows, m_blocks), 6) * 6;
  const int64_t block_rows = std::min(rows, m_step);
  // A chunk takes about 10 us: its weight rows cost reading them (12 GB/s) or multiplying them (100 GFLOP/s).
  const int64_t weights = args.silu_mul ? 2 : 1;
  const int64_t element = args.dtype == DType::kFloat32 ? 4 : 2;
  const double row_ns = static_cast<double>(weights * args.k) * std::max(static_cast<double>(element) / 12.0, static_cast<double>(block_rows) / 50.0);
  const int64_t n_step = std::clamp<int64_t>(static_cast<int64_t>(10000.0 / row_ns) / 8 * 8, 8, 512);
  const int64_t n_chunks = ceil_div(args.n, n_step);
  const int64_t chunks = ceil_div(rows, m_step) * n_chunks;
  const bool scratch_needed = args.silu_mul || args.out_dtype != DType::kFloat32;
  ThreadPool::Lease lease(pool_);
  lease.run(chunks, [&](int64_t index, Scratch& scratch) -> int32_t {
    const int64_t m0 = index / n_chunks * m_step, n0 = index % n_chunks * n_step;
    float* memory = scratch_needed ? scratch.floats(weights * block_rows * n_step) : nullptr;
    table_.gemm_block(args, m0, std::min(rows, m0 + m_step), n0, std::min(args.n, n0 + n_step), memory);
    return kOk;
  });
}

template <class Fn>
void Runtime::over_rows(int64_t count, int64_t row_cost, const Fn& fn) {
  constexpr int64_t kChunkBytes = 64 * 1024;
  const int64_t step = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_cost));
  if (count <= step) return throw_on_error(count == 0 ? kOk : fn(0, count));
  ThreadPool::Lease lease(pool_);
  throw_on_error(lease.run(ceil_div(count, step), [&](int64_t index, Scratch&) -> int32_t {
    return fn(index * step, std::min(count, (index + 1) * step));
  }));
}

void Runtime::norm(const NormArgs& args, int64_t rows) {
  over_rows(rows, args.hidden * 12, [&](int64_t t0, int64_t t1) -> int32_t {
    table_.norm_rows(args, t0, t1);
    return kOk;
  });
}

void Runtime::rope(const RopeArgs& args, int64_t tokens) {
  over_rows(tokens, (args.q_heads + 2 * args.kv_heads) * args.head_dim * 8,
            [&](int64_t t0, int64_t t1) { return table_.rope_rows(args, t0, t1); });
}

void Runtime::cache_write(const CacheWriteArgs& args, int64_t tokens) {
  over_rows(tokens, args.cache.kv_heads * (args.cache.k.dim + args.cache.v.dim) * 8,
            [&](int64_t t0, int64_t t1) { return table_.cache_write_rows(args, t0, t1); });
}

void Runtime::gated(const void* gate_up, void* out, int64_t rows, int64_t width, DType dtype, Activation activation) {
  const int64_t bytes = width * (dtype == DType::kFloat32 ? 4 : 2);
  over_rows(rows, width * 16, [&](int64_t t0, int64_t t1) -> int32_t {
    for (int64_t t = t0; t < t1; ++t) {
      const char* gate = static_cast<const char*>(gate_up) + t * 2 * bytes;
      table_.gated_row(gate, gate + bytes, static_cast<char*>(out) + t * bytes, width, dtype, activation);
    }
    return kOk;
  });
}

void Runtime::lookup(const void* ids, bool ids_64, int64_t count, const void* weight, int64_t vocab, int64_t row_bytes, void* out) {
  const auto id_at = [&](int64_t i) -> int64_t {
    return ids_64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = id_at(i);
    if (id < 0 || id >= vocab) {
      throw std::out_of_range("token id " + std::to_string(id) + " at index " + std::to_string(i) + " is outside the vocabulary of " + std::to_string(vocab));
    }
  }
  over_rows(count, row_bytes * 2, [&](int64_t t0, int64_t t1) -> int32_t {
    for (int64_t t = t0; t < t1; ++t) {
      std::memcpy(static_cast<char*>(out) + t * row_bytes, static_cast<const char*>(weight) + id_at(t) * row_bytes, static_cast<size_t>(row_bytes));
    }
    return kOk;
  });
}

void Runtime::argmax(const void* logits, int64_t rows, int64_t stride, int64_t vocab, DType dtype, int64_t* out) {
  constexpr int64_t kPart = 8192;
  const int64_t parts = ceil_div(vocab, kPart), bytes = dtype == DType::kFloat32 ? 4 : 2;
  std::vector<ArgmaxPart> found(static_cast<size_t>(rows * parts));
  ThreadPool::Lease lease(pool_);
  lease.run(rows * parts, [&](int64_t index, Scratch&) -> int32_t {
    const int64_t start = index % parts * kPart;
    const char* at = static_cast<const char*>(logits) + (index / parts * stride + start) * bytes;
    found[static_cast<size_t>(index)] = table_.argmax_part(at, std::min(kPart, vocab - start), dtype);
    return kOk;
  });
  for (int64_t r = 0; r < rows; ++r) {
    float best = -std::numeric_limits<float>::infinity();
    out[r] = vocab > 0 ? 0 : -1;
    for (int64_t p = 0; p < parts; ++p) {
      const ArgmaxPart& part = found[static_cast<size_t>(r * parts + p)];
      if (part.nan != 0) {
        out[r] = -1;
        break;
      }
      if (part.value > best) {
        best = part.value;
        out[r] = p * kPart + part.index;
      }
    }
  }
}

}  // namespace tokenspeed::cpu
