// Window and recurrent groups: where a prefix can be resumed in all of them, and what a request holds in each.
//
// With full groups alone nothing here is reached.
#include <algorithm>
#include <cassert>

#include "scheduler/scheduler.h"

namespace tokenspeed {

namespace {

// Whether the tree has more of this prompt behind `block`, of others, but not up to the next place where a state can be kept.
bool PartBefore(PrefixTree& tree, const std::vector<PageHash>& hashes, int32_t block, int32_t interval) {
  const int32_t shared = tree.Match(hashes, block + interval).depth();
  return shared > block && shared < std::min(block + interval, static_cast<int32_t>(hashes.size()));
}

}  // namespace

// ---- matching ----

// The page index of the first block that a token at `position` reads.
int32_t Scheduler::WindowBegin(const AdjunctGroup& group, int32_t position) const {
  return std::max(0, position - group.window + 1) / page_size_;
}

Scheduler::Blocks Scheduler::NeededAt(const AdjunctGroup& group, int32_t boundary) const {
  if (group.kind == CacheGroupKind::kRecurrent) return {std::max(0, boundary - 1), boundary};
  return {std::min(boundary, WindowBegin(group, boundary * page_size_)), boundary};
}

int32_t Scheduler::ResumableDepth(const std::vector<PageHash>& hashes, int32_t depth, bool or_host, int32_t* cut_by) const {
  const auto has = [&](const AdjunctGroup& group, int32_t block) { return group.Has(hashes[static_cast<size_t>(block)], or_host); };
  return CommonBoundary(depth, has, cut_by);
}

bool Scheduler::BoundaryBetween(int32_t depth, int32_t limit) const {
  return std::ranges::all_of(adjuncts_, [&](const AdjunctGroup& group) {
    return group.kind != CacheGroupKind::kRecurrent || limit - limit % (group.interval / page_size_) > depth;
  });
}

// Why its prefix ends at `reach` where the full groups have it up to `full`.
HitCut Scheduler::CutByGroup(Request& request, int32_t reach, int32_t full) {
  if (ResumableDepth(request.hashes, full, true, &request.hit_cut_group) == full) return HitCut::kNew;
  const auto cut = std::ranges::find_if(adjuncts_, [&](const AdjunctGroup& group) { return group.index == request.hit_cut_group; });
  if (cut->kind == CacheGroupKind::kWindow) return HitCut::kEvicted;  // every block had its page
  // No state is kept between two multiples of the interval, nor where there was no room for it.
  const int32_t step = cut->interval / page_size_;
  for (int32_t at = full - full % step; at > reach; at -= step) {
    if (cut->cache.Evicted(request.hashes[static_cast<size_t>(at - 1)])) return HitCut::kEvicted;
  }
  return HitCut::kBoundary;
}

// ---- admission ----

// Pages that it needs at most to go on token by token.
int32_t Scheduler::SteadyPages(const AdjunctGroup& group, const Request& request) const {
  return std::min(group.steady, PagesFor(request.prompt_tokens + request.output_limit));
}

int32_t Scheduler::OwedPages(const AdjunctGroup& group, const Request& request) const {
  const AdjunctHold& hold = ResidenceOf(const_cast<RequestState&>(request.state))->holds[group.place];
  if (group.kind == CacheGroupKind::kRecurrent) return hold.state ? 0 : 1;
  return std::max(0, SteadyPages(group, request) - static_cast<int32_t>(hold.pages.size()));
}

// What the running ones may still take to go on.
int32_t Scheduler::PromisedPages(const AdjunctGroup& group) const {
  // Once a plan and change: rows that keep a state ask for each, and change nothing.
  if (group.promised >= 0) return group.promised;
  int32_t pages = 0;
  for (const auto& [order, request] : prefilling_) pages += OwedPages(group, *request);
  for (const Request* request : decoding_) pages += request == nullptr ? 0 : OwedPages(group, *request);
  if (step_ != nullptr) group.promised = pages;
  return pages;
}

// REQUIRES: the reach is fresh. `at_best`: whatever it is, and whatever is on its way.
bool Scheduler::CanHold(const Request& request, bool at_best) const {
  const int32_t boundary = request.reach;
  for (const AdjunctGroup& group : adjuncts_) {
    if (!at_best && !group.coming.empty()) {
      // What a load for a session brings is waited for, not brought twice.
      const Blocks needed = NeededAt(group, boundary);
      for (int32_t block = needed.begin; block < needed.end; ++block) {
        if (group.coming.contains(request.hashes[static_cast<size_t>(block)])) return false;
      }
    }
    int32_t need = 1;
    if (group.kind == CacheGroupKind::kRecurrent) {
      // The state that it continues takes a page from what is available, whether it is here or comes from the host.
      const bool taken = !at_best && boundary > 0 && !group.cache.Used(request.hashes[static_cast<size_t>(boundary - 1)]);
      need += taken ? 1 : 0;
    } else {
      // Pages that others use as well are counted too: this one may be left with them.
      need = SteadyPages(group, request);
    }
    if (need + PromisedPages(group) > group.cache.available()) return false;
  }
  return true;
}

// REQUIRES: the prefix was pinned just now, as far as the device has it; every group can resume at `boundary`.
void Scheduler::Hold(Request& request, Residence& residence, int32_t boundary) {
  residence.holds.resize(adjuncts_.size());
  for (AdjunctGroup& group : adjuncts_) {
    AdjunctHold& hold = residence.holds[group.place];
    const bool window = group.kind == CacheGroupKind::kWindow;
    const Blocks needed = NeededAt(group, boundary);
    hold.begin = window ? needed.begin : 0;
    hold.written = boundary;
    std::vector<int32_t> missing;
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      const PageHash& hash = request.hashes[static_cast<size_t>(block)];
      const bool here = group.cache.Has(hash);
      if (here) group.host.Touch(hash);
      else missing.push_back(block);
      if (window) hold.pages.push_back({here ? group.cache.Pin(hash) : AdjunctPin(), {}, -1});
      else if (here) hold.from = group.cache.Pin(hash);
    }
    // What is here is pinned: the pages for the others are not taken from it.
    if (!missing.empty()) LoadHolds(request, residence, group, std::move(missing));
    for (size_t at = 0; at < hold.pages.size(); ++at) {
      plan_->AddDelta(residence.slot.id(), hold.begin + static_cast<int32_t>(at), hold.pages[at].id(), group.index);
    }
  }
}

