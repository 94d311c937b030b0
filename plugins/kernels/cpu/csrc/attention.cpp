// Drivers of paged attention: how rows, kv heads and key positions become chunks.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "runtime.h"

namespace tokenspeed::cpu {

namespace {

// Positions of one partial result of decode. A constant, so that a row's sums never depend on the other rows of the batch.
constexpr int64_t kSplit = 128;
constexpr int64_t kMaxQueries = 96;  // of one attend() call: their scores and sums stay in a second-level cache

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void check_lengths(const AttentionCall& call) {
  for (int64_t r = 0; r < call.rows; ++r) {
    const int64_t length = call.seq_lens[r];
    if (length < 0 || length > call.table_columns * call.cache.page_size) {
      throw std::out_of_range("seq_lens[" + std::to_string(r) + "] is " + std::to_string(length) + "; page_table has " +
                              std::to_string(call.table_columns) + " pages of " + std::to_string(call.cache.page_size) + " tokens a row");
    }
  }
}

// Query tokens of one kv head's group, gathered and scaled, with their allowed positions and running softmax.
struct QueryBlock {
  float* q;
  float* o;
  float* m;
  float* l;
  int32_t* lo;
  int32_t* hi;
  float* work;

  static int64_t floats(int64_t queries, int64_t key_dim, int64_t value_dim) {
    return padded(queries * key_dim) + queries * padded(value_dim) + 4 * padded(queries) + attend_work_floats(key_dim, value_dim, queries);
  }

  QueryBlock(float* memory, int64_t queries, int64_t key_dim, int64_t value_dim) {
    q = memory;
    o = q + padded(queries * key_dim);
    m = o + queries * padded(value_dim);
    l = m + padded(queries);
    lo = reinterpret_cast<int32_t*>(l + padded(queries));
    hi = lo + padded(queries);
    work = reinterpret_cast<float*>(hi + padded(queries));
    std::fill_n(o, queries * padded(value_dim), 0.0f);
    std::fill_n(m, queries, -std::numeric_limits<float>::infinity());
    std::fill_n(l, queries, 0.0f);
  }
};

}  // namespace

void Runtime::decode(const AttentionCall& call, int64_t width, const int32_t* intervals, int64_t interval_count) {
  check_lengths(call);
  const int64_t rows = call.rows, kv_heads = call.cache.kv_heads, group = call.q_heads / kv_heads;
  const int64_t dim = call.cache.k.dim, value_dim = call.cache.v.dim, pad = padded(value_dim);
  const int64_t page_size = call.cache.page_size, element = element_size(call.dtype);
  const int64_t row_queries = width * group;  // of one kv head

  // shared[r]: how many positions, from 0 on, row r has in the same pages as row r + 1.
  std::vector<int64_t> shared(static_cast<size_t>(rows), 0);
  for (int64_t i = 0; i < interval_count; ++i) {
    const int32_t* interval = intervals + 4 * i;
    if (interval[0] < 0 || interval[1] > rows || interval[0] > interval[1] || interval[2] < 0 || interval[3] < 0) {
      throw std::out_of_range("prefix_intervals[" + std::to_string(i) + "] is outside the " + std::to_string(rows) + " rows of this call");
    }
    for (int64_t r = interval[0]; r + 1 < interval[1]; ++r) {
      int64_t& end = shared[static_cast<size_t>(r)];
      if (interval[2] * page_size <= end) end = std::max(end, (int64_t{interval[2]} + interval[3]) * page_size);
    }
  }

  struct Row {
    int64_t first;  // splits [first, last)
    int64_t last;
    int64_t base;  // number of this row's first partial result
  };
  std::vector<Row> row_of(static_cast<size_t>(rows));
  int64_t partials = 0, most_splits = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t length = call.seq_lens[r];
    const int64_t lowest = call.window > 0 ? std::max<int64_t>(0, length - width + 1 - call.window) : 0;
    Row& row = row_of[static_cast<size_t>(r)];
    row = {lowest / kSplit, ceil_div(length, kSplit), partials};
    row.first = std::min(row.first, row.last);
    partials += row.last - row.first;
    most_splits = std::max(most_splits, row.last);
  }

  struct Task {
    int64_t split;
    int64_t begin;
    int64_t end;
  };
  std::vector<Task> tasks;
  tasks.reserve(static_cast<size_t>(partials));
  const int64_t most_rows = std::max<int64_t>(1, kMaxQueries / row_queries);
  for (int64_t split = 0; split < most_splits; ++split) {
    const auto reads = [&](int64_t r) {
      const Row& row = row_of[static_cast<size_t>(r)];
      return split >= row.first && split < row.last;
    };
    for (int64_t r = 0; r < rows;) {
      if (!reads(r)) {
        ++r;
        continue;
      }
      int64_t end = r + 1;
      while (end < rows && end - r < most_rows && shared[static_cast<size_t>(end - 1)] >= (split + 1) * kSplit && reads(end)) ++end;
      tasks.push_back({split, r, end});
      r = end;
    }
  }

