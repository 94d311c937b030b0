// What is left of a step goes to prompts: chunks of those admitted, then admissions.
#include <algorithm>
#include <cassert>
#include <limits>

#include "scheduler/scheduler.h"

namespace tokenspeed {

PrefillShare Scheduler::ShareBeside(int32_t decode_tokens) {
  if (decode_tokens == 0) return {.tokens = config_.max_batched_tokens};
  const int32_t least = config_.min_prefill_tokens();
  PrefillShare share{.tokens = std::max(config_.max_batched_tokens - decode_tokens, least), .least = least};
  share.cost = prefill_cost_(share.tokens, PrefillCost::Attended(share.tokens, 0));
  if (config_.max_step_us > 0) {
    share.sizes = &config_;
    share.cost = std::min(share.cost, PrefillCostWithin(StepBound(), 4.0 * least));
  }
  return share;
}

// One prompt among decodes keeps the bound. A crowd widens it: what many steps cost each of the prompts is more than what they spare the
// decodes. Those without a slot count for nothing, nor does anyone waiting where the first of them finds no pages (by what was last known
// of its prefix: looking it up for every plan would cost more than being wrong for one).
double Scheduler::StepBound() {
  size_t able = std::min(waiting_.size(), static_cast<size_t>(slots_.available()));
  if (able > 0) {
    MeasureRoom();
    const Request& first = *waiting_.begin()->second;
    if (PagesFor(first.known()) - first.hint.depth() + GrowthPages(first) + growth_room_ > room_) able = 0;
  }
  return static_cast<double>(config_.max_step_us) * std::max(1.0, static_cast<double>(prefilling_.size() + able) / kPromptsInBound);
}

double Scheduler::PrefillCostWithin(double max_step_us, double untried) {
  if (config_.step_sizes.empty()) return step_times_.PrefillCostWithin(max_step_us, untried);
  const double most = config_.step_sizes.back();
  const double filled = filled_times_.PrefillCostWithin(max_step_us, untried);
  const bool fills = !filled_times_.tried() || filled < most;
  const StepTimes& times = fills ? filled_times_ : step_times_;
  if (fills || times.tried()) prefill_cost_.Follow(times.weight());
  return fills ? filled : std::max(most, step_times_.PrefillCostWithin(max_step_us, 2.0 * most));
}

void Scheduler::PlanPrefills(PrefillShare share) {
  // Serving order over those admitted and those waiting together; an admission never sits behind a younger prompt's chunk.
  for (auto next = prefilling_.begin(); next != prefilling_.end();) {
    Request& request = *next->second;
    while (!share.used_up() && !waiting_.empty() && waiting_.begin()->first < request.order && slots_.available() > 0) {
      Request& first = *waiting_.begin()->second;
      if (ParkIfComputing(first)) continue;
      if (!CanAdmit(first)) break;
      AdmitRequest(first);
      PlanChunk(first, share);
    }
    ++next;  // before the request may leave the map
    if (share.used_up()) return;
    if (request.held_in == plan_->plan_id) continue;
    if (PlanChunk(request, share) == 0) return;  // no page for it: nobody younger takes one
  }
  while (!share.used_up() && slots_.available() > 0 && !waiting_.empty()) {
    if (!AdmitNext(share)) return;
  }
}

// Nothing can run and nothing is in flight, yet there are prompts half done that hold each other's pages: the younger give way.
void Scheduler::UnblockPrefill() {
  while (step_->rows.empty() && !prefilling_.empty()) {
    Request& oldest = *prefilling_.begin()->second;
    const Residence& residence = *ResidenceOf(oldest.state);
    if (Reachable(oldest, residence) <= 0) {
      if (AnyMoving()) return;  // pages come free when a transfer ends
      const auto blocks = [&](const AdjunctGroup& group) { return ReachIn(group, oldest, residence) <= oldest.upper(); };
      const auto blocking = Available() == 0 ? adjuncts_.end() : std::find_if(adjuncts_.begin(), adjuncts_.end(), blocks);
      const AdjunctGroup* group = blocking == adjuncts_.end() ? nullptr : &*blocking;
      Request* victim = PickVictim(true, group);
      if (victim == nullptr) victim = PickVictim(false, group);
      if (victim == nullptr) return;
      RetractRequest(*victim);
      QueueWoken();
      continue;
    }
    PrefillShare share = ShareBeside(0);
    if (PlanChunk(oldest, share) == 0) return;
  }
}

int32_t Scheduler::Reachable(const Request& request, const Residence& residence) const {
  const int32_t tokens = (residence.pages() + Available()) * page_size_ - request.upper();
  return adjuncts_.empty() ? tokens : std::min(tokens, ChunkBound(request, residence, request.upper()));
}

int32_t Scheduler::PlanChunk(Request& request, PrefillShare& share) {
  auto& state = std::get<Prefilling>(request.state);
  const int32_t begin = request.upper();
  const int32_t remaining = state.target - begin;
  const int32_t fitting = share.Fit(remaining, begin, prefill_cost_);
  const int32_t chunk = std::min(fitting, Reachable(request, state.residence));
  if (chunk <= 0) return 0;
  share.Spend(chunk, fitting, remaining, begin, prefill_cost_);
  GrowTail(state.residence, std::max(0, PagesFor(begin + chunk) - state.residence.pages()));
  if (!adjuncts_.empty()) GrowHolds(state.residence, begin + chunk);

  const bool last = chunk == remaining;
  request.CopyTokens(begin, chunk, plan_->input_ids.Extend(static_cast<size_t>(chunk)));
  AddRow(request, state.residence, chunk, last, true);
  totals_.prefill_tokens += chunk;
  step_->prefill_tokens += chunk;
  step_->attended += PrefillCost::Attended(chunk, begin);
  if (last) {
    prefilling_.erase(request.order);
    request.width = 0;  // it decodes from the next plan on
    request.page_need = 0;
    Apply(request, PromptPlanned{});
    request.row = static_cast<int32_t>(decoding_.size());
    decoding_.push_back(&request);
    decodes_dirty_ = true;
  }
  return chunk;
}

// ---- admission ----

int32_t Scheduler::MatchLimit(const Request& request) const {
  // The last token is always computed: its logits are what the step is for.
  int64_t limit = (request.known() - 1) / page_size_;
  // The bound serves prompt logprobs, which the client has once there is output.
  if (request.max_reuse_tokens >= 0 && request.output_tokens == 0) limit = std::min(limit, request.max_reuse_tokens / page_size_);
  return static_cast<int32_t>(std::min<int64_t>(limit, static_cast<int64_t>(request.hashes.size())));
}

HitCut Scheduler::CutOf(Request& request, int32_t reach) {
  const auto whole = static_cast<int32_t>(std::min<int64_t>((request.known() - 1) / page_size_, static_cast<int64_t>(request.hashes.size())));
  if (reach >= whole) return HitCut::kNone;
  if (reach >= MatchLimit(request)) return HitCut::kReuseBound;
  if (!adjuncts_.empty()) {
    // The full groups have more, and a window or a state to go on behind it is missing.
    const int32_t limit = MatchLimit(request);
    int32_t full = host_.Match(request.hashes, tree_.Match(request.hashes, limit).depth(), limit);
    // The store's blocks behind the last boundary that it has were not brought.
    if (reach == request.fetch_goal) full = std::max(full, request.fetch_full);
    if (request.fetch_timed_out && BoundaryBetween(reach, limit)) return HitCut::kStoreTimeout;
    if (full > reach) return CutByGroup(request, reach, full);
  }
  if (request.fetch_timed_out) return HitCut::kStoreTimeout;
  return evicted_pages_.Contains(request.hashes[static_cast<size_t>(reach)]) ? HitCut::kEvicted : HitCut::kNew;
}

bool Scheduler::ParkIfComputing(Request& request) {
  const int32_t limit = MatchLimit(request);
  request.hint = tree_.Rematch(request.hint, request.hashes, limit);
  if (host_.on()) {
    const int32_t from = request.hint.depth();
    const bool known = request.reach_discards == host_.discards() && from >= request.reach_from;
    request.reach = host_.Match(request.hashes, from, limit, known ? request.reach : 0);
    request.reach_from = from;
    request.reach_discards = host_.discards();
  } else {
    request.reach = request.hint.depth();
  }
  // What the tree has: another may be computing what follows, behind a boundary that this one could resume at by then.
  const int32_t matched = request.hint.depth();
  // Where it could not be admitted in the best case, nobody asks how far the other groups reach: that walks its prompt.
  if (!adjuncts_.empty() && MightAdmit(request)) {
    request.reach = ResumableDepth(request.hashes, request.reach);
    if (request.reach < matched) request.hint = tree_.Rematch(request.hint, request.hashes, request.reach);
  }
  const int32_t depth = request.hint.depth();
  if (depth >= limit) return false;
  // The page after what the device has, or after what the host has below it, may be on its way.
  const auto parks = [&](int32_t at) { return at < limit && inflight_prefixes_.ParkIfComputing(request, request.hashes, at, limit); };
  const bool computing = parks(depth) || (request.reach != depth && parks(request.reach)) ||
                         (matched > depth && BoundaryBetween(depth, limit) && parks(matched));
  if (!computing) return false;
  waiting_.erase(request.order);
  ++totals_.inflight_waits;
  return true;
}

int32_t Scheduler::GrowthPages(const Request& request) const {
  const int32_t mean = output_lengths_.Mean();
  const int32_t tokens =
      std::visit([&](const auto& policy) { return policy(request.output_tokens, request.output_limit, mean); }, admission_);
  return PagesFor(request.known() + tokens - 1) - PagesFor(request.known());  // the last token of an output needs no KV
}

// Chunks to come have their pages promised; taking one lowers what is available and what is promised alike, so the room measured
// once holds for the whole plan.
void Scheduler::MeasureRoom() {
  if (room_measured_) return;
  room_measured_ = true;
  room_ = Available();
  growth_room_ = 0;
  for (const auto& [order, request] : prefilling_) {
    const auto& state = std::get<Prefilling>(request->state);
    room_ -= std::max(0, PagesFor(state.target) - state.residence.pages());
    growth_room_ += GrowthPages(*request);
  }
  for (const Request* request : decoding_) growth_room_ += GrowthPages(*request);
}

// REQUIRES: the hint is fresh.
bool Scheduler::CanAdmit(Request& request) {
  MeasureRoom();
  const int32_t need = PagesFor(request.known()) - request.hint.depth() + tree_.EvictableOn(request.hint);
  if (need > room_) return false;
  if (!adjuncts_.empty() && !CanHold(request)) return false;
  if (prefilling_.empty() && decoding_.empty()) return true;
  // A resumption needs a page more than it had, or it could be retracted again before it has made any progress.
  const int32_t growth = std::max(GrowthPages(request), request.retractions > 0 ? 1 : 0);
  return need + growth + growth_room_ <= room_;
}

bool Scheduler::MightAdmit(const Request& request) {
  MeasureRoom();
  const int32_t need = PagesFor(request.known()) - request.hint.depth();
  if (need > room_ || !CanHold(request, true)) return false;
  return (prefilling_.empty() && decoding_.empty()) || need + GrowthPages(request) + growth_room_ <= room_;
}

bool Scheduler::AdmitNext(PrefillShare& share) {
  // The window: the first few that are not waiting for a prefix being computed, up to one that was overtaken often enough.
  rows_scratch_.clear();
  for (auto next = waiting_.begin(); next != waiting_.end() && rows_scratch_.size() < static_cast<size_t>(config_.hit_window);) {
    Request& request = *next->second;
    ++next;
    if (ParkIfComputing(request)) continue;
    rows_scratch_.push_back(&request);
    if (request.overtaken >= config_.hit_window) break;
  }
  if (rows_scratch_.empty()) return false;
  const auto best = std::max_element(rows_scratch_.begin(), rows_scratch_.end(),
                                     [](const Request* a, const Request* b) { return a->reach < b->reach; });
  auto chosen = best;
  if (!CanAdmit(**best)) {
    chosen = std::find_if(rows_scratch_.begin(), rows_scratch_.end(), [&](Request* request) { return CanAdmit(*request); });
    if (chosen == rows_scratch_.end()) return false;
  }
  for (auto passed = rows_scratch_.begin(); passed != chosen; ++passed) ++(*passed)->overtaken;
  Request& request = **chosen;
  AdmitRequest(request);
  PlanChunk(request, share);
  return true;
}

// REQUIRES: CanAdmit(request), a free slot.
void Scheduler::AdmitRequest(Request& request) {
  const int32_t depth = request.hint.depth();
  room_ -= PagesFor(request.known()) - depth + tree_.EvictableOn(request.hint);
  growth_room_ += GrowthPages(request);
  waiting_.erase(request.order);

  Residence residence{slots_.Take(), tree_.Pin(request.hint), {}, 0, {}};
  const int32_t slot = residence.slot.id();
  occupancy_[static_cast<size_t>(slot)] = ++admissions_;
  index_scratch_.resize(static_cast<size_t>(depth));
  PrefixTree::CopyPages(residence.prefix, index_scratch_.data());
  for (int32_t index = 0; index < depth; ++index) plan_->AddDelta(slot, index, index_scratch_[static_cast<size_t>(index)]);
  const int32_t reach = std::max(depth, request.reach);
  request.load_ops.clear();
  request.load_failed = false;
  // What of the prefix the device has alone, so that a hit of the host is told from one without it.
  int32_t on_device = depth;
  if (!adjuncts_.empty()) {
    if (tiers_) on_device = ResumableDepth(request.hashes, depth, false);
    Hold(request, residence, reach);
  }
  if (host_.on() && depth > 0) {
    host_.Touch(request.hashes[static_cast<size_t>(depth - 1)]);
    if (config_.write_policy == WritePolicy::kSelective && MissingOnHost(residence.prefix, 0) > 0) QueueWrite(&request, residence.prefix, 0);
  }
  if (config_.write_policy == WritePolicy::kSelective && !adjuncts_.empty()) QueueCopies(request, reach, nullptr);
  if (reach > depth) LoadBack(request, residence, depth, reach);
  request.load_unsettled = request.loading();

  const auto full_pages = static_cast<int32_t>(request.hashes.size());
  PrefixClaim claim = inflight_prefixes_.Claim(request.hashes, depth, full_pages);
  request.computed = reach * page_size_;
  request.hint = {};
  request.reach = 0;
  request.new_in_slot = true;
  if (request.cached_tokens < 0) {
    request.cached_tokens = request.computed;
    request.first_scheduled_us = now_us_;
    totals_.prompt_tokens_queried += request.prompt_tokens;
    totals_.prefix_hit_tokens += request.computed;
    request.first_load_tokens = (reach - on_device) * page_size_;
    request.host_tokens = request.first_load_tokens;
    request.storage_tokens = std::max(0, std::min(reach, request.fetch_end) - std::max(on_device, request.fetch_begin)) * page_size_;
    totals_.host_hit_tokens += request.host_tokens;
    totals_.storage_hit_tokens += request.storage_tokens;
    request.hit_cut = CutOf(request, reach);
    ++totals_.hits_cut[static_cast<size_t>(request.hit_cut)];
  } else {
    request.retracted_us += now_us_ - request.retracted_since_us;
  }
  prefilling_.emplace(request.order, &request);
  ForgetPromises();
  Apply(request, Admit{std::move(residence), std::move(claim), request.known()});
}

// REQUIRES: the host has pages [from, to); its first row is planned next.
void Scheduler::LoadBack(Request& request, Residence& residence, int32_t from, int32_t to) {
  const int64_t id = next_op_++;
  LoadBackOp op;
  op.owner = {request.id, request.order.arrival};
  const int32_t row = plan_->num_rows();
  for (int32_t index = from; index < to; ++index) {
    op.host.push_back(host_.Pin(request.hashes[static_cast<size_t>(index)]));
    op.device.push_back(TakePage());
    plan_->AddDelta(residence.slot.id(), index, op.device.back().id());
    plan_->load_back.op.Push(id);
    plan_->load_back.group.Push(0);
    plan_->load_back.host.Push(op.host.back().page());
    plan_->load_back.device.Push(op.device.back().id());
    plan_->load_back.row.Push(row);
  }
  residence.loading = to - from;
  request.load_ops.push_back(id);
  ops_.emplace(id, std::move(op));
  ++moving_;
}

}  // namespace tokenspeed
