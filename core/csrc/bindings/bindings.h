// The only part that knows Python. One function a file registers one family of classes.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "scheduler/scheduler.h"
#include "support/column.h"

namespace tokenspeed::bindings {

namespace py = pybind11;

// No silent narrowing: an int64 array is refused, a list of ints is converted.
using Int32Array = py::array_t<int32_t, py::array::c_style>;

using Int64Array = py::array_t<int64_t, py::array::c_style>;

inline std::span<const int64_t> SpanOf(const Int64Array& array) { return {array.data(), static_cast<size_t>(array.size())}; }
inline std::span<const int32_t> SpanOf(const Int32Array& array) { return {array.data(), static_cast<size_t>(array.size())}; }

// A scheduler that Python threads share: each call holds the lock, and none holds it together with the GIL.
struct SharedScheduler {
  explicit SharedScheduler(SchedulerConfig config) : scheduler(std::move(config)) {}
  std::mutex mutex;
  Scheduler scheduler;

  // Runs `call` on the scheduler without the GIL.
  template <class Call>
  auto Locked(Call&& call) {
    py::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex);
    return call(scheduler);
  }
};

// A plan as Python holds it. It keeps the scheduler alive and refuses to be read after the plan after next was taken.
struct PlanHandle {
  std::shared_ptr<SharedScheduler> owner;
  const ExecutionPlan* plan;
  int64_t plan_id;
};

// A read-only view of a column, which keeps the column's memory alive.
template <class T>
py::array ViewOf(const Column<T>& column) {
  if (column.empty()) return py::array_t<T>(0);
  auto* block = new std::shared_ptr<T[]>(column.block());
  py::capsule owner(block, [](void* held) { delete static_cast<std::shared_ptr<T[]>*>(held); });
  py::array_t<T> view(static_cast<py::ssize_t>(column.size()), column.data(), owner);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

// (hashes, 16) uint8.
template <class Hashes>
py::array_t<uint8_t> CopyOfHashes(const Hashes& hashes) {
  py::array_t<uint8_t> result(std::vector<py::ssize_t>{static_cast<py::ssize_t>(hashes.size()), 16});
  if (hashes.size() != 0) std::memcpy(result.mutable_data(), hashes.data(), hashes.size() * sizeof(PageHash));
  return result;
}

template <class T>
py::array_t<T> CopyOf(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void BindConfig(py::module_& module);
void BindRequests(py::module_& module);
void BindPlan(py::module_& module);
void BindScheduler(py::module_& module);

}  // namespace tokenspeed::bindings