  ThreadPool::Lease lease(pool_);
  // Partial results: (partial, kv head, width, group) x (values, maximum, sum).
  const int64_t results = partials * kv_heads * row_queries;
  float* part_o = lease.call_floats(results * (pad + 2));
  float* part_m = part_o + results * pad;
  float* part_l = part_m + results;
  const int64_t chunks = static_cast<int64_t>(tasks.size()) * kv_heads;
  throw_on_error(lease.run(chunks, [&](int64_t index, Scratch& scratch) -> int32_t {
    const Task& task = tasks[static_cast<size_t>(index / kv_heads)];
    const int64_t head = index % kv_heads, queries = (task.end - task.begin) * row_queries;
    QueryBlock block(scratch.floats(QueryBlock::floats(queries, dim, value_dim)), queries, dim, value_dim);
    const int64_t split_begin = task.split * kSplit;
    int64_t begin = split_begin + kSplit, end = split_begin;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t r = task.begin + i / row_queries, w = i % row_queries / group, g = i % group;
      const char* from = static_cast<const char*>(call.q) + ((r * width + w) * call.q_heads + head * group + g) * dim * element;
      table_.load_scaled(from, block.q + i * dim, dim, call.scale, call.dtype);
      const int64_t hi = std::max<int64_t>(0, call.seq_lens[r] - width + w + 1);
      const int64_t lo = call.window > 0 ? std::max<int64_t>(0, hi - call.window) : 0;
      block.lo[i] = static_cast<int32_t>(lo);
      block.hi[i] = static_cast<int32_t>(hi);
      begin = std::min(begin, std::max(lo, split_begin));
      end = std::max(end, std::min(hi, split_begin + kSplit));
    }
    AttendArgs attend{&call.cache, head, call.page_table + task.begin * call.table_stride, begin, end, block.q, queries,
                      call.softcap, block.lo, block.hi, block.o, block.m, block.l, block.work, nullptr, 0, 0, 0};
    if (index + 1 < chunks) {
      const Task& next = tasks[static_cast<size_t>((index + 1) / kv_heads)];
      attend.next_pages = call.page_table + next.begin * call.table_stride;
      attend.next_head = (index + 1) % kv_heads;
      attend.next_begin = next.split * kSplit;
      attend.next_end = std::min<int64_t>(attend.next_begin + kSplit, call.seq_lens[next.begin]);
    }
    const int32_t error = table_.attend(attend);
    for (int64_t r = task.begin; r < task.end; ++r) {
      const Row& row = row_of[static_cast<size_t>(r)];
      const int64_t to = ((row.base + task.split - row.first) * kv_heads + head) * row_queries, i = (r - task.begin) * row_queries;
      std::copy_n(block.o + i * pad, row_queries * pad, part_o + to * pad);
      std::copy_n(block.m + i, row_queries, part_m + to);
      std::copy_n(block.l + i, row_queries, part_l + to);
    }
    return error;
  }));

  // Merge by log-sum-exp, splits in order.
  const auto merge = [&](int64_t index, Scratch& scratch) -> int32_t {
    const int64_t r = index / kv_heads, head = index % kv_heads;
    const Row& row = row_of[static_cast<size_t>(r)];
    float* sum = scratch.floats(pad);
    for (int64_t i = 0; i < row_queries; ++i) {
      const int64_t q_head = head * group + i % group;
      float top = call.sinks != nullptr ? call.sinks[q_head] : -std::numeric_limits<float>::infinity();
      const auto part = [&](int64_t split) { return ((row.base + split) * kv_heads + head) * row_queries + i; };
      for (int64_t s = 0; s < row.last - row.first; ++s) top = std::max(top, part_m[part(s)]);
      float total = call.sinks != nullptr ? std::exp(call.sinks[q_head] - top) : 0.0f;
      std::fill_n(sum, pad, 0.0f);
      for (int64_t s = 0; s < row.last - row.first; ++s) {
        if (part_l[part(s)] == 0.0f) continue;
        const float factor = std::exp(part_m[part(s)] - top);
        total += part_l[part(s)] * factor;
        table_.axpy(sum, part_o + part(s) * pad, value_dim, factor);
      }
      char* to = static_cast<char*>(call.out) + ((r * width + i / group) * call.q_heads + q_head) * value_dim * element;
      table_.store_scaled(sum, to, value_dim, total != 0.0f ? 1.0f / total : 0.0f, call.dtype);
    }
    return kOk;
  };
  if (results * pad < 32 * 1024) {
    Scratch scratch;
    for (int64_t i = 0; i < rows * kv_heads; ++i) merge(i, scratch);
  } else {
    lease.run(rows * kv_heads, merge);
  }
}

