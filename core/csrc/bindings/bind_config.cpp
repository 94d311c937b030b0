#include <pybind11/native_enum.h>

#include "bindings/bindings.h"

namespace tokenspeed::bindings {

void BindConfig(py::module_& module) {
  py::native_enum<CacheGroupKind>(module, "CacheGroupKind", "enum.IntEnum", "What a cache group keeps.")
      .value("FULL", CacheGroupKind::kFull)
      .value("WINDOW", CacheGroupKind::kWindow)
      .value("RECURRENT", CacheGroupKind::kRecurrent)
      .finalize();
  py::native_enum<AdmissionRule>(module, "AdmissionRule", "enum.IntEnum", "How much output is provided for at admission.")
      .value("EXPECTED_OUTPUT", AdmissionRule::kExpectedOutput)
      .value("WHOLE_OUTPUT", AdmissionRule::kWholeOutput)
      .finalize();
  py::native_enum<RetractionRule>(module, "RetractionRule", "enum.IntEnum", "Whom page pressure strikes first.")
      .value("CHEAPEST_TO_RESTORE", RetractionRule::kCheapestToRestore)
      .value("YOUNGEST", RetractionRule::kYoungest)
      .finalize();

  py::native_enum<WritePolicy>(module, "WritePolicy", "enum.IntEnum", "When a page is copied to the host.")
      .value("THROUGH", WritePolicy::kThrough)
      .value("ON_EVICT", WritePolicy::kOnEvict)
      .value("SELECTIVE", WritePolicy::kSelective)
      .finalize();

  py::class_<CacheGroupConfig>(module, "CacheGroupConfig", "One cache group: pages of page_size tokens, or states that can be kept every page_size tokens.")
      .def(py::init([](int32_t page_size, int32_t num_pages, CacheGroupKind kind, int32_t host_pages, int32_t window) {
             return CacheGroupConfig{page_size, num_pages, kind, host_pages, window};
           }),
           py::kw_only(), py::arg("page_size"), py::arg("num_pages"), py::arg("kind") = CacheGroupKind::kFull, py::arg("host_pages") = 0,
           py::arg("window") = 0)
      .def_readonly("window", &CacheGroupConfig::window)
      .def_readonly("host_pages", &CacheGroupConfig::host_pages)
      .def_readonly("page_size", &CacheGroupConfig::page_size)
      .def_readonly("num_pages", &CacheGroupConfig::num_pages)
      .def_readonly("kind", &CacheGroupConfig::kind);

  const SchedulerConfig defaults;
  py::class_<SchedulerConfig>(module, "SchedulerConfig", "What a scheduler is told once. Raises ValueError naming a bad field.")
      .def(py::init([](std::vector<CacheGroupConfig> groups, int32_t max_num_seqs, int32_t max_batched_tokens, int32_t max_model_len,
                       int32_t max_row_width, int32_t overlap_depth, bool enable_prefix_caching, int64_t max_step_us, int32_t hit_window,
                       int64_t aging_us, int32_t finished_history, AdmissionRule admission, RetractionRule retraction,
                       WritePolicy write_policy, bool l3, int32_t prefetch_threshold, int64_t prefetch_timeout_us, bool kv_events,
                       int32_t retain_percent, std::vector<int32_t> step_sizes) {
             SchedulerConfig config{.groups = std::move(groups),
                                    .max_num_seqs = max_num_seqs,
                                    .max_batched_tokens = max_batched_tokens,
                                    .max_model_len = max_model_len,
                                    .max_row_width = max_row_width,
                                    .overlap_depth = overlap_depth,
                                    .enable_prefix_caching = enable_prefix_caching,
                                    .max_step_us = max_step_us,
                                    .step_sizes = std::move(step_sizes),
                                    .hit_window = hit_window,
                                    .aging_us = aging_us,
                                    .finished_history = finished_history,
                                    .admission = admission,
                                    .retraction = retraction,
                                    .write_policy = write_policy,
                                    .l3 = l3,
                                    .prefetch_threshold = prefetch_threshold,
                                    .prefetch_timeout_us = prefetch_timeout_us,
                                    .kv_events = kv_events,
                                    .retain_percent = retain_percent};
             config.Validate();
             return config;
           }),
           py::kw_only(), py::arg("groups"), py::arg("max_num_seqs"), py::arg("max_batched_tokens"), py::arg("max_model_len"),
           py::arg("max_row_width") = defaults.max_row_width, py::arg("overlap_depth") = defaults.overlap_depth,
           py::arg("enable_prefix_caching") = defaults.enable_prefix_caching, py::arg("max_step_us") = defaults.max_step_us,
           py::arg("hit_window") = defaults.hit_window, py::arg("aging_us") = defaults.aging_us,
           py::arg("finished_history") = defaults.finished_history, py::arg("admission") = defaults.admission,
           py::arg("retraction") = defaults.retraction, py::arg("write_policy") = defaults.write_policy, py::arg("l3") = defaults.l3,
           py::arg("prefetch_threshold") = defaults.prefetch_threshold, py::arg("prefetch_timeout_us") = defaults.prefetch_timeout_us,
           py::arg("kv_events") = defaults.kv_events, py::arg("retain_percent") = defaults.retain_percent,
           py::arg("step_sizes") = defaults.step_sizes)
      .def_readonly("groups", &SchedulerConfig::groups)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_batched_tokens", &SchedulerConfig::max_batched_tokens)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("max_row_width", &SchedulerConfig::max_row_width)
      .def_readonly("overlap_depth", &SchedulerConfig::overlap_depth)
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_readonly("max_step_us", &SchedulerConfig::max_step_us)
      .def_readonly("step_sizes", &SchedulerConfig::step_sizes)
      .def_readonly("hit_window", &SchedulerConfig::hit_window)
      .def_readonly("aging_us", &SchedulerConfig::aging_us)
      .def_readonly("finished_history", &SchedulerConfig::finished_history)
      .def_readonly("admission", &SchedulerConfig::admission)
      .def_readonly("retraction", &SchedulerConfig::retraction)
      .def_readonly("write_policy", &SchedulerConfig::write_policy)
      .def_readonly("l3", &SchedulerConfig::l3)
      .def_readonly("prefetch_threshold", &SchedulerConfig::prefetch_threshold)
      .def_readonly("prefetch_timeout_us", &SchedulerConfig::prefetch_timeout_us)
      .def_readonly("kv_events", &SchedulerConfig::kv_events)
      .def_readonly("retain_percent", &SchedulerConfig::retain_percent)
      .def_property_readonly("max_step_tokens", &SchedulerConfig::max_step_tokens, "No plan has more tokens than this.");
}

}  // namespace tokenspeed::bindings
