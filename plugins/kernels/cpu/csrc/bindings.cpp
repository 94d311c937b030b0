// Python face of the runtime. Tensors arrive as addresses and sizes: the wrappers in the package check them and own the memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "runtime.h"

namespace py = pybind11;

namespace tokenspeed::cpu {
namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType dtype(bool bf16) { return bf16 ? DType::kBFloat16 : DType::kFloat32; }

// A contiguous cache pair as (address, address, pages, page size, heads, key dim, value dim, HND, bf16).
CacheView cache_view(uintptr_t k, uintptr_t v, int64_t pages, int64_t page_size, int64_t heads, int64_t key_dim, int64_t value_dim,
                     bool hnd, bool bf16) {
  const auto plane = [&](uintptr_t data, int64_t dim) {
    return CachePlane{at<void>(data), page_size * heads * dim, hnd ? page_size * dim : dim, hnd ? dim : heads * dim, dim};
  };
  return {plane(k, key_dim), plane(v, value_dim), dtype(bf16), pages, page_size, heads};
}

void linear(Runtime& self, uintptr_t x, int64_t ldx, int64_t rows, uintptr_t w, int64_t n, int64_t k, uintptr_t bias, uintptr_t out,
            int64_t ldo, bool bf16, bool out_bf16, bool silu_mul) {
  const GemmArgs args{at<void>(x), ldx, at<void>(w), at<void>(bias), at<void>(out), ldo, n, k, dtype(bf16), dtype(out_bf16), silu_mul};
  const py::gil_scoped_release release;
  self.linear(args, rows);
}

void norm(Runtime& self, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, int64_t rows, int64_t hidden, float eps,
          bool bf16, bool weight_bf16) {
  const NormArgs args{at<void>(x), at<void>(residual), at<void>(weight), at<void>(out), hidden, eps, dtype(bf16), dtype(weight_bf16)};
  const py::gil_scoped_release release;
  self.norm(args, rows);
}

void qkv_rope_write(Runtime& self, uintptr_t qkv, uintptr_t q_out, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                    bool bf16, uintptr_t positions, bool positions_64, uintptr_t cos_sin, int64_t max_position, int64_t rotary_dim,
                    bool interleaved, uintptr_t q_norm, uintptr_t k_norm, float eps, uintptr_t k_cache, uintptr_t v_cache,
                    int64_t pages, int64_t page_size, bool hnd, bool cache_bf16, uintptr_t slots) {
  const int64_t element = bf16 ? 2 : 4, stride = (q_heads + 2 * kv_heads) * head_dim;
  const uintptr_t k = qkv + static_cast<uintptr_t>(q_heads * head_dim * element);
  const uintptr_t v = k + static_cast<uintptr_t>(kv_heads * head_dim * element);
  const RopeArgs args{at<void>(qkv), at<void>(k), at<void>(v), stride, stride, stride, at<void>(q_out), q_heads * head_dim, nullptr, 0,
                      q_heads, kv_heads, head_dim, dtype(bf16), at<void>(positions), positions_64, at<float>(cos_sin), max_position,
                      rotary_dim, interleaved, at<void>(q_norm), at<void>(k_norm), eps, true,
                      cache_view(k_cache, v_cache, pages, page_size, kv_heads, head_dim, head_dim, hnd, cache_bf16), at<int64_t>(slots)};
  const py::gil_scoped_release release;
  self.rope(args, tokens);
}

void rotate(Runtime& self, uintptr_t q, int64_t q_stride, int64_t q_heads, uintptr_t k, int64_t k_stride, int64_t kv_heads,
            int64_t tokens, int64_t head_dim, bool bf16, uintptr_t positions, bool positions_64, uintptr_t cos_sin,
            int64_t max_position, int64_t rotary_dim, bool interleaved) {
  const RopeArgs args{at<void>(q), at<void>(k), nullptr, q_stride, k_stride, 0, at<void>(q), q_stride, at<void>(k), k_stride,
                      q_heads, kv_heads, head_dim, dtype(bf16), at<void>(positions), positions_64, at<float>(cos_sin), max_position,
                      rotary_dim, interleaved, nullptr, nullptr, 0.0f, false, {}, nullptr};
  const py::gil_scoped_release release;
  self.rope(args, tokens);
}

void cache_write(Runtime& self, uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, int64_t tokens, bool bf16,
                 uintptr_t k_cache, uintptr_t v_cache, int64_t pages, int64_t page_size, int64_t kv_heads, int64_t key_dim,
                 int64_t value_dim, bool hnd, bool cache_bf16, uintptr_t slots) {
  const CacheWriteArgs args{at<void>(k), at<void>(v), k_stride, v_stride, dtype(bf16),
                            cache_view(k_cache, v_cache, pages, page_size, kv_heads, key_dim, value_dim, hnd, cache_bf16),
                            at<int64_t>(slots)};
  const py::gil_scoped_release release;
  self.cache_write(args, tokens);
}

AttentionCall attention_call(uintptr_t q, uintptr_t out, bool bf16, int64_t q_heads, const CacheView& cache, uintptr_t page_table,
                             int64_t table_stride, int64_t table_columns, uintptr_t seq_lens, int64_t rows, float scale,
                             int64_t window, float softcap, uintptr_t sinks) {
  return {at<void>(q), at<void>(out), dtype(bf16), q_heads, cache, at<int32_t>(page_table), table_stride, table_columns,
          at<int32_t>(seq_lens), rows, scale, window, softcap, at<float>(sinks)};
}

void decode(Runtime& self, uintptr_t q, uintptr_t out, bool bf16, int64_t q_heads, uintptr_t k_cache, uintptr_t v_cache, int64_t pages,
            int64_t page_size, int64_t kv_heads, int64_t key_dim, int64_t value_dim, bool hnd, bool cache_bf16, uintptr_t page_table,
            int64_t table_stride, int64_t table_columns, uintptr_t seq_lens, int64_t rows, float scale, int64_t window, float softcap,
            uintptr_t sinks, int64_t width, uintptr_t intervals, int64_t interval_count) {
  const CacheView cache = cache_view(k_cache, v_cache, pages, page_size, kv_heads, key_dim, value_dim, hnd, cache_bf16);
  const AttentionCall call = attention_call(q, out, bf16, q_heads, cache, page_table, table_stride, table_columns, seq_lens, rows,
                                            scale, window, softcap, sinks);
  const py::gil_scoped_release release;
  self.decode(call, width, at<int32_t>(intervals), interval_count);
}

void extend(Runtime& self, uintptr_t q, uintptr_t out, bool bf16, int64_t q_heads, uintptr_t k_cache, uintptr_t v_cache, int64_t pages,
            int64_t page_size, int64_t kv_heads, int64_t key_dim, int64_t value_dim, bool hnd, bool cache_bf16, uintptr_t page_table,
            int64_t table_stride, int64_t table_columns, uintptr_t seq_lens, int64_t rows, float scale, int64_t window, float softcap,
            uintptr_t sinks, uintptr_t query_start, int64_t tokens) {
  const CacheView cache = cache_view(k_cache, v_cache, pages, page_size, kv_heads, key_dim, value_dim, hnd, cache_bf16);
  const AttentionCall call = attention_call(q, out, bf16, q_heads, cache, page_table, table_stride, table_columns, seq_lens, rows,
                                            scale, window, softcap, sinks);
  const py::gil_scoped_release release;
  self.extend(call, at<int32_t>(query_start), tokens);
}

}  // namespace
}  // namespace tokenspeed::cpu

