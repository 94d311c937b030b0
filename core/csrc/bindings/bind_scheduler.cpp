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
  return CopyOfHashes(hashes);
}

void CacheDone(const SharedPtr& self, const Int64Array& op_ids, const Int32Array& pages) {
  const auto ids_span = SpanOf(op_ids);
  const auto pages_span = SpanOf(pages);
  self->Locked([&](Scheduler& scheduler) { scheduler.CacheDone(ids_span, pages_span); });
}

}  // namespace

void BindScheduler(py::module_& module) {
  py::class_<AdvanceResult>(module, "AdvanceResult", "What the results of a step ended and refused.")
      .def_property_readonly("finished_ids", [](const AdvanceResult& result) { return CopyOf(result.finished_ids); })
      .def_property_readonly("finished_reasons", [](const AdvanceResult& result) { return CopyOf(result.finished_reasons); })
      .def_property_readonly("row_refusals", [](const AdvanceResult& result) { return CopyOf(result.row_refusals); });

  py::class_<KvEvents>(module, "KvEvents", "What entered and left each tier, in order of mutation.")
      .def_property_readonly("kind", [](const KvEvents& events) { return CopyOf(events.kind); })
      .def_property_readonly("medium", [](const KvEvents& events) { return CopyOf(events.medium); })
      .def_property_readonly("group", [](const KvEvents& events) { return CopyOf(events.group); })
      .def_property_readonly("depth", [](const KvEvents& events) { return CopyOf(events.depth); })
      .def_property_readonly("hash", [](const KvEvents& events) { return CopyOfHashes(events.hash); })
      .def_property_readonly("parent", [](const KvEvents& events) { return CopyOfHashes(events.parent); })
      .def_property_readonly("adapter", [](const KvEvents& events) { return CopyOf(events.adapter); })
      .def_property_readonly("token_counts", [](const KvEvents& events) { return CopyOf(events.token_counts); })
      .def_property_readonly("tokens", [](const KvEvents& events) { return CopyOf(events.tokens); });

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
      .def_readonly("plans", &SchedulerStats::plans)
      .def_readonly("host_pages_total", &SchedulerStats::host_pages_total)
      .def_readonly("host_pages_free", &SchedulerStats::host_pages_free)
      .def_readonly("host_pages_cached", &SchedulerStats::host_pages_cached)
      .def_readonly("host_pages_moving", &SchedulerStats::host_pages_moving)
      .def_readonly("prefetching", &SchedulerStats::prefetching)
      .def_readonly("writing_back", &SchedulerStats::writing_back)
      .def_readonly("cache_ops_in_flight", &SchedulerStats::cache_ops_in_flight)
      .def_readonly("cache_ops_pending", &SchedulerStats::cache_ops_pending)
      .def_readonly("sessions", &SchedulerStats::sessions)
      .def_readonly("retained_pages", &SchedulerStats::retained_pages)
      .def_readonly("host_hit_tokens", &SchedulerStats::host_hit_tokens)
      .def_readonly("storage_hit_tokens", &SchedulerStats::storage_hit_tokens)
      .def_readonly("pages_written_back", &SchedulerStats::pages_written_back)
      .def_readonly("pages_loaded_back", &SchedulerStats::pages_loaded_back)
      .def_readonly("pages_prefetched", &SchedulerStats::pages_prefetched)
      .def_readonly("pages_stored", &SchedulerStats::pages_stored)
      .def_readonly("write_backs_failed", &SchedulerStats::write_backs_failed)
      .def_readonly("load_backs_failed", &SchedulerStats::load_backs_failed)
      .def_readonly("prefetches_failed", &SchedulerStats::prefetches_failed)
      .def_readonly("stores_failed", &SchedulerStats::stores_failed)
      .def_readonly("host_evicted_pages", &SchedulerStats::host_evicted_pages)
      .def_readonly("host_full", &SchedulerStats::host_full)
      .def_readonly("lookups", &SchedulerStats::lookups)
      .def_readonly("lookup_hits", &SchedulerStats::lookup_hits)
      .def_readonly("prefetch_timeouts", &SchedulerStats::prefetch_timeouts)
      .def_property_readonly("hits_cut", [](const SchedulerStats& stats) { return std::vector<int64_t>(stats.hits_cut.begin(), stats.hits_cut.end()); })
      .def_readonly("reloads", &SchedulerStats::reloads);

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
      .def("cache_done", &CacheDone, py::arg("op_ids"), py::arg("pages"))
      .def(
          "prefetch_session",
          [](const SharedPtr& self, int64_t session, int64_t now_us) {
            return self->Locked([&](Scheduler& scheduler) { return scheduler.PrefetchSession(session, now_us); });
          },
          py::arg("session"), py::arg("now_us"))
      .def(
          "release_session",
          [](const SharedPtr& self, int64_t session) {
            return self->Locked([&](Scheduler& scheduler) { return scheduler.ReleaseSession(session); });
          },
          py::arg("session"))
      .def("drain_kv_events",
           [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.DrainKvEvents(); }); })
      .def_property_readonly(
          "cache_ops_in_flight",
          [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.cache_ops_in_flight(); }); })
      .def_property_readonly(
          "cache_ops_pending",
          [](const SharedPtr& self) { return self->Locked([](Scheduler& scheduler) { return scheduler.cache_ops_pending(); }); })
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
