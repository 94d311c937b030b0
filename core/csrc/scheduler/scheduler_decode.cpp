// Decodes come first in every plan: their pages, whom to retract when there are none, and their rows.
#include <algorithm>
#include <limits>
#include <tuple>

#include "scheduler/scheduler.h"

namespace tokenspeed {

Request* Scheduler::OldestRunning() const {
  Request* oldest = prefilling_.empty() ? nullptr : prefilling_.begin()->second;
  for (Request* request : decoding_) {
    if (request != nullptr && (oldest == nullptr || request->order < oldest->order)) oldest = request;
  }
  return oldest;
}

// Gives each decode the width and the pages of its row, or no row.
void Scheduler::ReserveDecodes() {
  if (decodes_dirty_) CompactDecodes();
  int32_t need = 0;
  bool pool_limit = false;
  for (Request* request : decoding_) {
    request->page_need = 0;
    request->width = std::min(config_.max_row_width, request->output_limit - request->outputs_upper());
    if (request->width <= 0) continue;  // the steps in flight may end it
    const Residence& residence = *ResidenceOf(request->state);
    const int32_t room = residence.pages() * page_size_ - request->upper();
    if (request->width <= room) continue;
    // The pool is a limit like the others, also for one that has it to itself.
    request->width = std::min(request->width, pages_.total() * page_size_ - request->upper());
    pool_limit = pool_limit || request->width <= 0;
    request->page_need = std::max(0, PagesFor(request->upper() + request->width) - residence.pages());
    if (request->width > 0) need += request->page_need;
  }
  if (pool_limit) {
    for (Request* request : decoding_) {
      const bool full = request->upper() >= pages_.total() * page_size_ && request->outputs_upper() < request->output_limit;
      if (full && request->inflight_rows == 0) Finish(*request, FinishReason::kLength);
    }
    CompactDecodes();
  }
  if (need > Available()) {
    SettleShortage(nullptr);
    CompactDecodes();
  }
  for (const AdjunctGroup& group : adjuncts_) {
    if (group.kind != CacheGroupKind::kWindow) continue;
    SettleShortage(&group);
    CompactDecodes();
  }
  for (Request* request : decoding_) {
    if (request->width <= 0) continue;
    if (request->page_need > 0) GrowTail(*ResidenceOf(request->state), request->page_need);
    if (!adjuncts_.empty()) GrowHolds(*ResidenceOf(request->state), request->upper() + request->width);
  }
}

int32_t Scheduler::PagesLacking(const AdjunctGroup* group, const Request& request) const {
  if (group == nullptr) return request.page_need;
  return LackingPages(*group, *ResidenceOf(const_cast<RequestState&>(request.state)), request.upper() + request.width);
}

// Where the rows of `decoding_` lack more pages together than are available.
//
// The oldest request is never taken from for others, so it runs to its end and somebody always makes progress. Those who were
// resumed and have computed nothing new since are spared as long as only younger ones would gain, so each retraction is paid for by
// a page of progress. A victim with a step in flight sits out this plan and is retracted in the next.
//
// Two that share every page give nothing back one by one, and everything together. The last pass therefore takes those too: each turn
// takes one request out of the running, so it ends with enough pages or with the oldest alone, which then has the pool to itself.
void Scheduler::SettleShortage(const AdjunctGroup* group) {
  int32_t need = 0;
  for (const Request* request : decoding_) need += request->width > 0 ? PagesLacking(group, *request) : 0;
  if (need <= AvailableIn(group)) return;
  int32_t promised = 0;
  const auto retract_until_enough = [&](bool fair_only) {
    while (need > AvailableIn(group) + (group == nullptr ? PagesLeaving() : PagesLeavingIn(*group)) + promised) {
      Request* victim = PickVictim(fair_only, group);
      if (victim == nullptr) return;
      if (victim->width > 0) need -= PagesLacking(group, *victim);
      victim->width = 0;
      if (victim->inflight_rows == 0) {
        RetractRequest(*victim);
      } else {
        victim->held_in = next_plan_id_ - 1;
        const Residence& residence = *ResidenceOf(victim->state);
        promised += group == nullptr ? static_cast<int32_t>(residence.tail.size()) + PrefixTree::ExclusivePages(residence.prefix)
                                     : HeldAlone(*group, residence);
      }
    }
  };
  retract_until_enough(true);

  // The youngest stand back until what is left suffices.
  const Request* oldest = OldestRunning();
  while (need > AvailableIn(group)) {
    Request* youngest = nullptr;
    for (Request* request : decoding_) {
      if (request == nullptr || request->width <= 0 || request == oldest || PagesLacking(group, *request) == 0) continue;
      if (youngest == nullptr || youngest->order < request->order) youngest = request;
    }
    if (youngest == nullptr) break;
    need -= PagesLacking(group, *youngest);
    youngest->width = 0;
  }
  retract_until_enough(false);
  if (need > AvailableIn(group)) {
    for (Request* request : decoding_) {
      if (request != nullptr && request->width > 0 && PagesLacking(group, *request) > 0) request->width = 0;
    }
  }
}

Request* Scheduler::PickVictim(bool fair_only, const AdjunctGroup* group) {
  const Request* oldest = OldestRunning();
  Request* best = nullptr;
  const int64_t plan = next_plan_id_ - 1;
  // Smaller goes first: chosen in the plan before and waited for, of use by itself, unimportant, cheap, young.
  using Rank = std::tuple<bool, bool, int32_t, int64_t, uint64_t>;
  Rank best_rank;
  const auto consider = [&](Request* request) {
    if (request == nullptr || request == oldest || request->held_in == plan) return;
    if (fair_only && request->computed < request->progress_mark) return;
    const Residence& residence = *ResidenceOf(request->state);
    if (request->loading()) return;  // its pages belong to the transfers
    const int32_t exclusive = PrefixTree::ExclusivePages(residence.prefix);
    const int32_t holds = group == nullptr ? exclusive + static_cast<int32_t>(residence.tail.size()) : HeldAlone(*group, residence);
    const int32_t gain = holds + (request->width > 0 ? PagesLacking(group, *request) : 0);
    if (gain == 0 && fair_only) return;
    const int64_t kept = int64_t{residence.prefix.depth() - exclusive} * page_size_;
    const RetractionCandidate candidate{request->computed - kept, request->order.arrival};
    const int64_t cost = std::visit([&](const auto& policy) { return policy(candidate); }, retraction_);
    const Rank rank{request->held_in != plan - 1, gain == 0, -request->priority, cost, std::numeric_limits<uint64_t>::max() - candidate.arrival};
    if (best == nullptr || rank < best_rank) {
      best = request;
      best_rank = rank;
    }
  };
  for (Request* request : decoding_) consider(request);
  for (const auto& [order, request] : prefilling_) consider(request);
  return best;
}

// REQUIRES: running, no step of it in flight.
void Scheduler::RetractRequest(Request& request) {
  ForgetRunning(request);
  if (!adjuncts_.empty()) KeepStates(request, *ResidenceOf(request.state));
  if (host_.on()) {
    // What nobody else keeps is copied to the host before it may go.
    const Residence& residence = *ResidenceOf(request.state);
    const int32_t exclusive = PrefixTree::ExclusivePages(residence.prefix);
    const int32_t begin = residence.prefix.depth() - exclusive;
    if (MissingOnHost(residence.prefix, begin) > 0) QueueWrite(&request, residence.prefix, begin);
  }
  if (tiers_ && !adjuncts_.empty()) {
    const Residence& residence = *ResidenceOf(request.state);
    QueueCopies(request, ResumableDepth(request.hashes, residence.prefix.depth()), &residence);
  }
  request.progress_mark = std::max(request.progress_mark, request.computed + page_size_);
  request.computed = 0;
  request.width = 0;
  request.overtaken = 0;
  request.hint = {};
  request.reach = 0;
  ++request.retractions;
  ++totals_.retractions;
  request.retracted_since_us = now_us_;
  if (request.writes > 0) {
    Apply(request, RetractLater{});
  } else {
    Apply(request, Retract{});
    waiting_.emplace(request.order, &request);
  }
  plan_->retracted_ids.Push(request.id);
}

void Scheduler::ArrangeDecodes() {
  if (!decodes_dirty_) return;
  decodes_dirty_ = false;
  std::erase(decoding_, nullptr);
  pins_scratch_.clear();
  for (Request* request : decoding_) pins_scratch_.push_back(&ResidenceOf(request->state)->prefix.node());
  row_order_.Arrange(pins_scratch_);
  rows_scratch_.clear();
  for (const int32_t row : row_order_.order()) rows_scratch_.push_back(decoding_[static_cast<size_t>(row)]);
  decoding_.swap(rows_scratch_);
  CompactDecodes();
}

void Scheduler::PlanDecodes() {
  const int32_t first_row = plan_->num_rows();
  bool gaps = false;
  for (Request* request : decoding_) {
    if (request->width <= 0) {
      gaps = true;
      continue;
    }
    Residence& residence = *ResidenceOf(request->state);
    int32_t* input = plan_->input_ids.Extend(static_cast<size_t>(request->width));
    // The newest token is known unless a step in flight samples it; the others are drafts.
    *input = request->inflight_outputs > 0 ? kUnknownToken : request->output.back();
    std::fill(input + 1, input + request->width, kUnknownToken);
    AddRow(*request, residence, request->width, true, false);
  }

  if (!gaps) {
    for (PrefixInterval interval : row_order_.intervals()) {
      interval.row_begin += first_row;
      interval.row_end += first_row;
      plan_->prefix_intervals.Push(interval);
    }
    return;
  }
  // Rows stand out of this plan: number those that are left.
  index_scratch_.assign(1, first_row);
  for (const Request* request : decoding_) index_scratch_.push_back(index_scratch_.back() + (request->width > 0 ? 1 : 0));
  for (PrefixInterval interval : row_order_.intervals()) {
    interval.row_begin = index_scratch_[static_cast<size_t>(interval.row_begin)];
    interval.row_end = index_scratch_[static_cast<size_t>(interval.row_end)];
    if (interval.row_end - interval.row_begin >= 2) plan_->prefix_intervals.Push(interval);
  }
}

}  // namespace tokenspeed
