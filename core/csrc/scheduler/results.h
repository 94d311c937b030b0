// What the calls of a scheduler answer.
#pragma once

#include <array>
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
  kBadRetain,
};
inline constexpr size_t kSubmitRefusalCount = 11;

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
  kBadOutcome,  // not an Outcome, FINISH for a chunk that yields no token, or RELOAD for a row that waits for no load
};
inline constexpr size_t kRowRefusalCount = 5;

// Why the cache gave a prompt no more than it did, at its first admission.
enum class HitCut : int32_t {
  kNone = 0,        // it gave every full page before the last token
  kNew,             // the next page is none that it remembers
  kEvicted,         // it had the next page, or the window or state to go on behind it, and gave it up for want of room
  kReuseBound,      // max_reuse_tokens: prompt log probabilities are computed
  kStoreTimeout,    // the store below did not answer in time
  kLoadFailed,      // the host or the store had it, and it did not come
  kBoundary,        // it has the next page; the window or state to go on behind it was never kept
};
inline constexpr size_t kHitCutCount = 7;

enum class AbortRefusal : int32_t { kNone = 0, kUnknown, kFinished, kAborting };
inline constexpr size_t kAbortRefusalCount = 4;

// kReload: what the row was to find by its load back is not there; nothing of the row counts, and the request computes it.
enum class Outcome : int32_t { kContinue = 0, kFinish = 1, kFail = 2, kReload = 3 };

struct AdvanceResult {
  std::vector<int64_t> finished_ids;
  std::vector<int32_t> finished_reasons;
  std::vector<int32_t> row_refusals;  // a RowRefusal a row
};

struct SchedulerStats {
  // Now.
  int64_t waiting = 0;    // submitted and not admitted yet; those for whom the store is asked included
  int64_t running = 0;    // own a slot and go on
  int64_t leaving = 0;    // finished or aborted, with a step in flight
  int64_t retracted = 0;  // wait for their resumption, or for what they leave behind to be copied
  int64_t parked = 0;     // of those waiting: for a prefix that another request computes
  int64_t slots_free = 0;
  std::vector<int64_t> pages_active, pages_cached, pages_free, pages_total;  // a value a cache group
  std::vector<int64_t> host_pages_total, host_pages_free, host_pages_cached, host_pages_moving;
  int64_t prefetching = 0;          // requests for which the store is asked
  int64_t writing_back = 0;         // requests that have finished while their pages are copied to the host
  int64_t cache_ops_in_flight = 0;  // transfers that stand in a plan and were not answered
  int64_t cache_ops_pending = 0;    // transfers that the next plan begins
  int64_t sessions = 0;
  int64_t retained_pages = 0;  // kept above others for sessions
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
  int64_t host_hit_tokens = 0;     // of prefix_hit_tokens: loaded back from the host
  int64_t storage_hit_tokens = 0;  // of host_hit_tokens: brought by the store below for that request
  int64_t pages_written_back = 0, pages_loaded_back = 0, pages_prefetched = 0, pages_stored = 0;
  int64_t write_backs_failed = 0, load_backs_failed = 0, prefetches_failed = 0, stores_failed = 0;  // pages
  int64_t host_evicted_pages = 0;
  int64_t host_full = 0;  // pages that were not copied to the host because every page of it was in use
  int64_t lookups = 0, lookup_hits = 0;
  int64_t prefetch_timeouts = 0;
  std::array<int64_t, kHitCutCount> hits_cut{};  // first admissions, by why the cache gave no more
  int64_t reloads = 0;  // requests whose prefix did not come back from the host
};

struct RequestInfo {
  int64_t id = 0;
  StateName state = StateName::kSubmitted;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t priority = 0;
  int64_t multimodal = 0;
  int32_t prompt_tokens = 0, output_tokens = 0, computed_tokens = 0;
  int32_t cached_tokens = 0;  // found in the cache at first admission
  int32_t host_tokens = 0;    // of those, loaded back from the host
  int32_t storage_tokens = 0;  // of those, brought by the store below for this request
  HitCut hit_cut = HitCut::kNone;  // why there were no more
  int32_t hit_cut_group = 0;       // the cache group that had no more, where one had not: 0 but where a window or a state was missing
  int32_t retractions = 0;
  int64_t queued_us = 0;
  int64_t first_scheduled_us = -1;  // -1: not yet
  int64_t retracted_us = 0;         // spent retracted, in all
};

}  // namespace tokenspeed