// ---- rows ----

// Pages that a row up to position `end` lacks.
int32_t Scheduler::LackingPages(const AdjunctGroup& group, const Residence& residence, int32_t end) const {
  if (group.kind == CacheGroupKind::kRecurrent) return 0;
  return std::max(0, PagesFor(end) - residence.holds[group.place].end());
}

// The position that a chunk may reach by this group's pages, without taking what others need to go on.
int32_t Scheduler::ReachIn(const AdjunctGroup& group, const Request& request, const Residence& residence) const {
  constexpr int32_t kAnywhere = 1 << 30;
  const AdjunctHold& hold = residence.holds[group.place];
  const int32_t available = group.cache.available();
  if (group.kind == CacheGroupKind::kRecurrent) return hold.state || available > 0 ? kAnywhere : 0;
  const int32_t owed = OwedPages(group, request);
  const int32_t spare = available - (PromisedPages(group) - owed);
  const int64_t reach = int64_t{hold.end() + std::max(spare, std::min(available, owed))} * page_size_;
  return static_cast<int32_t>(std::min<int64_t>(reach, kAnywhere));
}

// The tokens that a chunk from `begin` on may have: to where pages reach, and to the next state that is kept.
int32_t Scheduler::ChunkBound(const Request& request, const Residence& residence, int32_t begin) const {
  int32_t end = begin + config_.max_batched_tokens + config_.max_step_tokens();
  for (const AdjunctGroup& group : adjuncts_) {
    end = std::min(end, ReachIn(group, request, residence));
    if (group.kind == CacheGroupKind::kRecurrent && config_.enable_prefix_caching) {
      end = std::min(end, begin - begin % group.interval + group.interval);
    }
  }
  return end - begin;
}

// REQUIRES: a page is available for each that is lacking.
void Scheduler::GrowHolds(Residence& residence, int32_t end) {
  for (AdjunctGroup& group : adjuncts_) {
    AdjunctHold& hold = residence.holds[group.place];
    for (int32_t pages = LackingPages(group, residence, end); pages > 0; --pages) {
      hold.pages.push_back({{}, group.cache.Take(), -1});
      plan_->AddDelta(residence.slot.id(), hold.end() - 1, hold.pages.back().id(), group.index);
      group.promised = -1;
    }
  }
}

