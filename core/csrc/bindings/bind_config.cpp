#include <pybind11/native_enum.h>

#include "bindings/bindings.h"

namespace tokenspeed::bindings {

void BindConfig(py::module_& module) {
  py::native_enum<CacheGroupKind>(module, "CacheGroupKind", "enum.IntEnum", "What a cache group keeps.")
      .value("FULL", CacheGroupKind::kFull)
      .finalize();
  py::native_enum<AdmissionRule>(module, "AdmissionRule", "enum.IntEnum", "How much output is provided for at admission.")
      .value("EXPECTED_OUTPUT", AdmissionRule::kExpectedOutput)
      .value("WHOLE_OUTPUT", AdmissionRule::kWholeOutput)
      .finalize();
  py::native_enum<RetractionRule>(module, "RetractionRule", "enum.IntEnum", "Whom page pressure strikes first.")
      .value("CHEAPEST_TO_RESTORE", RetractionRule::kCheapestToRestore)
      .value("YOUNGEST", RetractionRule::kYoungest)
      .finalize();

  py::class_<CacheGroupConfig>(module, "CacheGroupConfig", "One cache group: pages of page_size tokens.")
      .def(py::init([](int32_t page_size, int32_t num_pages, CacheGroupKind kind) { return CacheGroupConfig{page_size, num_pages, kind}; }),
           py::kw_only(), py::arg("page_size"), py::arg("num_pages"), py::arg("kind") = CacheGroupKind::kFull)
      .def_readonly("page_size", &CacheGroupConfig::page_size)
      .def_readonly("num_pages", &CacheGroupConfig::num_pages)
      .def_readonly("kind", &CacheGroupConfig::kind);

  const SchedulerConfig defaults;
  py::class_<SchedulerConfig>(module, "SchedulerConfig", "What a scheduler is told once. Raises ValueError naming a bad field.")
      .def(py::init([](std::vector<CacheGroupConfig> groups, int32_t max_num_seqs, int32_t max_batched_tokens, int32_t max_model_len,
                       int32_t max_row_width, int32_t overlap_depth, bool enable_prefix_caching, int64_t max_step_us, int32_t hit_window,
                       int64_t aging_us, int32_t finished_history, AdmissionRule admission, RetractionRule retraction) {
             SchedulerConfig config{std::move(groups), max_num_seqs, max_batched_tokens, max_model_len, max_row_width,
                                    overlap_depth,     enable_prefix_caching, max_step_us, hit_window, aging_us,
                                    finished_history,  admission,    retraction};
             config.Validate();
             return config;
           }),
           py::kw_only(), py::arg("groups"), py::arg("max_num_seqs"), py::arg("max_batched_tokens"), py::arg("max_model_len"),
           py::arg("max_row_width") = defaults.max_row_width, py::arg("overlap_depth") = defaults.overlap_depth,
           py::arg("enable_prefix_caching") = defaults.enable_prefix_caching, py::arg("max_step_us") = defaults.max_step_us,
           py::arg("hit_window") = defaults.hit_window, py::arg("aging_us") = defaults.aging_us,
           py::arg("finished_history") = defaults.finished_history, py::arg("admission") = defaults.admission,
           py::arg("retraction") = defaults.retraction)
      .def_readonly("groups", &SchedulerConfig::groups)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_batched_tokens", &SchedulerConfig::max_batched_tokens)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_readonly("max_row_width", &SchedulerConfig::max_row_width)
      .def_readonly("overlap_depth", &SchedulerConfig::overlap_depth)
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_readonly("max_step_us", &SchedulerConfig::max_step_us)
      .def_readonly("hit_window", &SchedulerConfig::hit_window)
      .def_readonly("aging_us", &SchedulerConfig::aging_us)
      .def_readonly("finished_history", &SchedulerConfig::finished_history)
      .def_readonly("admission", &SchedulerConfig::admission)
      .def_readonly("retraction", &SchedulerConfig::retraction)
      .def_property_readonly("max_step_tokens", &SchedulerConfig::max_step_tokens, "No plan has more tokens than this.");
}

}  // namespace tokenspeed::bindings
