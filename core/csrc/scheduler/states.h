// The states of a request. Each owns what a request holds while it is in that state, and nothing else, so that leaving a state
// gives back what the next one does not keep.
//
//     Submitted --> Prefilling --> PrefillDone --> Decoding --> Finished
//      |   ^         ^    |             |             |            ^
//      |   |(resume) |    +-------------+--- abort ---+--> Aborting+   while a step of it is in flight
//      |   |        Retracted <---- page pressure ----+--> Draining+   finished while a later step is in flight
//      |   |         ^ Retracting <---- the same -----+--> WritingBack+  finished while its pages are copied to the host
//      +-> Prefetching --> PrefetchDone                     what the store below has of its prompt is brought first
//
// docs/scheduler-states.md holds the whole table; it is printed from transitions.h by a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <variant>
#include <vector>

#include "cache/adjunct_cache.h"
#include "cache/page_pool.h"
#include "cache/prefix_tree.h"
#include "scheduler/inflight_prefixes.h"
#include "support/id_pool.h"

namespace tokenspeed {

struct SlotTag;
using SlotPool = IdPool<SlotTag>;
using SlotLease = IdLease<SlotTag>;

enum class FinishReason : int32_t { kNone = 0, kStop = 1, kLength = 2, kFailed = 3, kAborted = 4 };

// A page of a window group: one that others may read, its own, or (id alone) one that comes back from the host and belongs to the
// transfer until that has ended.
struct AdjunctPage {
  AdjunctPin shared;
  PageLease own;
  int32_t loading = -1;
  [[nodiscard]] int32_t id() const noexcept { return shared ? shared.page() : own ? own.id() : loading; }
};

// What a running request holds in one window or recurrent group.
struct AdjunctHold {
  // Window: the blocks [begin, end()), from the first that the earliest step in flight reads.
  int32_t begin = 0;
  std::vector<AdjunctPage> pages;
  int32_t written = 0;  // the blocks before this one were considered for a copy to the host

  // Recurrent: what its steps read and write; behind the last row planned it is the state after `state_at` tokens.
  PageLease state;
  int32_t state_at = 0;
  AdjunctPin from;  // the kept state that its next row, or the one in flight, copies
  // Where that comes back from the host: its page, which belongs to the transfer and then, while the others of the load go on, is here.
  int32_t from_loading = -1;
  PageLease from_loaded;
  int32_t from_block = 0;  // the last one before it
  // States at multiples of the interval that a step in flight brings about, or that wait for what comes back from the host before them.
  // A later row goes on in a copy.
  struct Kept {
    int32_t position;
    PageLease page;
  };
  std::vector<Kept> kept;

  [[nodiscard]] int32_t end() const noexcept { return begin + static_cast<int32_t>(pages.size()); }
};

// What a running request holds. Its page table is
//
//     index  0 .......... depth-1 | depth ...... pages()-1
//            pinned in the tree   | tail: its own, not full yet or not advanced yet
//
// While a prefix comes back from the host, its pages stand between the two and belong to the transfer until that has ended.
struct Residence {
  SlotLease slot;
  NodePin prefix;
  std::vector<PageLease> tail;
  int32_t loading = 0;  // pages
  std::vector<AdjunctHold> holds;  // one for each window or recurrent group

  [[nodiscard]] int32_t pages() const noexcept { return prefix.depth() + loading + static_cast<int32_t>(tail.size()); }
};

// Waits for its first admission.
struct Submitted {};
// The store below is asked for its prefix, or brings it to the host; bounded in time.
struct Prefetching {};
// That has ended, well or not; waits for its first admission.
struct PrefetchDone {};
// Its prompt (after a retraction: prompt and output so far) is being planned chunk by chunk, up to `target` tokens.
struct Prefilling {
  Residence residence;
  PrefixClaim claim;
  int32_t target;
};
// The last chunk is planned; its first token is not known yet.
struct PrefillDone {
  Residence residence;
  PrefixClaim claim;
};
struct Decoding {
  Residence residence;
};
// Finished for the client; a later step still uses its pages.
struct Draining {
  Residence residence;
  FinishReason reason;
};
// Finished for the client; its last pages are being copied to the host. The transfers hold them.
struct WritingBack {
  FinishReason reason;
};
// On its way to Retracted: a step in flight still uses its pages (then it has them), or they are being copied to the host (then the
// transfers have them).
struct Retracting {
  Residence residence;
};
// Lost its pages to others; waits for its resumption.
struct Retracted {};
// Aborted; a step in flight still uses its pages.
struct Aborting {
  Residence residence;
  FinishReason reason;
};
struct Finished {
  FinishReason reason;
};

using RequestState = std::variant<Submitted, Prefetching, PrefetchDone, Prefilling, PrefillDone, Decoding, Draining, WritingBack, Retracting,
                                  Retracted, Aborting, Finished>;

// In the order of the variant.
enum class StateName : int32_t {
  kSubmitted,
  kPrefetching,
  kPrefetchDone,
  kPrefilling,
  kPrefillDone,
  kDecoding,
  kDraining,
  kWritingBack,
  kRetracting,
  kRetracted,
  kAborting,
  kFinished
};
inline constexpr size_t kStateCount = std::variant_size_v<RequestState>;
inline constexpr std::string_view kStateNames[kStateCount] = {"Submitted",   "Prefetching", "PrefetchDone", "Prefilling",
                                                              "PrefillDone", "Decoding",    "Draining",     "WritingBack",
                                                              "Retracting",  "Retracted",   "Aborting",     "Finished"};

[[nodiscard]] inline StateName NameOf(const RequestState& state) noexcept { return static_cast<StateName>(state.index()); }

// The residence of a state that has one now, else nullptr.
[[nodiscard]] Residence* ResidenceOf(RequestState& state) noexcept;

}  // namespace tokenspeed