// The states of a row of `tokens` that begins at `begin`: its own one, and a copy to go on in where the one there is to be kept.
void Scheduler::PrepareStates(Request& request, Residence& residence, int32_t begin, int32_t tokens) {
  for (AdjunctGroup& group : adjuncts_) {
    if (group.kind != CacheGroupKind::kRecurrent) continue;
    AdjunctHold& hold = residence.holds[group.place];
    if (!hold.state) {
      hold.state = group.cache.Take();
      group.promised = -1;
      plan_->AddDelta(residence.slot.id(), 0, hold.state.id(), group.index);
      const int32_t from = hold.from ? hold.from.page() : hold.from_loaded ? hold.from_loaded.id() : hold.from_loading;
      if (from >= 0) plan_->AddStateOp(StateKind::kCopy, group.index, from, hold.state.id());
      else plan_->AddStateOp(StateKind::kZero, group.index, -1, hold.state.id());
    } else if (config_.enable_prefix_caching && begin % group.interval == 0) {
      // The block's name is known once the tokens are; with a step in flight they may not be.
      const auto block = static_cast<size_t>(begin / page_size_ - 1);
      const bool known = block < request.hashes.size() && group.cache.Has(request.hashes[block]);
      // A checkpoint takes no page that a running request needs. One in the middle of a prompt takes none either that others may well go
      // on from, but where others' prompts part from this one before the next: there the next of them goes on.
      const bool last = int64_t{begin} + group.interval > request.known();
      const bool there = !known && group.cache.available() > PromisedPages(group);
      if (there && (last || group.cache.disposable() || PartBefore(tree_, request.hashes, begin / page_size_, group.interval / page_size_))) {
        PageLease next = group.cache.Take();
        plan_->AddDelta(residence.slot.id(), 0, next.id(), group.index);
        plan_->AddStateOp(StateKind::kCopy, group.index, hold.state.id(), next.id());
        // While what stands before it comes back from the host, the tree has not its block.
        const bool published = request.computed == begin && static_cast<int32_t>(block) < residence.prefix.depth();
        if (published) hold.from = PublishState(request, group, begin, hold.state);
        else hold.kept.push_back({begin, std::move(hold.state)});
        hold.state = std::move(next);
      }
    }
    hold.state_at = begin + tokens;
  }
}

// ---- results ----

AdjunctPin Scheduler::PublishPage(const Request& request, AdjunctGroup& group, int32_t block, PageLease& page) {
  const auto at = static_cast<size_t>(block);
  return group.cache.Publish(request.hashes[at], page, block > 0 ? request.hashes[at - 1] : PageHash{}, block);
}

// REQUIRES: the block before `position` stands in the tree.
AdjunctPin Scheduler::PublishState(Request& request, AdjunctGroup& group, int32_t position, PageLease& page) {
  const int32_t block = position / page_size_ - 1;
  AdjunctPin pin = PublishPage(request, group, block, page);
  if (!pin) return pin;
  // Of prompts, which others may share; this walks the prompt.
  const bool parts = position < request.prompt_tokens && PartBefore(tree_, request.hashes, block + 1, group.interval / page_size_);
  if (parts) group.cache.Warm(pin.hash());
  if (config_.write_policy == WritePolicy::kThrough) QueueCopy(group, pin.hash(), &request);
  return pin;
}

// What a step has written belongs to the prefix now. REQUIRES: blocks [.., full) of the request stand in the tree.
void Scheduler::PublishHolds(Request& request, Residence& residence, int32_t first, int32_t full) {
  for (AdjunctGroup& group : adjuncts_) {
    AdjunctHold& hold = residence.holds[group.place];
    for (int32_t block = std::max(first, hold.begin); block < std::min(full, hold.end()); ++block) {
      AdjunctPage& page = hold.pages[static_cast<size_t>(block - hold.begin)];
      // Where another's page stands there already, this one stays its own until the window has passed it.
      if (page.own) page.shared = PublishPage(request, group, block, page.own);
    }
  }
}

