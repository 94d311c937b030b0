// The results of a step move its requests on: tokens, pages published, ends.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "scheduler/scheduler.h"

namespace tokenspeed {

AdvanceResult Scheduler::Advance(int64_t plan_id, std::span<const int32_t> counts, std::span<const int32_t> tokens,
                                 std::span<const int32_t> outcomes, int64_t step_us) {
  if (steps_.empty()) {
    throw std::invalid_argument("plan " + std::to_string(plan_id) + " is not in flight: no plan is (IDLE plans are not advanced)");
  }
  Step& step = steps_.front();
  if (step.plan_id != plan_id) {
    throw std::invalid_argument("plan " + std::to_string(plan_id) + " is not the oldest in flight; advance plan " +
                                std::to_string(step.plan_id));
  }
  const size_t rows = step.rows.size();
  const auto width = static_cast<size_t>(config_.max_row_width);
  const auto require = [&](const char* name, size_t size, size_t expected) {
    if (size == expected) return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) + " entries; plan " + std::to_string(plan_id) + " needs " +
                                std::to_string(expected));
  };
  require("counts", counts.size(), rows);
  require("tokens", tokens.size(), rows * width);
  require("outcomes", outcomes.size(), rows);

  AdvanceResult result;
  result.row_refusals.resize(rows);
  int32_t decode_rows = 0;
  for (size_t i = 0; i < rows; ++i) {
    const StepRow& row = step.rows[i];
    decode_rows += row.extend ? 0 : 1;
    Request& request = *row.request;
    --request.inflight_rows;
    request.inflight_tokens -= row.tokens;
    if (row.samples) request.inflight_outputs -= row.extend ? 1 : row.tokens;
    result.row_refusals[i] = static_cast<int32_t>(Settle(request, row, counts[i], tokens.data() + i * width, outcomes[i]));
  }
  if (config_.max_step_us > 0) {
    const bool fills = !config_.step_sizes.empty() && step.prefill_tokens <= config_.step_sizes.back();
    for (StepTimes* times : {&step_times_, &filled_times_}) {
      if (step.prefill_tokens > 0 && (times == &filled_times_) != fills) continue;
      times->Observe(config_.FilledStep(step.prefill_tokens), step.attended, decode_rows, step.filled, step_us);
    }
    if (step.prefill_tokens > 0) prefill_cost_.Follow((fills ? filled_times_ : step_times_).weight());
  } else {
    prefill_cost_.Observe(step.prefill_tokens, step.attended, decode_rows, step.filled, step_us);
  }
  step.rows.clear();
  spare_rows_.push_back(std::move(step.rows));
  steps_.pop_front();
  while (!deferred_.empty() && deferred_.front().first <= plan_id) deferred_.pop_front();
  while (!deferred_adjuncts_.empty() && deferred_adjuncts_.front().plan_id <= plan_id) deferred_adjuncts_.pop_front();
  QueueWoken();

  for (const auto& [id, reason] : ended_) {
    result.finished_ids.push_back(id);
    result.finished_reasons.push_back(static_cast<int32_t>(reason));
  }
  ended_.clear();
  return result;
}

RowRefusal Scheduler::CheckResult(const StepRow& row, int32_t count, const int32_t* tokens, int32_t outcome) const {
  const bool known_outcome = outcome >= static_cast<int32_t>(Outcome::kContinue) && outcome <= static_cast<int32_t>(Outcome::kReload);
  if (!known_outcome) return RowRefusal::kBadOutcome;
  if (outcome == static_cast<int32_t>(Outcome::kReload)) return RowRefusal::kBadOutcome;  // nothing was to come, or it did come
  if (outcome == static_cast<int32_t>(Outcome::kFail)) return RowRefusal::kNone;
  if (!row.samples) {
    if (count != 0) return RowRefusal::kBadCount;
    return outcome == static_cast<int32_t>(Outcome::kFinish) ? RowRefusal::kBadOutcome : RowRefusal::kNone;
  }
  if (count < 1 || count > (row.extend ? 1 : row.tokens)) return RowRefusal::kBadCount;
  for (int32_t i = 0; i < count; ++i) {
    if (tokens[i] < 0) return RowRefusal::kBadToken;
  }
  return RowRefusal::kNone;
}

// REQUIRES: it is leaving, and its last step in flight has just ended.
void Scheduler::LastStepEnded(Request& request, StateName name) {
  if (name == StateName::kRetracting) {
    std::get<Retracting>(request.state).residence = {};
    if (request.writes == 0) {
      Apply(request, Released{});
      waiting_.emplace(request.order, &request);
    }
    return;
  }
  const auto* aborting = std::get_if<Aborting>(&request.state);
  if (!adjuncts_.empty()) KeepStates(request, *ResidenceOf(request.state));
  RetainSession(request, aborting != nullptr ? aborting->reason : std::get<Draining>(request.state).reason);
  if (name == StateName::kDraining && request.writes > 0) {
    Apply(request, StepEndedWriting{});
    request.DropTokens();
  } else {
    Apply(request, StepEnded{});
    if (name == StateName::kAborting) Report(request, std::get<Finished>(request.state).reason);
    Retire(request);
  }
}

