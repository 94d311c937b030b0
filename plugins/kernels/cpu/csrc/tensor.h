// Tensors as the kernels' arguments: read and made through the DLPack exchange table of torch's tensor type (DLPack 1.3, a
// stable C interface), which costs a tenth of asking a tensor for its sizes and address from Python. No torch headers.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernel_table.h"

namespace tokenspeed::cpu {

// The part of DLPack's binary interface that is used here, by its own names.
struct DLDevice {
  int32_t device_type;  // 1: CPU
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;  // 0 signed, 2 float, 4 bfloat
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

enum class Kind { kFloat32, kBFloat16, kInt32, kInt64, kOther };

// A borrowed view of a tensor argument, valid while the Python object lives.
class Arg {
 public:
  // Throws TypeError where `object` is not a tensor. `name` is the parameter's and must outlive this.
  Arg(pybind11::handle object, const char* name);

  const char* name() const { return name_; }
  Kind kind() const { return kind_; }
  bool is_float() const { return kind_ == Kind::kFloat32 || kind_ == Kind::kBFloat16; }
  bool is_cpu() const { return tensor_.device.device_type == 1; }
  DType dtype() const { return kind_ == Kind::kBFloat16 ? DType::kBFloat16 : DType::kFloat32; }
  int64_t element() const { return tensor_.dtype.bits / 8; }
  int64_t dim() const { return tensor_.ndim; }
  int64_t size(int64_t i) const { return tensor_.shape[i]; }
  int64_t stride(int64_t i) const { return tensor_.strides[i]; }
  int64_t numel() const;
  // Contiguous from axis `first` on (axes of size 1 do not matter).
  bool contiguous(int64_t first = 0) const;
  bool has_shape(std::initializer_list<int64_t> shape) const;

  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }

  std::string describe() const;
  // A new contiguous tensor of this one's type on the CPU.
  pybind11::object make(std::initializer_list<int64_t> shape) const { return make(shape.begin(), static_cast<int32_t>(shape.size())); }
  pybind11::object make(const int64_t* shape, int32_t dim) const;
  pybind11::object make_like() const { return make(tensor_.shape, tensor_.ndim); }

 private:
  DLTensor tensor_;
  const char* name_;
  Kind kind_;
};

// Reads torch's exchange table. Called once, when the extension is imported.
void load_exchange_table();

// A new int64 tensor (count).
pybind11::object make_int64(int64_t count);

// Throws ValueError: "<kernel>: <rule>. Given: <what the tensors are>".
[[noreturn]] void refuse(const char* kernel, const std::string& rule, std::initializer_list<const Arg*> given);

inline void require(bool holds, const char* kernel, const char* rule, std::initializer_list<const Arg*> given) {
  if (!holds) [[unlikely]] refuse(kernel, rule, given);
}

}  // namespace tokenspeed::cpu
