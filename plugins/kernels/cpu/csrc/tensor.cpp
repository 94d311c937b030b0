#include "tensor.h"

namespace py = pybind11;

namespace tokenspeed::cpu {

namespace {

struct ManagedTensor;  // opaque here

struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const void* previous;
};
using SetError = void (*)(void* context, const char* kind, const char* message);
struct ExchangeTable {
  ExchangeHeader header;
  int (*allocate)(DLTensor* prototype, ManagedTensor** out, void* error_context, SetError set_error);
  int (*managed_from_object)(void* object, ManagedTensor** out);
  int (*object_from_managed)(ManagedTensor* tensor, void** out);
  int (*view_from_object)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

// Set once at import; read only from then on.
const ExchangeTable* table = nullptr;
PyTypeObject* tensor_type = nullptr;

Kind kind_of(DLDataType type) {
  if (type.lanes != 1) return Kind::kOther;
  if (type.code == 2 && type.bits == 32) return Kind::kFloat32;
  if (type.code == 4 && type.bits == 16) return Kind::kBFloat16;
  if (type.code == 0 && type.bits == 32) return Kind::kInt32;
  if (type.code == 0 && type.bits == 64) return Kind::kInt64;
  return Kind::kOther;
}

py::object allocate(DLTensor prototype) {
  ManagedTensor* made = nullptr;
  std::string problem;
  const int failed = table->allocate(&prototype, &made, &problem, [](void* context, const char* kind, const char* message) {
    *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
  });
  if (failed != 0) throw std::runtime_error("cannot allocate a result: " + problem);
  void* object = nullptr;
  if (table->object_from_managed(made, &object) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace

void load_exchange_table() {
  const py::object type = py::module_::import("torch").attr("Tensor");
  if (!py::hasattr(type, "__dlpack_c_exchange_api__")) {
    throw py::import_error("tokenspeed-plugin-kernels-cpu needs a torch whose Tensor has __dlpack_c_exchange_api__ (2.10 or later)");
  }
  const py::object capsule = type.attr("__dlpack_c_exchange_api__");
  const void* found = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (found == nullptr) throw py::error_already_set();
  table = static_cast<const ExchangeTable*>(found);
  if (table->header.major != 1 || table->view_from_object == nullptr) {
    throw py::import_error("this torch's DLPack exchange table is of another major version, or cannot view tensors; use torch 2.10 to 2.x");
  }
  tensor_type = reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr());  // kept for the life of the process
}

Arg::Arg(py::handle object, const char* name) : name_(name) {
  if (!PyObject_TypeCheck(object.ptr(), tensor_type)) [[unlikely]] {
    throw py::type_error(std::string(name) + " must be a tensor, not " + Py_TYPE(object.ptr())->tp_name);
  }
  if (table->view_from_object(object.ptr(), &tensor_) != 0) throw py::error_already_set();
  kind_ = kind_of(tensor_.dtype);
}

int64_t Arg::numel() const {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor_.ndim; ++i) count *= tensor_.shape[i];
  return count;
}

bool Arg::contiguous(int64_t first) const {
  int64_t expected = 1;
  for (int64_t i = tensor_.ndim - 1; i >= first; --i) {
    if (tensor_.shape[i] == 0) return true;
    if (tensor_.shape[i] != 1 && tensor_.strides[i] != expected) return false;
    expected *= tensor_.shape[i];
  }
  return true;
}

bool Arg::has_shape(std::initializer_list<int64_t> shape) const {
  if (static_cast<int64_t>(shape.size()) != tensor_.ndim) return false;
  int64_t i = 0;
  for (const int64_t size : shape) {
    if (tensor_.shape[i++] != size) return false;
  }
  return true;
}

std::string Arg::describe() const {
  const auto list = [this](const int64_t* values) {
    std::string text = "(";
    for (int32_t i = 0; i < tensor_.ndim; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    return text + (tensor_.ndim == 1 ? ",)" : ")");
  };
  static constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string type = (tensor_.dtype.code < 7 ? kNames[tensor_.dtype.code] : "type ") + std::to_string(tensor_.dtype.bits);
  return std::string(name_) + " is " + type + " " + list(tensor_.shape) + " with strides " + list(tensor_.strides) +
         (is_cpu() ? "" : " on another device");
}

py::object Arg::make(const int64_t* shape, int32_t dim) const {
  DLTensor prototype = tensor_;
  prototype.device = {1, 0};
  prototype.shape = const_cast<int64_t*>(shape);  // the table's functions read it only
  prototype.strides = nullptr;
  prototype.ndim = dim;
  return allocate(prototype);
}

py::object make_int64(int64_t count) { return allocate({nullptr, {1, 0}, 1, {0, 64, 1}, &count, nullptr, 0}); }

void refuse(const char* kernel, const std::string& rule, std::initializer_list<const Arg*> given) {
  std::string text = std::string(kernel) + ": " + rule;
  const char* separator = ". Given: ";
  for (const Arg* arg : given) {
    if (arg == nullptr) continue;
    text += separator + arg->describe();
    separator = "; ";
  }
  throw py::value_error(text);
}

}  // namespace tokenspeed::cpu
