// A request: what was asked, what is known so far, and the state that owns what it holds.
//
// Positions, with steps in flight:
//
//     0 ........ computed ........ upper() .......... known()
//     |  KV is there  |  in flight     |  to be planned  |
//
// While decoding known() is computed + 1: the newest token has no KV yet. With W > 1, upper() and outputs_upper() are bounds: a
// step in flight may accept fewer tokens than its row has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cache/page_hash.h"
#include "cache/prefix_tree.h"
#include "scheduler/inflight_prefixes.h"
#include "scheduler/results.h"
#include "scheduler/states.h"

namespace tokenspeed {

struct RequestSpec {
  int64_t id = 0;
  std::vector<int32_t> tokens;
  int64_t max_new_tokens = 0;
  std::string salt;
  std::vector<ExtraKey> extra_keys;
  int64_t adapter = 0;
  int64_t priority = 0;           // smaller is served earlier
  int64_t max_reuse_tokens = -1;  // -1: no bound
  int64_t multimodal = 0;         // opaque
  int64_t session = -1;           // -1: none
  int64_t retain_us = 0;          // how long its prefix is kept above others after a good end
};

// The order in which requests are served: by priority, aged by waiting, then by arrival. Linear ageing keeps the order of any two
// the same for ever, so nothing is sorted again: key = priority * aging_us + time of arrival.
struct QueueKey {
  int64_t key = 0;
  uint64_t arrival = 0;
  friend auto operator<=>(const QueueKey&, const QueueKey&) = default;
};

struct Request : PrefixWaiter {
  int64_t id = 0;
  QueueKey order;

  std::vector<int32_t> prompt;
  std::vector<int32_t> output;
  int32_t prompt_tokens = 0;  // the lengths outlive the tokens, which are dropped at the end
  int32_t output_tokens = 0;
  int32_t output_limit = 0;  // tokens: max_new_tokens, or what the model length leaves
  int32_t priority = 0;
  int64_t max_reuse_tokens = -1;
  int64_t multimodal = 0;
  int64_t adapter = 0;
  int64_t session = -1;
  int64_t retain_us = 0;

  PageHash seed;
  std::vector<ExtraKey> extra_keys;  // sorted
  std::vector<PageHash> hashes;      // of the full pages known so far; empty when nothing is cached

  int32_t computed = 0;         // tokens whose KV is complete
  int32_t inflight_rows = 0;    // rows of plans not advanced yet
  int32_t inflight_tokens = 0;  // their tokens
  int32_t inflight_outputs = 0; // tokens that they may yield

  // Of the plan being made.
  int32_t width = 0;      // tokens of its decode row; 0: no row
  int32_t page_need = 0;  // pages that the row lacks
  int32_t row = -1;       // its place among the decodes
  int64_t held_in = 0;    // the plan that chose it for retraction and left it out, so that its step in flight can end
  bool new_in_slot = false;

  // Transfers between the tiers.
  int32_t writes = 0;              // copies to the host that were begun for it and have not ended
  std::vector<int64_t> load_ops;   // bring its prefix back from the host, one for each group, and have not ended
  bool load_unsettled = false;     // the row that reads what it brings was not advanced yet
  bool load_failed = false;        // it failed before that row was advanced
  int32_t first_load_tokens = 0;   // what it brings counts as a hit of the first admission
  int64_t fetch = -1;              // what the store below is asked for it; -1: nothing now
  int32_t fetch_begin = 0;         // blocks that the store brought for it, or windows and states behind them: [fetch_begin, fetch_end)
  int32_t fetch_end = 0;
  int32_t fetch_goal = -1;         // where all groups could go on with what the store has; -1: not known
  int32_t fetch_full = 0;          // and where the full ones could

  // Waiting.
  PrefixTree::Position hint;  // deepest match seen
  int32_t reach = 0;          // pages of the match with what the host has below it
  int32_t reach_from = 0;     // where that part began when it was looked up
  uint64_t reach_discards = 0;  // HostCache::discards() then
  int32_t overtaken = 0;      // by requests behind it
  int32_t progress_mark = 0;  // computed tokens that make it a fair victim again after a resumption

  // Statistics.
  int32_t cached_tokens = -1;  // at first admission; -1 before
  int32_t host_tokens = 0;     // of those, loaded back from the host
  int32_t storage_tokens = 0;  // of those, brought by the store below for this request
  HitCut hit_cut = HitCut::kNone;  // why there were no more
  int32_t hit_cut_group = 0;       // the cache group that had no more
  bool fetch_timed_out = false;
  int32_t retractions = 0;
  int64_t queued_us = 0;
  int64_t first_scheduled_us = -1;
  int64_t retracted_since_us = 0;
  int64_t retracted_us = 0;  // spent retracted, in all

  // Last, so that it goes first: a claim in it names the hashes above.
  RequestState state;

  [[nodiscard]] bool loading() const noexcept { return !load_ops.empty(); }
  [[nodiscard]] int32_t known() const noexcept { return prompt_tokens + output_tokens; }
  [[nodiscard]] int32_t upper() const noexcept { return computed + inflight_tokens; }
  [[nodiscard]] int32_t outputs_upper() const noexcept { return output_tokens + inflight_outputs; }

  // Tokens [begin, begin + count) of prompt and output together. REQUIRES: all known.
  void CopyTokens(int32_t begin, int32_t count, int32_t* out) const noexcept;
  // Names the pages that `computed` has filled and hashes does not name yet. REQUIRES: pages are being cached.
  void ExtendHashes(int32_t page_size);
  // Gives back the memory that a finished request no longer needs.
  void DropTokens() noexcept;
};

}  // namespace tokenspeed