void Runtime::extend(const AttentionCall& call, const int32_t* query_start, int64_t tokens) {
  check_lengths(call);
  const int64_t kv_heads = call.cache.kv_heads, group = call.q_heads / kv_heads;
  const int64_t dim = call.cache.k.dim, value_dim = call.cache.v.dim, pad = padded(value_dim);
  const int64_t element = element_size(call.dtype);
  if (query_start[0] != 0 || query_start[call.rows] != tokens) throw std::out_of_range("query_start must begin at 0 and end at the number of tokens");
  for (int64_t r = 0; r < call.rows; ++r) {
    const int64_t length = query_start[r + 1] - query_start[r];
    if (length < 0 || length > call.seq_lens[r]) {
      throw std::out_of_range("row " + std::to_string(r) + " has " + std::to_string(length) + " query tokens but seq_lens says " + std::to_string(call.seq_lens[r]));
    }
  }

  // Token blocks of up to kMaxQueries queries; smaller ones where there would be too few for all threads. A query's sums do not
  // depend on its block.
  int64_t step = std::max<int64_t>(1, kMaxQueries / group);
  while (step > 8 && tokens * kv_heads < 4 * pool_.num_threads() * step) step /= 2;
  struct Task {
    int64_t row;
    int64_t begin;  // token of the call
    int64_t end;
    int64_t cost;
  };
  std::vector<Task> tasks;
  for (int64_t r = 0; r < call.rows; ++r) {
    for (int64_t t = query_start[r]; t < query_start[r + 1]; t += step) {
      const int64_t end = std::min<int64_t>(t + step, query_start[r + 1]);
      int64_t keys = call.seq_lens[r] - (query_start[r + 1] - end);
      if (call.window > 0) keys = std::min(keys, call.window + step);
      tasks.push_back({r, t, end, keys * (end - t + 4)});
    }
  }
  // Longest first, dealt to the threads in turn (a thread begins with a range of consecutive chunks).
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  std::vector<Task> dealt;
  dealt.reserve(tasks.size());
  const auto threads = static_cast<size_t>(pool_.num_threads());
  for (size_t thread = 0; thread < threads; ++thread) {
    for (size_t i = thread; i < tasks.size(); i += threads) dealt.push_back(tasks[i]);
  }

  ThreadPool::Lease lease(pool_);
  throw_on_error(lease.run(static_cast<int64_t>(tasks.size()) * kv_heads, [&](int64_t index, Scratch& scratch) -> int32_t {
    const Task& task = dealt[static_cast<size_t>(index / kv_heads)];
    const int64_t head = index % kv_heads, queries = (task.end - task.begin) * group;
    QueryBlock block(scratch.floats(QueryBlock::floats(queries, dim, value_dim)), queries, dim, value_dim);
    const int64_t offset = call.seq_lens[task.row] - query_start[task.row + 1];  // token number -> position
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t t = task.begin + i / group;
      const char* from = static_cast<const char*>(call.q) + (t * call.q_heads + head * group + i % group) * dim * element;
      table_.load_scaled(from, block.q + i * dim, dim, call.scale, call.dtype);
      const int64_t hi = t + offset + 1;
      block.hi[i] = static_cast<int32_t>(hi);
      block.lo[i] = static_cast<int32_t>(call.window > 0 ? std::max<int64_t>(0, hi - call.window) : 0);
    }
    const AttendArgs attend{&call.cache, head, call.page_table + task.row * call.table_stride, block.lo[0], block.hi[queries - 1],
                            block.q, queries, call.softcap, block.lo, block.hi, block.o, block.m, block.l, block.work, nullptr, 0, 0, 0};
    const int32_t error = table_.attend(attend);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t t = task.begin + i / group, q_head = head * group + i % group;
      float scale = block.l[i];
      float keep = 1.0f;
      if (call.sinks != nullptr) {
        const float top = std::max(block.m[i], call.sinks[q_head]);
        keep = std::exp(block.m[i] - top);
        scale = scale * keep + std::exp(call.sinks[q_head] - top);
      }
      char* to = static_cast<char*>(call.out) + (t * call.q_heads + q_head) * value_dim * element;
      table_.store_scaled(block.o + i * pad, to, value_dim, scale != 0.0f ? keep / scale : 0.0f, call.dtype);
    }
    return error;
  }));
}

}  // namespace tokenspeed::cpu
