#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"

namespace tokenspeed::bindings {

std::vector<ExtraKey> ExtraKeysFrom(const std::vector<std::pair<int64_t, py::bytes>>& keys);

namespace {

using SharedPtr = std::shared_ptr<SharedScheduler>;

PlanHandle NextExecutionPlan(const SharedPtr& self, int64_t now_us) {
  const ExecutionPlan* plan = self->Locked([&](Scheduler& scheduler) { return &scheduler.NextExecutionPlan(now_us); });
  return {self, plan, plan->plan_id};
}

AdvanceResult Advance(const SharedPtr& self, int64_t plan_id, const Int32Array& counts, const Int32Array& tokens,
                      const Int32Array& outcomes, int64_t step_us) {
  const auto counts_span = SpanOf(counts);
  const auto tokens_span = SpanOf(tokens);
  const auto outcomes_span = SpanOf(outcomes);
  return self->Locked(
      [&](Scheduler& scheduler) { return scheduler.Advance(plan_id, counts_span, tokens_span, outcomes_span, step_us); });
}

py::array_t<uint8_t> CalcRollingHash(const SharedPtr& self, const Int32Array& tokens, const py::bytes& salt,
                                     const std::vector<std::pair<int64_t, py::bytes>>& extra_keys, int64_t adapter) {
  const auto span = SpanOf(tokens);
  const std::string salt_bytes = salt;
  auto keys = ExtraKeysFrom(extra_keys);
  const std::vector<PageHash> hashes =
      self->Locked([&](Scheduler& scheduler) { return scheduler.CalcRollingHash(span, salt_bytes, std::move(keys), adapter); });
  py::array_t<uint8_t> result(std::vector<py::ssize_t>{static_cast<py::ssize_t>(hashes.size()), 16});
  if (!hashes.empty()) std::memcpy(result.mutable_data(), hashes.data(), hashes.size() * sizeof(PageHash));
  return result;
}

}  // namespace

void BindScheduler(py::module_& module) {
  py::class_<AdvanceResult>(module, "AdvanceResult", "What the results of a step ended and refused.")
      .def_property_readonly("finished_ids", [](const AdvanceResult& result) { return CopyOf(result.finished_ids); })
      .def_property_readonly("finished_reasons", [](const AdvanceResult& result) { return CopyOf(result.finished_reasons); })
      .def_property_readonly("row_refusals", [](const AdvanceResult& result) { return CopyOf(result.row_refusals); });

  py::class_<SchedulerStats>(module, "SchedulerStats", "Counts of now, and totals since the start.")
      .def_readonly("waiting", &SchedulerStats::waiting)
      .def_readonly("running", &SchedulerStats::running)
      .def_readonly("leaving", &SchedulerStats::leaving)
      .def_readonly("retracted", &SchedulerStats::retracted)
      .def_readonly("parked", &SchedulerStats::parked)
      .def_readonly("slots_free", &SchedulerStats::slots_free)
      .def_readonly("pages_active", &SchedulerStats::pages_active)
      .def_readonly("pages_cached", &SchedulerStats::pages_cached)
      .def_readonly("pages_free", &SchedulerStats::pages_free)
      .def_readonly("pages_total", &SchedulerStats::pages_total)
      .def_readonly("expected_output", &SchedulerStats::expected_output)
      .def_readonly("context_weight", &SchedulerStats::context_weight)
      .def_readonly("submitted", &SchedulerStats::submitted)
      .def_readonly("refused", &SchedulerStats::refused)
      .def_readonly("finished", &SchedulerStats::finished)
      .def_readonly("aborted", &SchedulerStats::aborted)
      .def_readonly("failed", &SchedulerStats::failed)
      .def_readonly("retractions", &SchedulerStats::retractions)
      .def_readonly("prompt_tokens_queried", &SchedulerStats::prompt_tokens_queried)
      .def_readonly("prefix_hit_tokens", &SchedulerStats::prefix_hit_tokens)
      .def_readonly("prefill_tokens", &SchedulerStats::prefill_tokens)
      .def_readonly("decode_tokens", &SchedulerStats::decode_tokens)
      .def_readonly("evicted_pages", &SchedulerStats::evicted_pages)
      .def_readonly("inflight_waits", &SchedulerStats::inflight_waits)
      .def_readonly("plans", &SchedulerStats::plans);

  py::class_<SharedScheduler, SharedPtr>(module, "Scheduler", "Turns requests into plans, and results into the next state of requests.")
      .def(py::init([](const SchedulerConfig& config) { return std::make_shared<SharedScheduler>(config); }), py::arg("config"))
      .def(
          "submit_requests",
          [](const SharedPtr& self, std::vector<RequestSpec> specs, int64_t now_us) {
            return self->Locked([&](Scheduler& scheduler) { return scheduler.SubmitRequests(std::move(specs), now_us); });
          },
          py::arg("specs"), py::arg("now_us"))
      .def("next_execution_plan", &NextExecutionPlan, py::arg("now_us"))
      .def("advance", &Advance, py::arg("plan_id"), py::arg("counts"), py::arg("tokens"), py::arg("outcomes"), py::arg("step_us") = 0)
      .def(
          "abort",
          [](const SharedPtr& self, int64_t id, FinishReason reason) {
            return self->Locked([&](Scheduler& scheduler) { return scheduler.AbortRequest(id, reason) == AbortRefusal::kNone; });
          },
          py::arg("id"), py::arg("reason") = FinishReason::kAborted)
      .def("calc_rolling_hash", &CalcRollingHash, py::arg("tokens"), py::arg("salt") = py::bytes(),
           py::arg("extra_keys") = std::vector<std::pair<int64_t, py::bytes>>{}, py::arg("adapter") = 0)
      .def("flush_cache", [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.FlushCache(); }); })
      .def("check_integrity", [](const SharedPtr& self) { self->Locked([](Scheduler& scheduler) { scheduler.CheckIntegrity(); }); })
      .def("stats", [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.Stats(); }); })
      .def("request_info", [](const SharedPtr& self, int64_t id) {
        return self->Locked([&](Scheduler& scheduler) { return scheduler.InfoOf(id); });
      }, py::arg("id"))
      .def("has_work", [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.HasWork(); }); })
      .def_property_readonly("num_waiting",
                             [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.NumWaiting(); }); })
      .def_property_readonly("num_running",
                             [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.NumRunning(); }); })
      .def_property_readonly("config", [](const SharedPtr& self) { return self->scheduler.config(); });
}

}  // namespace tokenspeed::bindings
