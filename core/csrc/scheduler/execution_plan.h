// What one step computes, in flat arrays that cross to Python as views.
//
//     rows        [ extends ............. | decodes in tree order ......... ]
//     input_ids   row by row, query_lens[row] tokens each
#pragma once

#include <cstdint>

#include "cache/page_hash.h"
#include "scheduler/config.h"
#include "scheduler/row_order.h"
#include "support/column.h"

namespace tokenspeed {

enum class ForwardMode : int32_t { kIdle = 0, kExtend = 1, kDecode = 2, kMixed = 3 };

enum RowFlags : int32_t {
  kSamples = 1,    // the row yields a token: a decode, or the last chunk of a prompt
  kNewInSlot = 2,  // the first row of this request in this slot
};

inline constexpr int32_t kUnknownToken = -1;  // sampled by a step in flight, or a draft: read it on the device

// What is done to a recurrent group's state before the forward.
enum class StateKind : int32_t { kZero = 0, kCopy = 1 };

// Pages that move between two places: an entry a page, an op a run of entries. Columns that a kind does not use stay empty.
struct TransferColumns {
  Column<int64_t> op;
  Column<int32_t> group;
  Column<int32_t> device;
  Column<int32_t> host;
  Column<int32_t> row;     // load back: the row that needs the page, -1 where none does
  Column<PageHash> hash;   // to and from the store
  void Clear() noexcept {
    op.Clear();
    group.Clear();
    device.Clear();
    host.Clear();
    row.Clear();
    hash.Clear();
  }
};

struct ExecutionPlan {
  int64_t plan_id = -1;  // none yet
  ForwardMode mode = ForwardMode::kIdle;
  int32_t num_extend_rows = 0;

  // (rows)
  Column<int64_t> request_ids;
  Column<int32_t> slots;
  Column<int32_t> context_lens;
  Column<int32_t> query_lens;
  Column<int32_t> flags;
  Column<int32_t> output_lens;
  // (tokens)
  Column<int32_t> input_ids;
  // (deltas): page table of `group`: table[slot, index] = page. No entry stands twice in a plan. All full groups have the table of
  // group 0; a recurrent group's has one column, the state.
  Column<int32_t> delta_group;
  Column<int32_t> delta_slot;
  Column<int32_t> delta_index;
  Column<int32_t> delta_page;
  // (state ops): `target` becomes zero, or a copy of `source`, before the forward. No page is both source and target in a plan.
  Column<int32_t> state_kind;
  Column<int32_t> state_group;
  Column<int32_t> state_source;  // -1 where there is none
  Column<int32_t> state_target;
  // (intervals) of the full groups' pages
  Column<PrefixInterval> prefix_intervals;
  // Requests that left between two steps.
  Column<int64_t> retracted_ids;
  Column<int64_t> finished_ids;
  Column<int32_t> finished_reasons;
  // Transfers to be started, each answered by CacheDone.
  TransferColumns write_back;
  TransferColumns load_back;
  TransferColumns lookup;
  TransferColumns prefetch;
  TransferColumns store;

  void Reserve(const SchedulerConfig& config);
  void Clear(int64_t id);

  [[nodiscard]] int32_t num_rows() const noexcept { return static_cast<int32_t>(slots.size()); }
  [[nodiscard]] int32_t num_tokens() const noexcept { return static_cast<int32_t>(input_ids.size()); }
  void AddDelta(int32_t slot, int32_t index, int32_t page, int32_t group = 0) {
    delta_group.Push(group);
    delta_slot.Push(slot);
    delta_index.Push(index);
    delta_page.Push(page);
  }
  void AddStateOp(StateKind kind, int32_t group, int32_t source, int32_t target) {
    state_kind.Push(static_cast<int32_t>(kind));
    state_group.Push(group);
    state_source.Push(source);
    state_target.Push(target);
  }
};

}  // namespace tokenspeed
