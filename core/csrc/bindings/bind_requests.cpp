#include <pybind11/native_enum.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"

namespace tokenspeed::bindings {
namespace {

using PyExtraKeys = std::vector<std::pair<int64_t, py::bytes>>;

}  // namespace

std::vector<ExtraKey> ExtraKeysFrom(const std::vector<std::pair<int64_t, py::bytes>>& keys) {
  std::vector<ExtraKey> result;
  result.reserve(keys.size());
  for (const auto& [position, bytes] : keys) {
    const auto view = static_cast<std::string_view>(bytes);
    ExtraKey extra;
    if (view.size() != extra.key.size()) {
      throw std::invalid_argument("extra_keys: the key at position " + std::to_string(position) + " has " + std::to_string(view.size()) +
                                  " bytes; it must have 16");
    }
    extra.position = position;
    std::memcpy(extra.key.data(), view.data(), extra.key.size());
    result.push_back(extra);
  }
  return result;
}

void BindRequests(py::module_& module) {
  py::native_enum<FinishReason>(module, "FinishReason", "enum.IntEnum", "Why a request ended.")
      .value("NONE", FinishReason::kNone)
      .value("STOP", FinishReason::kStop)
      .value("LENGTH", FinishReason::kLength)
      .value("FAILED", FinishReason::kFailed)
      .value("ABORTED", FinishReason::kAborted)
      .finalize();
  py::native_enum<Outcome>(module, "Outcome", "enum.IntEnum", "What the engine says of a row.")
      .value("CONTINUE", Outcome::kContinue)
      .value("FINISH", Outcome::kFinish)
      .value("FAIL", Outcome::kFail)
      .value("RELOAD", Outcome::kReload)
      .finalize();
  py::native_enum<HitCut>(module, "HitCut", "enum.IntEnum", "Why the cache gave a prompt no more than it did, at its first admission.")
      .value("NONE", HitCut::kNone)
      .value("NEW", HitCut::kNew)
      .value("EVICTED", HitCut::kEvicted)
      .value("REUSE_BOUND", HitCut::kReuseBound)
      .value("STORE_TIMEOUT", HitCut::kStoreTimeout)
      .value("LOAD_FAILED", HitCut::kLoadFailed)
      .value("BOUNDARY", HitCut::kBoundary)
      .finalize();
  py::native_enum<RowRefusal>(module, "RowRefusal", "enum.IntEnum", "Why the result of a row was not taken.")
      .value("NONE", RowRefusal::kNone)
      .value("LATE", RowRefusal::kLate)
      .value("BAD_COUNT", RowRefusal::kBadCount)
      .value("BAD_TOKEN", RowRefusal::kBadToken)
      .value("BAD_OUTCOME", RowRefusal::kBadOutcome)
      .finalize();
  py::native_enum<SubmitRefusal>(module, "SubmitRefusal", "enum.IntEnum", "Why a request was not accepted.")
      .value("NONE", SubmitRefusal::kNone)
      .value("DUPLICATE_ID", SubmitRefusal::kDuplicateId)
      .value("EMPTY_PROMPT", SubmitRefusal::kEmptyPrompt)
      .value("BAD_TOKEN", SubmitRefusal::kBadToken)
      .value("BAD_MAX_NEW_TOKENS", SubmitRefusal::kBadMaxNewTokens)
      .value("TOO_LONG", SubmitRefusal::kTooLong)
      .value("NEVER_FITS", SubmitRefusal::kNeverFits)
      .value("BAD_EXTRA_KEY", SubmitRefusal::kBadExtraKey)
      .value("BAD_PRIORITY", SubmitRefusal::kBadPriority)
      .value("BAD_MAX_REUSE", SubmitRefusal::kBadMaxReuse)
      .value("BAD_RETAIN", SubmitRefusal::kBadRetain)
      .finalize();

  py::class_<RequestSpec>(module, "RequestSpec", "A request as it is submitted. Raises ValueError for an extra key that has not 16 bytes.")
      .def(py::init([](int64_t id, const Int32Array& tokens, int64_t max_new_tokens, const py::bytes& salt, const PyExtraKeys& extra_keys,
                       int64_t adapter, int64_t priority, int64_t max_reuse_tokens, int64_t multimodal, int64_t session, int64_t retain_us) {
             const auto span = SpanOf(tokens);
             return RequestSpec{.id = id,
                                .tokens = {span.begin(), span.end()},
                                .max_new_tokens = max_new_tokens,
                                .salt = salt,
                                .extra_keys = ExtraKeysFrom(extra_keys),
                                .adapter = adapter,
                                .priority = priority,
                                .max_reuse_tokens = max_reuse_tokens,
                                .multimodal = multimodal,
                                .session = session,
                                .retain_us = retain_us};
           }),
           py::kw_only(), py::arg("id"), py::arg("tokens"), py::arg("max_new_tokens"), py::arg("salt") = py::bytes(),
           py::arg("extra_keys") = PyExtraKeys{}, py::arg("adapter") = 0, py::arg("priority") = 0, py::arg("max_reuse_tokens") = -1,
           py::arg("multimodal") = 0, py::arg("session") = -1, py::arg("retain_us") = 0)
      .def_readonly("id", &RequestSpec::id)
      .def_property_readonly("tokens", [](const RequestSpec& spec) { return CopyOf(spec.tokens); })
      .def_readonly("max_new_tokens", &RequestSpec::max_new_tokens)
      .def_property_readonly("salt", [](const RequestSpec& spec) { return py::bytes(spec.salt); })
      .def_readonly("adapter", &RequestSpec::adapter)
      .def_readonly("priority", &RequestSpec::priority)
      .def_readonly("max_reuse_tokens", &RequestSpec::max_reuse_tokens)
      .def_readonly("multimodal", &RequestSpec::multimodal)
      .def_readonly("session", &RequestSpec::session)
      .def_readonly("retain_us", &RequestSpec::retain_us);

  py::class_<SubmitResult>(module, "SubmitResult", "Whether a request was accepted, and if not, why and what to do.")
      .def_property_readonly("accepted", &SubmitResult::accepted)
      .def_readonly("refusal", &SubmitResult::refusal)
      .def_readonly("reason", &SubmitResult::reason);

  py::class_<RequestInfo>(module, "RequestInfo", "What is known of one request.")
      .def_readonly("id", &RequestInfo::id)
      .def_property_readonly("state", [](const RequestInfo& info) { return kStateNames[static_cast<size_t>(info.state)]; })
      .def_readonly("finish_reason", &RequestInfo::finish_reason)
      .def_readonly("priority", &RequestInfo::priority)
      .def_readonly("multimodal", &RequestInfo::multimodal)
      .def_readonly("prompt_tokens", &RequestInfo::prompt_tokens)
      .def_readonly("output_tokens", &RequestInfo::output_tokens)
      .def_readonly("computed_tokens", &RequestInfo::computed_tokens)
      .def_readonly("cached_tokens", &RequestInfo::cached_tokens)
      .def_readonly("host_tokens", &RequestInfo::host_tokens)
      .def_readonly("storage_tokens", &RequestInfo::storage_tokens)
      .def_readonly("hit_cut", &RequestInfo::hit_cut)
      .def_readonly("hit_cut_group", &RequestInfo::hit_cut_group)
      .def_readonly("retractions", &RequestInfo::retractions)
      .def_readonly("queued_us", &RequestInfo::queued_us)
      .def_readonly("first_scheduled_us", &RequestInfo::first_scheduled_us)
      .def_readonly("retracted_us", &RequestInfo::retracted_us);
}

}  // namespace tokenspeed::bindings
