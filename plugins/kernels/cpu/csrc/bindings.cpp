// Python face of the runtime: each method checks its tensors, makes its result and runs without the interpreter lock.
// What a method accepts is written in the package's _native.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "runtime.h"
#include "tensor.h"

namespace py = pybind11;

namespace tokenspeed::cpu {
namespace {

constexpr int64_t kMaxHeadDim = 1024;

std::optional<Arg> optional_arg(py::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return Arg(object, name);
}

const Arg* pointer(const std::optional<Arg>& arg) { return arg ? &*arg : nullptr; }

// ---- gemm ----

py::object product(Runtime& self, const char* kernel, bool silu_mul, py::handle x_object, py::handle weight_object,
                   py::handle bias_object, py::object out_object) {
  const Arg x(x_object, "x"), weight(weight_object, "weight");
  const std::optional<Arg> bias = optional_arg(bias_object, "bias");
  require(x.is_float() && weight.kind() == x.kind() && x.dim() == 2 && weight.dim() == 2 && x.is_cpu() && weight.is_cpu(), kernel,
          "x (T, K) and weight (N, K) must both be float32 or both bfloat16 on the CPU", {&x, &weight});
  const int64_t rows = x.size(0), k = x.size(1), weight_rows = weight.size(0);
  require(weight.size(1) == k && k > 0 && x.contiguous(1) && weight.contiguous(), kernel,
          "x (T, K) must be contiguous along K and weight (N, K) contiguous with the same K > 0", {&x, &weight});
  if (bias) {
    require(bias->kind() == x.kind() && bias->has_shape({weight_rows}) && bias->contiguous(), kernel,
            "bias must be contiguous, of x's type and one for each row of weight", {&*bias, &weight});
  }
  require(!silu_mul || weight_rows % 2 == 0, kernel, "weight must hold as many gate rows as up rows", {&weight});
  const int64_t n = silu_mul ? weight_rows / 2 : weight_rows;
  const bool given = !out_object.is_none();
  if (!given) out_object = x.make({rows, n});
  const Arg out(out_object, "out");
  if (given) {
    if (!out.has_shape({rows, n}) || !out.contiguous(1) || !(out.kind() == x.kind() || out.kind() == Kind::kFloat32) || !out.is_cpu()) {
      refuse(kernel, "out must be (" + std::to_string(rows) + ", " + std::to_string(n) + "), contiguous along the last axis, float32 or x's type", {&out, &x});
    }
  }
  const GemmArgs args{x.data(), x.stride(0), weight.data(), bias ? bias->data() : nullptr, out.data(), given ? out.stride(0) : n, n, k,
                      x.dtype(), out.dtype(), silu_mul};
  {
    const py::gil_scoped_release release;
    self.linear(args, rows);
  }
  return out_object;
}

py::object linear(Runtime& self, py::handle x, py::handle weight, py::handle bias, py::object out) {
  return product(self, "gemm.linear", false, x, weight, bias, std::move(out));
}

py::object linear_silu_mul(Runtime& self, py::handle x, py::handle weight, py::handle bias, py::object out) {
  return product(self, "gemm.linear_silu_mul", true, x, weight, bias, std::move(out));
}

// ---- norm ----

py::object norm(Runtime& self, const char* kernel, const Arg& x, const Arg* residual, py::handle weight_object, float eps) {
  const Arg weight(weight_object, "weight");
  require(x.is_float() && weight.is_float() && x.is_cpu() && weight.is_cpu() && x.contiguous() && weight.contiguous(), kernel,
          "x and weight must be contiguous float32 or bfloat16 tensors on the CPU", {&x, &weight});
  require(weight.dim() == 1 && weight.size(0) > 0 && x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(0), kernel,
          "weight (H) must have the size of x's last axis", {&x, &weight});
  py::object out_object = x.make_like();
  const Arg out(out_object, "out");
  const int64_t hidden = weight.size(0);
  const NormArgs args{x.data(), residual == nullptr ? nullptr : residual->data(), weight.data(), out.data(), hidden, eps, x.dtype(), weight.dtype()};
  const int64_t rows = x.numel() / hidden;
  const py::gil_scoped_release release;
  self.norm(args, rows);
  return out_object;
}

py::object rms_norm(Runtime& self, py::handle x, py::handle weight, float eps) {
  return norm(self, "norm.rms_norm", Arg(x, "x"), nullptr, weight, eps);
}

py::tuple add_rms_norm(Runtime& self, py::handle x_object, py::object residual_object, py::handle weight, float eps) {
  const Arg x(x_object, "x"), residual(residual_object, "residual");
  bool alike = residual.kind() == x.kind() && residual.dim() == x.dim() && residual.contiguous() && residual.is_cpu();
  for (int64_t i = 0; alike && i < x.dim(); ++i) alike = residual.size(i) == x.size(i);
  require(alike, "norm.add_rms_norm", "residual must be contiguous and of x's shape and type", {&x, &residual});
  return py::make_tuple(norm(self, "norm.add_rms_norm", x, &residual, weight, eps), std::move(residual_object));
}

// ---- cache ----

CacheView cache_view(const char* kernel, const Arg& k, const Arg& v, const std::string& layout) {
  const bool hnd = layout == "HND";
  if (!hnd && layout != "NHD") throw py::value_error(std::string(kernel) + ": layout is '" + layout + "'; it must be 'HND' or 'NHD'");
  require(k.is_float() && v.kind() == k.kind() && k.is_cpu() && v.is_cpu(), kernel,
          "k_cache and v_cache must both be float32 or both bfloat16 on the CPU", {&k, &v});
  require(k.dim() == 4 && v.dim() == 4 && k.contiguous() && v.contiguous() && v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
          kernel, "k_cache and v_cache must be contiguous, four-dimensional, and alike but for the last size", {&k, &v});
  const int64_t page_size = k.size(hnd ? 2 : 1), heads = k.size(hnd ? 1 : 2);
  const auto plane = [&](const Arg& a) {
    const int64_t dim = a.size(3);
    return CachePlane{a.data(), page_size * heads * dim, hnd ? page_size * dim : dim, hnd ? dim : heads * dim, dim};
  };
  return {plane(k), plane(v), k.dtype(), k.size(0), page_size, heads};
}

const int64_t* slot_address(const char* kernel, const Arg& slots, int64_t tokens) {
  if (slots.kind() != Kind::kInt64 || !slots.has_shape({tokens}) || !slots.contiguous() || !slots.is_cpu()) {
    refuse(kernel, "slot_mapping must be contiguous int64 (" + std::to_string(tokens) + ",)", {&slots});
  }
  return slots.data<int64_t>();
}

void write_cache(Runtime& self, py::handle k_object, py::handle v_object, py::handle k_cache_object, py::handle v_cache_object,
           py::handle slot_object, const std::string& layout) {
  constexpr const char* kernel = "cache.write";
  const Arg k(k_object, "k"), v(v_object, "v"), k_cache(k_cache_object, "k_cache"), v_cache(v_cache_object, "v_cache"), slots(slot_object, "slot_mapping");
  const CacheView cache = cache_view(kernel, k_cache, v_cache, layout);
  require(k.is_float() && v.kind() == k.kind() && k.is_cpu() && v.is_cpu() && k.dim() == 3 && v.dim() == 3 && k.size(0) == v.size(0) &&
              k.size(1) == cache.kv_heads && v.size(1) == cache.kv_heads && k.size(2) == cache.k.dim && v.size(2) == cache.v.dim,
          kernel, "k (T, Hk, D) and v (T, Hk, Dv) must both be float32 or both bfloat16, with the heads and sizes of the caches",
          {&k, &v, &k_cache, &v_cache});
  require(k.contiguous(1) && v.contiguous(1), kernel, "the heads of a token must be contiguous", {&k, &v});
  const int64_t tokens = k.size(0);
  const CacheWriteArgs args{k.data(), v.data(), k.stride(0), v.stride(0), k.dtype(), cache, slot_address(kernel, slots, tokens)};
  const py::gil_scoped_release release;
  self.cache_write(args, tokens);
}

// ---- rope ----

// The fields that both modes share.
RopeArgs rope_args(const char* kernel, int64_t tokens, const Arg& positions, const Arg& cos_sin, int64_t head_dim, bool interleaved, DType dtype) {
  if (!(positions.kind() == Kind::kInt32 || positions.kind() == Kind::kInt64) || !positions.has_shape({tokens}) || !positions.contiguous() || !positions.is_cpu()) {
    refuse(kernel, "positions must be contiguous int32 or int64 (" + std::to_string(tokens) + ",)", {&positions});
  }
  require(cos_sin.kind() == Kind::kFloat32 && cos_sin.dim() == 2 && cos_sin.contiguous() && cos_sin.is_cpu(), kernel,
          "cos_sin must be contiguous float32 (max_pos, rotary_dim)", {&cos_sin});
  if (cos_sin.size(1) % 2 != 0 || cos_sin.size(1) > head_dim || head_dim > kMaxHeadDim) {
    refuse(kernel, "rotary_dim must be even and at most head_dim (" + std::to_string(head_dim) + "), head_dim at most " + std::to_string(kMaxHeadDim), {&cos_sin});
  }
  RopeArgs args{};
  args.head_dim = head_dim;
  args.dtype = dtype;
  args.positions = positions.data();
  args.positions_64 = positions.kind() == Kind::kInt64;
  args.cos_sin = cos_sin.data<float>();
  args.max_position = cos_sin.size(0);
  args.rotary_dim = cos_sin.size(1);
  args.interleaved = interleaved;
  return args;
}

void rotate(Runtime& self, py::handle q_object, py::handle k_object, py::handle positions, py::handle cos_sin, int64_t head_dim, bool interleaved) {
  constexpr const char* kernel = "rope.rotate";
  const Arg q(q_object, "q"), k(k_object, "k");
  require(q.is_float() && k.kind() == q.kind() && q.dim() == 2 && k.dim() == 2 && q.size(0) == k.size(0) && q.is_cpu() && k.is_cpu(), kernel,
          "q (T, Hq * D) and k (T, Hk * D) must both be float32 or both bfloat16 on the CPU", {&q, &k});
  if (head_dim < 1 || !q.contiguous(1) || !k.contiguous(1) || q.size(1) % head_dim != 0 || k.size(1) % head_dim != 0) {
    refuse(kernel, "rows must be contiguous and hold whole heads of " + std::to_string(head_dim), {&q, &k});
  }
  const int64_t tokens = q.size(0);
  RopeArgs args = rope_args(kernel, tokens, Arg(positions, "positions"), Arg(cos_sin, "cos_sin"), head_dim, interleaved, q.dtype());
  args.q = args.q_out = q.data();
  args.k = args.k_out = k.data();
  args.q_stride = args.q_out_stride = q.stride(0);
  args.k_stride = args.k_out_stride = k.stride(0);
  args.q_heads = q.size(1) / head_dim;
  args.kv_heads = k.size(1) / head_dim;
  const py::gil_scoped_release release;
  self.rope(args, tokens);
}

py::object qkv_rope_write(Runtime& self, py::handle qkv_object, py::handle positions, py::handle cos_sin, int64_t q_heads, int64_t kv_heads,
                          int64_t head_dim, py::handle k_cache_object, py::handle v_cache_object, py::handle slot_object,
                          const std::string& layout, py::handle q_norm_object, py::handle k_norm_object, float eps, bool interleaved) {
  constexpr const char* kernel = "rope.qkv_rope_write";
  const Arg qkv(qkv_object, "qkv"), k_cache(k_cache_object, "k_cache"), v_cache(v_cache_object, "v_cache"), slots(slot_object, "slot_mapping");
  const int64_t stride = (q_heads + 2 * kv_heads) * head_dim;
  if (!qkv.is_float() || !qkv.is_cpu() || qkv.dim() != 2 || qkv.size(1) != stride || !qkv.contiguous() || q_heads < 1 || kv_heads < 1 || head_dim < 1) {
    refuse(kernel, "qkv must be contiguous float32 or bfloat16 (T, (" + std::to_string(q_heads) + " + 2 * " + std::to_string(kv_heads) + ") * " + std::to_string(head_dim) + ")", {&qkv});
  }
  const int64_t tokens = qkv.size(0);
  const CacheView cache = cache_view(kernel, k_cache, v_cache, layout);
  require(cache.kv_heads == kv_heads && cache.k.dim == head_dim && cache.v.dim == head_dim, kernel,
          "the caches must have kv_heads heads of head_dim in the given layout", {&k_cache, &v_cache});
  const std::optional<Arg> q_norm = optional_arg(q_norm_object, "q_norm"), k_norm = optional_arg(k_norm_object, "k_norm");
  for (const std::optional<Arg>* weight : {&q_norm, &k_norm}) {
    require(!*weight || ((*weight)->kind() == qkv.kind() && (*weight)->has_shape({head_dim}) && (*weight)->contiguous() && (*weight)->is_cpu()), kernel,
            "q_norm and k_norm must be contiguous (head_dim,) of qkv's type", {&qkv, pointer(q_norm), pointer(k_norm)});
  }
  RopeArgs args = rope_args(kernel, tokens, Arg(positions, "positions"), Arg(cos_sin, "cos_sin"), head_dim, interleaved, qkv.dtype());
  args.slots = slot_address(kernel, slots, tokens);
  py::object out_object = qkv.make({tokens, q_heads, head_dim});
  args.q = qkv.data();
  args.k = qkv.data<char>() + q_heads * head_dim * qkv.element();
  args.v = qkv.data<char>() + (q_heads + kv_heads) * head_dim * qkv.element();
  args.q_stride = args.k_stride = args.v_stride = stride;
  args.q_out = Arg(out_object, "out").data();
  args.q_out_stride = q_heads * head_dim;
  args.q_heads = q_heads;
  args.kv_heads = kv_heads;
  args.q_norm = q_norm ? q_norm->data() : nullptr;
  args.k_norm = k_norm ? k_norm->data() : nullptr;
  args.eps = eps;
  args.write_cache = true;
  args.cache = cache;
  const py::gil_scoped_release release;
  self.rope(args, tokens);
  return out_object;
}

// ---- activation, embedding, sampling ----

template <Activation A>
py::object gated(Runtime& self, py::handle gate_up_object) {
  constexpr const char* kernel = A == Activation::kSilu ? "activation.silu_and_mul" : "activation.gelu_tanh_and_mul";
  const Arg gate_up(gate_up_object, "gate_up");
  const int64_t last = gate_up.dim() - 1;
  require(gate_up.is_float() && gate_up.is_cpu() && gate_up.contiguous() && last >= 0 && gate_up.size(last) % 2 == 0 && gate_up.size(last) > 0, kernel,
          "gate_up must be contiguous float32 or bfloat16 (..., 2 I) on the CPU", {&gate_up});
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < last; ++i) shape.push_back(gate_up.size(i));
  const int64_t width = gate_up.size(last) / 2, rows = gate_up.numel() / (2 * width);
  shape.push_back(width);
  py::object out_object = gate_up.make(shape.data(), static_cast<int32_t>(shape.size()));
  void* out = Arg(out_object, "out").data();
  const py::gil_scoped_release release;
  self.gated(gate_up.data(), out, rows, width, gate_up.dtype(), A);
  return out_object;
}

py::object lookup(Runtime& self, py::handle ids_object, py::handle weight_object) {
  const Arg ids(ids_object, "ids"), weight(weight_object, "weight");
  require((ids.kind() == Kind::kInt32 || ids.kind() == Kind::kInt64) && ids.dim() == 1 && ids.contiguous() && ids.is_cpu(), "embedding.lookup",
          "ids must be contiguous int32 or int64 (T,)", {&ids});
  require(weight.is_float() && weight.dim() == 2 && weight.contiguous() && weight.is_cpu(), "embedding.lookup",
          "weight must be contiguous float32 or bfloat16 (V, H) on the CPU", {&weight});
  const int64_t count = ids.size(0), hidden = weight.size(1);
  py::object out_object = weight.make({count, hidden});
  void* out = Arg(out_object, "out").data();
  const py::gil_scoped_release release;
  self.lookup(ids.data(), ids.kind() == Kind::kInt64, count, weight.data(), weight.size(0), hidden * weight.element(), out);
  return out_object;
}

py::object argmax(Runtime& self, py::handle logits_object) {
  const Arg logits(logits_object, "logits");
  require(logits.is_float() && logits.dim() == 2 && logits.is_cpu() && logits.size(1) > 0 && logits.contiguous(1), "sampling.argmax",
          "logits must be float32 or bfloat16 (R, V > 0) on the CPU, contiguous along V", {&logits});
  const int64_t rows = logits.size(0);
  py::object out_object = make_int64(rows);
  int64_t* out = Arg(out_object, "out").data<int64_t>();
  const py::gil_scoped_release release;
  self.argmax(logits.data(), rows, logits.stride(0), logits.size(1), logits.dtype(), out);
  return out_object;
}

// ---- attention ----

AttentionCall attention_call(const char* kernel, const Arg& q, const Arg& k_cache, const Arg& v_cache, const Arg& table, const Arg& lens,
                             float scale, const std::string& layout, int64_t window, float softcap, const std::optional<Arg>& sinks) {
  const CacheView cache = cache_view(kernel, k_cache, v_cache, layout);
  require(q.is_float() && q.is_cpu() && q.dim() == 3 && q.contiguous() && q.size(2) == cache.k.dim && q.size(1) > 0 && cache.kv_heads > 0 &&
              q.size(1) % cache.kv_heads == 0,
          kernel, "q must be contiguous float32 or bfloat16 (T, Hq, D) with a multiple of the cache's heads and its head size", {&q, &k_cache});
  require(lens.kind() == Kind::kInt32 && lens.dim() == 1 && lens.contiguous() && lens.is_cpu(), kernel, "seq_lens must be contiguous int32 (R,)", {&lens});
  require(table.kind() == Kind::kInt32 && table.dim() == 2 && table.size(0) == lens.size(0) && table.contiguous(1) && table.is_cpu(), kernel,
          "page_table must be int32 (R, P) with contiguous rows, R as in seq_lens", {&table, &lens});
  if (window < 0 || softcap < 0.0f) {
    throw py::value_error(std::string(kernel) + ": window (" + std::to_string(window) + ") and softcap (" + std::to_string(softcap) + ") must not be negative; 0 turns them off");
  }
  require(!sinks || (sinks->kind() == Kind::kFloat32 && sinks->has_shape({q.size(1)}) && sinks->contiguous() && sinks->is_cpu()), kernel,
          "sinks must be contiguous float32 (Hq,)", {pointer(sinks), &q});
  return {q.data(), nullptr, q.dtype(), q.size(1), cache, table.data<int32_t>(), table.stride(0), table.size(1), lens.data<int32_t>(), lens.size(0),
          scale, window, softcap, sinks ? sinks->data<float>() : nullptr};
}

// int32 (n, 4) on the host, as a tensor or through the buffer protocol (numpy).
struct Intervals {
  explicit Intervals(py::handle object) {
    if (object.is_none()) return;
    constexpr const char* rule = "attention.decode: prefix_intervals must be contiguous int32 (n, 4): row_begin, row_end, first page index, pages";
    if (PyObject_CheckBuffer(object.ptr()) != 0) {
      buffer = py::reinterpret_borrow<py::buffer>(object).request();
      const bool contiguous = buffer.ndim == 2 && (buffer.shape[0] <= 1 || buffer.strides[0] == 16) && buffer.strides[1] == 4;
      if (!contiguous || buffer.shape[1] != 4 || !buffer.item_type_is_equivalent_to<int32_t>()) throw py::value_error(rule);
      data = static_cast<const int32_t*>(buffer.ptr);
      count = buffer.shape[0];
      return;
    }
    const Arg tensor(object, "prefix_intervals");
    if (tensor.kind() != Kind::kInt32 || tensor.dim() != 2 || tensor.size(1) != 4 || !tensor.contiguous() || !tensor.is_cpu()) throw py::value_error(rule);
    data = tensor.data<int32_t>();
    count = tensor.size(0);
  }