PYBIND11_MODULE(_native, m) {
  using namespace tokenspeed::cpu;
  m.doc() = "CPU kernels: raw addresses and sizes, checked by the Python wrappers.";
  m.def("supported_isas", &supported_isas, "Instruction sets that this processor runs, best first.");
  py::class_<Runtime>(m, "Runtime", "A thread pool and the kernels of one instruction set.")
      .def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("isa") = "")
      .def_property_readonly("num_threads", &Runtime::num_threads)
      .def_property_readonly("isa", &Runtime::isa)
      .def("linear", &linear)
      .def("norm", &norm)
      .def("qkv_rope_write", &qkv_rope_write)
      .def("rotate", &rotate)
      .def("cache_write", &cache_write)
      .def("decode", &decode)
      .def("extend", &extend)
      .def("gated", [](Runtime& self, uintptr_t gate_up, uintptr_t out, int64_t rows, int64_t width, bool bf16, bool gelu) {
        const py::gil_scoped_release release;
        self.gated(at<void>(gate_up), at<void>(out), rows, width, dtype(bf16), gelu ? Activation::kGeluTanh : Activation::kSilu);
      })
      .def("lookup", [](Runtime& self, uintptr_t ids, bool ids_64, int64_t count, uintptr_t weight, int64_t vocab, int64_t row_bytes, uintptr_t out) {
        const py::gil_scoped_release release;
        self.lookup(at<void>(ids), ids_64, count, at<void>(weight), vocab, row_bytes, at<void>(out));
      })
      .def("argmax", [](Runtime& self, uintptr_t logits, int64_t rows, int64_t stride, int64_t vocab, bool bf16, uintptr_t out) {
        const py::gil_scoped_release release;
        self.argmax(at<void>(logits), rows, stride, vocab, dtype(bf16), at<int64_t>(out));
      });
}
