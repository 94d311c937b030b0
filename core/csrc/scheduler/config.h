// What a scheduler is told once. Nothing changes after construction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tokenspeed {

enum class CacheGroupKind : int32_t {
  kFull = 0,       // every token's page is kept
  kWindow = 1,     // a token reads those of the last `window` tokens, its own included
  kRecurrent = 2,  // a page is a state; those at multiples of page_size tokens can be kept
};

// Group 0 is full, and its pages are the blocks in which prefixes are named and shared (docs/decisions/0002-hybrid-prefix-cache.md).
struct CacheGroupConfig {
  int32_t page_size = 16;  // tokens; window groups as group 0, recurrent ones a multiple of it
  int32_t num_pages = 0;   // full groups as group 0: they share their page ids
  CacheGroupKind kind = CacheGroupKind::kFull;
  int32_t host_pages = 0;  // 0: no host tier of this group; full groups as group 0
  int32_t window = 0;      // tokens; of window groups
};

// When a page is copied to the host.
enum class WritePolicy : int32_t {
  kThrough = 0,    // as soon as it is published
  kOnEvict = 1,    // when it is among the next to be evicted
  kSelective = 2,  // when a second request uses it
};

// How much output is provided for when a request is admitted.
enum class AdmissionRule : int32_t {
  kExpectedOutput = 0,  // the length observed of late
  kWholeOutput = 1,     // max_new_tokens: never retracts, runs fewer at once
};

// Whom page pressure strikes first.
enum class RetractionRule : int32_t {
  kCheapestToRestore = 0,  // the fewest tokens to compute again
  kYoungest = 1,           // the latest arrival
};

struct SchedulerConfig {
  std::vector<CacheGroupConfig> groups;
  int32_t max_num_seqs = 0;        // slots, and rows of a step
  int32_t max_batched_tokens = 0;  // token budget of a step
  int32_t max_model_len = 0;       // prompt and output together
  int32_t max_row_width = 1;       // W: tokens of a decode row
  int32_t overlap_depth = 0;       // plans that may be taken before the one in flight is advanced: 0 or 1
  bool enable_prefix_caching = true;
  int64_t max_step_us = 0;  // bound on the predicted time of a step with decodes; 0: none
  // Prompt tokens that the device fills a step with decodes up to, ascending: captured graphs. More than the last are not filled up.
  // Told of with max_step_us: steps under the bound are cut to them.
  std::vector<int32_t> step_sizes;
  int32_t hit_window = 8;   // waiting requests among which a prefix hit goes first, and how often one may be overtaken
  int64_t aging_us = 10'000'000;  // waiting this long is worth one priority level
  int32_t finished_history = 4096;  // finished requests that request_info still knows
  AdmissionRule admission = AdmissionRule::kExpectedOutput;
  RetractionRule retraction = RetractionRule::kCheapestToRestore;

  WritePolicy write_policy = WritePolicy::kThrough;
  bool l3 = false;  // there is a store below the host tier
  int32_t prefetch_threshold = 256;  // tokens that the store may have and the tiers above do not, from which on it is asked
  int64_t prefetch_timeout_us = 1'000'000;  // then the request goes on with what is there
  bool kv_events = false;
  int32_t retain_percent = 50;  // of the device pages: what sessions may keep at a higher rank

  // Throws std::invalid_argument naming the field and what it may be.
  void Validate() const;

  // The prefill share that is left to waiting prompts however many decodes run, so that they cannot starve.
  [[nodiscard]] int32_t min_prefill_tokens() const { return groups[0].page_size < max_batched_tokens ? groups[0].page_size : max_batched_tokens; }
  // The prompt tokens that a step with so many computes: the next size.
  [[nodiscard]] int32_t FilledStep(int32_t tokens) const {
    const auto size = std::lower_bound(step_sizes.begin(), step_sizes.end(), tokens);
    return tokens == 0 || size == step_sizes.end() ? tokens : *size;
  }
  // The most prompt tokens up to `tokens` that fill a step: a size, or 0.
  [[nodiscard]] int32_t WholeStep(int32_t tokens) const {
    if (step_sizes.empty() || tokens >= step_sizes.back()) return tokens;
    const auto size = std::upper_bound(step_sizes.begin(), step_sizes.end(), tokens);
    return size == step_sizes.begin() ? 0 : *(size - 1);
  }
  [[nodiscard]] bool has_host_tier() const {
    return std::any_of(groups.begin(), groups.end(), [](const CacheGroupConfig& group) { return group.host_pages > 0; });
  }
  // Pages of a window group that a request needs at most to go on token by token, with the steps that may be in flight.
  [[nodiscard]] int32_t WindowPages(const CacheGroupConfig& group) const {
    const int32_t span = group.window - 1 + max_row_width * (1 + overlap_depth);
    return (span + group.page_size - 2) / group.page_size + 1;
  }
  // No plan has more tokens than this: what the executor's buffers must hold.
  [[nodiscard]] int32_t max_step_tokens() const {
    const int32_t with_decodes = max_num_seqs * max_row_width + min_prefill_tokens();
    return max_batched_tokens > with_decodes ? max_batched_tokens : with_decodes;
  }
};

}  // namespace tokenspeed