  py::buffer_info buffer;
  const int32_t* data = nullptr;
  int64_t count = 0;
};

py::object decode(Runtime& self, py::handle q_object, py::handle k_cache, py::handle v_cache, py::handle page_table, py::handle seq_lens,
                  int64_t width, float scale, const std::string& layout, int64_t window, float softcap, py::handle sinks_object,
                  py::handle prefix_intervals) {
  constexpr const char* kernel = "attention.decode";
  const Arg q(q_object, "q"), v(v_cache, "v_cache"), lens(seq_lens, "seq_lens");
  const std::optional<Arg> sinks = optional_arg(sinks_object, "sinks");
  AttentionCall call = attention_call(kernel, q, Arg(k_cache, "k_cache"), v, Arg(page_table, "page_table"), lens, scale, layout, window, softcap, sinks);
  if (width < 1 || q.size(0) != call.rows * width) refuse(kernel, "q must have " + std::to_string(width) + " query tokens for each row of seq_lens", {&q, &lens});
  const Intervals intervals(prefix_intervals);
  py::object out_object = q.make({q.size(0), q.size(1), call.cache.v.dim});
  call.out = Arg(out_object, "out").data();
  const py::gil_scoped_release release;
  self.decode(call, width, intervals.data, intervals.count);
  return out_object;
}

py::object extend(Runtime& self, py::handle q_object, py::handle k_cache, py::handle v_cache, py::handle page_table, py::handle seq_lens,
                  py::handle start_object, float scale, const std::string& layout, int64_t window, float softcap, py::handle sinks_object) {
  constexpr const char* kernel = "attention.extend";
  const Arg q(q_object, "q"), v(v_cache, "v_cache"), lens(seq_lens, "seq_lens"), start(start_object, "query_start");
  const std::optional<Arg> sinks = optional_arg(sinks_object, "sinks");
  AttentionCall call = attention_call(kernel, q, Arg(k_cache, "k_cache"), v, Arg(page_table, "page_table"), lens, scale, layout, window, softcap, sinks);
  require(start.kind() == Kind::kInt32 && start.has_shape({call.rows + 1}) && start.contiguous() && start.is_cpu(), kernel,
          "query_start must be contiguous int32 (R + 1,)", {&start, &lens});
  py::object out_object = q.make({q.size(0), q.size(1), call.cache.v.dim});
  call.out = Arg(out_object, "out").data();
  const py::gil_scoped_release release;
  self.extend(call, start.data<int32_t>(), q.size(0));
  return out_object;
}

}  // namespace
}  // namespace tokenspeed::cpu

