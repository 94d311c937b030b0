#include <pybind11/native_enum.h>

#include <stdexcept>
#include <string>

#include "bindings/bindings.h"

namespace tokenspeed::bindings {
namespace {

const ExecutionPlan& Read(const PlanHandle& handle) {
  if (handle.plan->plan_id == handle.plan_id) return *handle.plan;
  throw std::runtime_error("plan " + std::to_string(handle.plan_id) + " is no longer readable: the plan after next was taken");
}

template <class T>
auto View(Column<T> ExecutionPlan::* column) {
  return [column](const PlanHandle& handle) { return ViewOf(Read(handle).*column); };
}

template <class T>
auto View(TransferColumns ExecutionPlan::* transfers, Column<T> TransferColumns::* column) {
  return [=](const PlanHandle& handle) { return ViewOf((Read(handle).*transfers).*column); };
}

auto Hashes(TransferColumns ExecutionPlan::* transfers) {
  return [=](const PlanHandle& handle) -> py::array {
    const Column<PageHash>& hashes = (Read(handle).*transfers).hash;
    static_assert(sizeof(PageHash) == 16);
    if (hashes.empty()) return py::array_t<uint8_t>(std::vector<py::ssize_t>{0, 16});
    auto* block = new std::shared_ptr<PageHash[]>(hashes.block());
    py::capsule owner(block, [](void* held) { delete static_cast<std::shared_ptr<PageHash[]>*>(held); });
    py::array_t<uint8_t> view(std::vector<py::ssize_t>{static_cast<py::ssize_t>(hashes.size()), 16},
                              reinterpret_cast<const uint8_t*>(hashes.data()), owner);
    py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return view;
  };
}

py::array Intervals(const PlanHandle& handle) {
  const Column<PrefixInterval>& intervals = Read(handle).prefix_intervals;
  static_assert(sizeof(PrefixInterval) == 4 * sizeof(int32_t));
  if (intervals.empty()) return py::array_t<int32_t>(std::vector<py::ssize_t>{0, 4});
  auto* block = new std::shared_ptr<PrefixInterval[]>(intervals.block());
  py::capsule owner(block, [](void* held) { delete static_cast<std::shared_ptr<PrefixInterval[]>*>(held); });
  py::array_t<int32_t> view(std::vector<py::ssize_t>{static_cast<py::ssize_t>(intervals.size()), 4},
                            reinterpret_cast<const int32_t*>(intervals.data()), owner);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

}  // namespace

void BindPlan(py::module_& module) {
  py::native_enum<ForwardMode>(module, "ForwardMode", "enum.IntEnum", "What kinds of rows a plan has.")
      .value("IDLE", ForwardMode::kIdle)
      .value("EXTEND", ForwardMode::kExtend)
      .value("DECODE", ForwardMode::kDecode)
      .value("MIXED", ForwardMode::kMixed)
      .finalize();
  py::native_enum<RowFlags>(module, "RowFlags", "enum.IntFlag", "Flags of a row.")
      .value("SAMPLES", kSamples)
      .value("NEW_IN_SLOT", kNewInSlot)
      .finalize();
  py::native_enum<StateKind>(module, "StateKind", "enum.IntEnum", "What is done to a recurrent group's state before the forward.")
      .value("ZERO", StateKind::kZero)
      .value("COPY", StateKind::kCopy)
      .finalize();

  py::class_<PlanHandle>(module, "ExecutionPlan",
                         "What one step computes. Arrays are read-only views, valid until the plan after next is taken and while it is in flight.")
      .def_readonly("plan_id", &PlanHandle::plan_id)
      .def_property_readonly("mode", [](const PlanHandle& handle) { return Read(handle).mode; })
      .def_property_readonly("num_rows", [](const PlanHandle& handle) { return Read(handle).num_rows(); })
      .def_property_readonly("num_extend_rows", [](const PlanHandle& handle) { return Read(handle).num_extend_rows; })
      .def_property_readonly("num_tokens", [](const PlanHandle& handle) { return Read(handle).num_tokens(); })
      .def_property_readonly("request_ids", View(&ExecutionPlan::request_ids))
      .def_property_readonly("slots", View(&ExecutionPlan::slots))
      .def_property_readonly("context_lens", View(&ExecutionPlan::context_lens))
      .def_property_readonly("query_lens", View(&ExecutionPlan::query_lens))
      .def_property_readonly("input_ids", View(&ExecutionPlan::input_ids))
      .def_property_readonly("flags", View(&ExecutionPlan::flags))
      .def_property_readonly("output_lens", View(&ExecutionPlan::output_lens))
      .def_property_readonly("delta_group", View(&ExecutionPlan::delta_group))
      .def_property_readonly("delta_slot", View(&ExecutionPlan::delta_slot))
      .def_property_readonly("delta_index", View(&ExecutionPlan::delta_index))
      .def_property_readonly("delta_page", View(&ExecutionPlan::delta_page))
      .def_property_readonly("state_kind", View(&ExecutionPlan::state_kind))
      .def_property_readonly("state_group", View(&ExecutionPlan::state_group))
      .def_property_readonly("state_source", View(&ExecutionPlan::state_source))
      .def_property_readonly("state_target", View(&ExecutionPlan::state_target))
      .def_property_readonly("prefix_intervals", &Intervals)
      .def_property_readonly("retracted_ids", View(&ExecutionPlan::retracted_ids))
      .def_property_readonly("finished_ids", View(&ExecutionPlan::finished_ids))
      .def_property_readonly("finished_reasons", View(&ExecutionPlan::finished_reasons))
      .def_property_readonly("num_transfers",
                             [](const PlanHandle& handle) {
                               const ExecutionPlan& plan = Read(handle);
                               return plan.write_back.op.size() + plan.load_back.op.size() + plan.lookup.op.size() + plan.prefetch.op.size() +
                                      plan.store.op.size();
                             })
      .def_property_readonly("write_back_op", View(&ExecutionPlan::write_back, &TransferColumns::op))
      .def_property_readonly("write_back_group", View(&ExecutionPlan::write_back, &TransferColumns::group))
      .def_property_readonly("write_back_device", View(&ExecutionPlan::write_back, &TransferColumns::device))
      .def_property_readonly("write_back_host", View(&ExecutionPlan::write_back, &TransferColumns::host))
      .def_property_readonly("load_back_op", View(&ExecutionPlan::load_back, &TransferColumns::op))
      .def_property_readonly("load_back_group", View(&ExecutionPlan::load_back, &TransferColumns::group))
      .def_property_readonly("load_back_host", View(&ExecutionPlan::load_back, &TransferColumns::host))
      .def_property_readonly("load_back_device", View(&ExecutionPlan::load_back, &TransferColumns::device))
      .def_property_readonly("load_back_row", View(&ExecutionPlan::load_back, &TransferColumns::row))
      .def_property_readonly("lookup_op", View(&ExecutionPlan::lookup, &TransferColumns::op))
      .def_property_readonly("lookup_group", View(&ExecutionPlan::lookup, &TransferColumns::group))
      .def_property_readonly("lookup_hash", Hashes(&ExecutionPlan::lookup))
      .def_property_readonly("prefetch_op", View(&ExecutionPlan::prefetch, &TransferColumns::op))
      .def_property_readonly("prefetch_group", View(&ExecutionPlan::prefetch, &TransferColumns::group))
      .def_property_readonly("prefetch_host", View(&ExecutionPlan::prefetch, &TransferColumns::host))
      .def_property_readonly("prefetch_hash", Hashes(&ExecutionPlan::prefetch))
      .def_property_readonly("store_op", View(&ExecutionPlan::store, &TransferColumns::op))
      .def_property_readonly("store_group", View(&ExecutionPlan::store, &TransferColumns::group))
      .def_property_readonly("store_host", View(&ExecutionPlan::store, &TransferColumns::host))
      .def_property_readonly("store_hash", Hashes(&ExecutionPlan::store));
}

}  // namespace tokenspeed::bindings
