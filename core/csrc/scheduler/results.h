// What the calls of a scheduler answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/states.h"
#include "scheduler/transitions.h"

namespace tokenspeed {

enum class SubmitRefusal : int32_t {
  kNone = 0,
  kDuplicateId,
  kEmptyPrompt,
  kBadToken,
  kBadMaxNewTokens,
  kTooLong,
  kNeverFits,
  kBadExtraKey,
  kBadPriority,
  kBadMaxReuse,
};
inline constexpr size_t kSubmitRefusalCount = 10;

struct SubmitResult {
  SubmitRefusal refusal = SubmitRefusal::kNone;
  std::string reason;  // empty when accepted; else what was wrong and what to do
  [[nodiscard]] bool accepted() const noexcept { return refusal == SubmitRefusal::kNone; }
};

// Why a row's result was not taken. All but kLate end the request as FAILED; the others of the step are not touched.
enum class RowRefusal : int32_t {
  kNone = 0,
  kLate,        // the request had ended in an earlier step: absorbed
  kBadCount,    // no token where the row samples, or more than its width, or any where it does not sample
  kBadToken,    // a negative token
  kBadOutcome,  // not an Outcome, or FINISH for a chunk that yields no token
};
inline constexpr size_t kRowRefusalCount = 5;

enum class AbortRefusal : int32_t { kNone = 0, kUnknown, kFinished, kAborting };
inline constexpr size_t kAbortRefusalCount = 4;

enum class Outcome : int32_t { kContinue = 0, kFinish = 1, kFail = 2 };

struct AdvanceResult {
  std::vector<int64_t> finished_ids;
  std::vector<int32_t> finished_reasons;
  std::vector<int32_t> row_refusals;  // a RowRefusal a row
};

struct SchedulerStats {
  // Now.
  int64_t waiting = 0;    // submitted and not admitted yet
  int64_t running = 0;    // own a slot and go on
  int64_t leaving = 0;    // finished or aborted, with a step in flight
  int64_t retracted = 0;  // wait for their resumption
  int64_t parked = 0;     // of those waiting: for a prefix that another request computes
  int64_t slots_free = 0;
  std::vector<int64_t> pages_active, pages_cached, pages_free, pages_total;  // a value a cache group
  int64_t expected_output = 0;  // tokens: the observed mean that admission uses
  double context_weight = 0.0;  // what a prompt token costs for each token that it attends to; without any it costs 1
  // Ever.
  int64_t submitted = 0, refused = 0, finished = 0, aborted = 0, failed = 0, retractions = 0;
  int64_t prompt_tokens_queried = 0;  // at first admissions
  int64_t prefix_hit_tokens = 0;      // of those, found in the cache
  int64_t prefill_tokens = 0;         // planned in chunks, recomputation after retraction included
  int64_t decode_tokens = 0;          // accepted
  int64_t evicted_pages = 0;
  int64_t inflight_waits = 0;  // times a request parked
  int64_t plans = 0;
};

struct RequestInfo {
  int64_t id = 0;
  StateName state = StateName::kSubmitted;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t priority = 0;
  int64_t multimodal = 0;
  int32_t prompt_tokens = 0, output_tokens = 0, computed_tokens = 0;
  int32_t cached_tokens = 0;  // found in the cache at first admission
  int32_t retractions = 0;
  int64_t queued_us = 0;
  int64_t first_scheduled_us = -1;  // -1: not yet
  int64_t retracted_us = 0;         // spent retracted, in all
};

}  // namespace tokenspeed