PYBIND11_MODULE(_native, m) {
  using namespace tokenspeed::cpu;
  load_exchange_table();
  m.doc() = "CPU kernels over one thread pool.";
  m.def("supported_isas", &supported_isas);
  const py::none none;
  py::class_<Runtime>(m, "Runtime")
      .def(py::init<int, const std::string&>(), py::arg("num_threads"), py::arg("isa") = "")
      .def_property_readonly("num_threads", &Runtime::num_threads)
      .def_property_readonly("isa", &Runtime::isa)
      .def("linear", &linear, py::arg("x"), py::arg("weight"), py::arg("bias") = none, py::arg("out") = none)
      .def("linear_silu_mul", &linear_silu_mul, py::arg("x"), py::arg("weight"), py::arg("bias") = none, py::arg("out") = none)
      .def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"))
      .def("add_rms_norm", &add_rms_norm, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("eps"))
      .def("rotate", &rotate, py::arg("q"), py::arg("k"), py::arg("positions"), py::arg("cos_sin"), py::arg("head_dim"), py::arg("interleaved") = false)
      .def("qkv_rope_write", &qkv_rope_write, py::arg("qkv"), py::arg("positions"), py::arg("cos_sin"), py::arg("q_heads"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("k_cache"), py::arg("v_cache"), py::arg("slot_mapping"), py::arg("layout"), py::arg("q_norm") = none,
           py::arg("k_norm") = none, py::arg("eps") = 1e-6f, py::arg("interleaved") = false)
      .def("silu_and_mul", &gated<Activation::kSilu>, py::arg("gate_up"))
      .def("gelu_tanh_and_mul", &gated<Activation::kGeluTanh>, py::arg("gate_up"))
      .def("lookup", &lookup, py::arg("ids"), py::arg("weight"))
      .def("write", &write_cache, py::arg("k"), py::arg("v"), py::arg("k_cache"), py::arg("v_cache"), py::arg("slot_mapping"), py::arg("layout"))
      .def("decode", &decode, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("page_table"), py::arg("seq_lens"), py::arg("width"),
           py::arg("scale"), py::arg("layout"), py::arg("window") = 0, py::arg("softcap") = 0.0f, py::arg("sinks") = none,
           py::arg("prefix_intervals") = none)
      .def("extend", &extend, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("page_table"), py::arg("seq_lens"),
           py::arg("query_start"), py::arg("scale"), py::arg("layout"), py::arg("window") = 0, py::arg("softcap") = 0.0f, py::arg("sinks") = none)
      .def("argmax", &argmax, py::arg("logits"));
}