// After the row that brought the request to `computed`: gives back what no step of it reads any more.
void Scheduler::SettleHolds(Request& request, Residence& residence) {
  for (AdjunctGroup& group : adjuncts_) {
    AdjunctHold& hold = residence.holds[group.place];
    if (group.kind == CacheGroupKind::kWindow) {
      SettleWindow(request, residence, group);
      continue;
    }
    hold.from = {};
    if (!request.loading()) hold.from_loaded = {};
    PublishKept(request, residence, group);
  }
}

void Scheduler::SettleWindow(Request& request, Residence& residence, AdjunctGroup& group) {
  AdjunctHold& hold = residence.holds[group.place];
  // Past what was accepted, except what a step in flight may write; and behind the window, which begins where the earliest step in flight
  // does.
  const auto keep = static_cast<size_t>(std::max(0, PagesFor(request.upper()) - hold.begin));
  if (hold.pages.size() > keep) hold.pages.resize(keep);
  const int32_t behind = std::min(WindowBegin(group, request.computed), hold.end()) - hold.begin;
  if (behind > 0) {
    hold.pages.erase(hold.pages.begin(), hold.pages.begin() + behind);
    hold.begin += behind;
  }
  if (config_.write_policy != WritePolicy::kThrough || !group.host.on()) return;
  // Those of the window where the row ended, for there one may go on: not all that a long chunk has passed. The same prompt again goes on
  // before its last token, which may be a block earlier.
  const int32_t before_last = (request.prompt_tokens - 1) / page_size_ * page_size_;
  const int32_t first = request.computed == request.prompt_tokens ? WindowBegin(group, before_last) : hold.begin;
  for (int32_t block = std::max(first, hold.written); block < std::min(hold.end(), residence.prefix.depth()); ++block) {
    QueueCopy(group, request.hashes[static_cast<size_t>(block)], &request);
  }
  hold.written = std::max(hold.written, residence.prefix.depth());
}

// The states that are complete, and whose block stands in the tree.
void Scheduler::PublishKept(Request& request, Residence& residence, AdjunctGroup& group) {
  AdjunctHold& hold = residence.holds[group.place];
  const int32_t end = std::min(request.computed, residence.prefix.depth() * page_size_);
  while (!hold.kept.empty() && hold.kept.front().position <= end) {
    AdjunctHold::Kept kept = std::move(hold.kept.front());
    hold.kept.erase(hold.kept.begin());
    AdjunctPin pin = PublishState(request, group, kept.position, kept.page);
    // The step in flight copies it.
    if (request.inflight_rows > 0) deferred_adjuncts_.push_back({steps_.back().plan_id, group.place, std::move(pin), std::move(kept.page)});
  }
}

// It gives up what it holds: a state that stands where one can be kept is kept, and what the next turn goes on from is not what it left
// behind. REQUIRES: no step of it in flight.
void Scheduler::KeepStates(Request& request, Residence& residence) {
  if (!config_.enable_prefix_caching || request.computed == 0) return;
  for (AdjunctGroup& group : adjuncts_) {
    if (group.kind != CacheGroupKind::kRecurrent) continue;
    AdjunctHold& hold = residence.holds[group.place];
    if (!hold.state || hold.state_at != request.computed || request.computed % group.interval != 0) continue;
    if (request.computed / page_size_ <= residence.prefix.depth()) (void)PublishState(request, group, request.computed, hold.state);
  }
  const int32_t boundary = ResumableDepth(request.hashes, residence.prefix.depth(), false);
  for (AdjunctGroup& group : adjuncts_) {
    const Blocks needed = NeededAt(group, boundary);
    for (int32_t block = needed.begin; block < needed.end; ++block) group.cache.Warm(request.hashes[static_cast<size_t>(block)]);
  }
}

// Pages of this group that retracting the request would make available.
int32_t Scheduler::HeldAlone(const AdjunctGroup& group, const Residence& residence) const {
  const AdjunctHold& hold = residence.holds[group.place];
  const auto alone = std::count_if(hold.pages.begin(), hold.pages.end(), [](const AdjunctPage& page) { return !page.shared || page.shared.sole(); });
  return static_cast<int32_t>(alone) + (hold.state ? 1 : 0) + static_cast<int32_t>(hold.kept.size()) + (hold.from && hold.from.sole() ? 1 : 0) +
         (hold.from_loaded ? 1 : 0);
}

}  // namespace tokenspeed