RowRefusal Scheduler::Settle(Request& request, const StepRow& row, int32_t count, const int32_t* tokens, int32_t outcome) {
  const StateName name = NameOf(request.state);
  if (name == StateName::kDraining || name == StateName::kAborting || name == StateName::kRetracting) {
    if (request.inflight_rows == 0) LastStepEnded(request, name);
    return RowRefusal::kLate;
  }

  if (row.loads) {
    const bool told = outcome == static_cast<int32_t>(Outcome::kReload);
    if (request.load_failed || (told && request.loading())) {
      Reload(request);
      return told ? RowRefusal::kNone : RowRefusal::kLate;
    }
    request.load_unsettled = false;
  }
  const RowRefusal refusal = CheckResult(row, count, tokens, outcome);
  if (refusal != RowRefusal::kNone || outcome == static_cast<int32_t>(Outcome::kFail)) {
    Finish(request, FinishReason::kFailed);  // what the step wrote is not published
    return refusal;
  }

  request.computed += row.extend ? row.tokens : count;
  if (row.samples) {
    request.output.insert(request.output.end(), tokens, tokens + count);
    request.output_tokens += count;
    if (!row.extend) totals_.decode_tokens += count;
  }
  Residence& residence = *ResidenceOf(request.state);
  if (!row.extend && count < row.tokens) {
    // Pages past what was accepted go back, except those that a step in flight may write.
    const int32_t keep = std::max(0, PagesFor(request.upper()) - residence.prefix.depth() - residence.loading);
    if (residence.tail.size() > static_cast<size_t>(keep)) residence.tail.resize(static_cast<size_t>(keep));
  }
  if (config_.enable_prefix_caching) Publish(request, residence);
  if (!adjuncts_.empty()) SettleHolds(request, residence);

  if (outcome == static_cast<int32_t>(Outcome::kFinish)) {
    Finish(request, FinishReason::kStop);
  } else if (request.output_tokens >= request.output_limit) {
    Finish(request, FinishReason::kLength);
  } else if (name == StateName::kPrefillDone && row.samples) {
    Apply(request, FirstToken{});
  }
  return RowRefusal::kNone;
}

void Scheduler::Publish(Request& request, Residence& residence) {
  const int32_t full = request.computed / page_size_;
  const int32_t first = residence.prefix.depth();
  if (full <= first || request.loading() || request.load_failed) return;  // what comes back from the host is published first
  request.ExtendHashes(page_size_);
  const auto count = static_cast<size_t>(full - first);
  const std::span<const PageHash> hashes(request.hashes.data() + first, count);
  tree_.Publish(residence.prefix, hashes, {residence.tail.data(), count}, replaced_scratch_);
  residence.tail.erase(residence.tail.begin(), residence.tail.begin() + static_cast<ptrdiff_t>(count));
  if (events_.on()) RecordStored(request, first + static_cast<int32_t>(replaced_scratch_.size()), full);
  if (!adjuncts_.empty()) PublishHolds(request, residence, first, full);
  if (auto* prefilling = std::get_if<Prefilling>(&request.state)) prefilling->claim.Advance(full);
  if (auto* done = std::get_if<PrefillDone>(&request.state)) done->claim.Advance(full);
  if (config_.write_policy == WritePolicy::kThrough) QueueWrite(&request, residence.prefix, first);

  if (replaced_scratch_.empty()) return;
  // Another request had published the same pages: the table turns to those, and its own go back when no step reads them any more.
  decodes_dirty_ = true;
  const int32_t slot = residence.slot.id();
  for (PrefixTree::Replaced& replaced : replaced_scratch_) {
    table_changes_.push_back({slot, replaced.index, replaced.page, occupancy_[static_cast<size_t>(slot)]});
    if (request.inflight_rows > 0) deferred_.emplace_back(steps_.back().plan_id, std::move(replaced.duplicate));
  }
  replaced_scratch_.clear();
}

void Scheduler::RecordStored(const Request& request, int32_t begin, int32_t end) {
  std::vector<int32_t> tokens(static_cast<size_t>(page_size_));
  for (int32_t index = begin; index < end; ++index) {
    request.CopyTokens(index * page_size_, page_size_, tokens.data());
    const auto at = static_cast<size_t>(index);
    events_.Stored(KvMedium::kDevice, request.hashes[at], index > 0 ? request.hashes[at - 1] : PageHash{}, index, request.adapter, tokens);
  }
}

}  // namespace tokenspeed
