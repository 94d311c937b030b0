// The border between the drivers (compiled for the baseline processor) and the kernels (compiled once per instruction set).
//
// Everything here is plain data: an instruction-set unit must not emit a shared inline function, or the linker could keep
// its AVX-512 copy for every caller. All strides are in elements. Pointers are borrowed for the duration of a call.
#pragma once

#include <cstdint>

namespace tokenspeed::cpu {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// Error codes of kernels that read indices; 0 is success. The drivers turn them into exceptions.
enum KernelError : int32_t {
  kOk = 0,
  kPositionOutOfRange = 1,
  kSlotOutOfRange = 2,
  kPageOutOfRange = 3,
};

// out = x @ w^T (+ bias); with `silu_mul`, w holds 2 * n rows and out = silu(x @ w[:n]^T) * (x @ w[n:]^T).
struct GemmArgs {
  const void* x;
  int64_t ldx;
  const void* w;  // (n or 2n, k), contiguous
  const void* bias;  // (n or 2n) of `dtype`, or null
  void* out;
  int64_t ldo;
  int64_t n;
  int64_t k;
  DType dtype;      // of x, w and bias
  DType out_dtype;
  bool silu_mul;
};

struct NormArgs {
  const void* x;
  void* residual;  // null: plain norm
  const void* weight;
  void* out;
  int64_t hidden;
  float eps;
  DType dtype;
  DType weight_dtype;
};

// One side (keys or values) of a paged cache: element (page, head, token, i) lies at the sum of the strides, i contiguous.
struct CachePlane {
  void* data;
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim;
};

struct CacheView {
  CachePlane k;
  CachePlane v;
  DType dtype;
  int64_t num_pages;
  int64_t page_size;
  int64_t kv_heads;
};

struct RopeArgs {
  const void* q;
  const void* k;
  const void* v;
  int64_t q_stride;  // between tokens
  int64_t k_stride;
  int64_t v_stride;
  void* q_out;
  int64_t q_out_stride;
  void* k_out;  // rotated in place; null: keys go to the cache only
  int64_t k_out_stride;
  int64_t q_heads;
  int64_t kv_heads;
  int64_t head_dim;
  DType dtype;
  const void* positions;
  bool positions_64;
  const float* cos_sin;  // (max_position, rotary_dim)
  int64_t max_position;
  int64_t rotary_dim;
  bool interleaved;
  const void* q_norm;  // (head_dim) of `dtype`, or null
  const void* k_norm;
  float eps;
  bool write_cache;
  CacheView cache;
  const int64_t* slots;
};

struct CacheWriteArgs {
  const void* k;
  const void* v;
  int64_t k_stride;
  int64_t v_stride;
  DType dtype;
  CacheView cache;
  const int64_t* slots;
};

// Queries of one kv head against key positions [begin, end) of one page-table row: one online-softmax pass.
// Query i attends to positions [lo[i], hi[i]). o, m and l are carried (o unnormalised).
constexpr int kKeyBlock = 64;  // keys per block; blocks start at multiples of it, so a query's sums never depend on its neighbours

struct AttendArgs {
  const CacheView* cache;
  int64_t head;
  const int32_t* pages;
  int64_t begin;
  int64_t end;
  const float* q;  // (queries, key dim), scaled
  int64_t queries;
  float softcap;  // 0: none; else scores become softcap * tanh(score / softcap)
  const int32_t* lo;
  const int32_t* hi;
  float* o;  // (queries, padded value dim)
  float* m;
  float* l;
  float* work;  // attend_work_floats(...)
  // What this thread probably reads next, for prefetching: another call's pages (null: none), head and first position.
  const int32_t* next_pages;
  int64_t next_head;
  int64_t next_begin;
  int64_t next_end;
};

inline constexpr int64_t kPad = 16;  // widest vector, in floats

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

constexpr int64_t attend_work_floats(int64_t key_dim, int64_t value_dim, int64_t queries) {
  return (padded(key_dim) + padded(value_dim)) * kKeyBlock + padded(queries) + queries * kKeyBlock;
}

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct ArgmaxPart {
  float value;
  int32_t nan;
  int64_t index;
};

struct KernelTable {
  const char* name;
  void (*gemm_block)(const GemmArgs&, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* scratch);
  void (*norm_rows)(const NormArgs&, int64_t t0, int64_t t1);
  int32_t (*rope_rows)(const RopeArgs&, int64_t t0, int64_t t1);
  int32_t (*cache_write_rows)(const CacheWriteArgs&, int64_t t0, int64_t t1);
  void (*gated_row)(const void* gate, const void* up, void* out, int64_t n, DType dtype, Activation activation);
  int32_t (*attend)(const AttendArgs&);
  void (*load_scaled)(const void* src, float* dst, int64_t n, float scale, DType dtype);  // dst = src * scale
  void (*store_scaled)(const float* src, void* dst, int64_t n, float scale, DType dtype);
  void (*axpy)(float* acc, const float* x, int64_t n, float scale);  // acc += scale * x
  ArgmaxPart (*argmax_part)(const void* x, int64_t n, DType dtype);
};

#if defined(__x86_64__)
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx2Table;
#endif
extern const KernelTable kPortableTable;

}  // namespace tokenspeed::cpu
