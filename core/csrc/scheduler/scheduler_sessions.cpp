// Prefixes kept between the turns of a session: a client that calls a tool comes back with what it had and a little more.
#include <algorithm>

#include "scheduler/scheduler.h"

namespace tokenspeed {

// REQUIRES: no step of it in flight; it still has its pages.
//
// A rank, not a lock: when nothing else is left these pages go as well, and the host has them. All sessions together keep a bounded
// share of the pool, so nobody holds the cache by asking for long times; nobody holds that share either (MakeRoomForSession).
void Scheduler::RetainSession(Request& request, FinishReason reason) {
  const bool good = reason == FinishReason::kStop || reason == FinishReason::kLength;
  if (request.session < 0 || !good || !config_.enable_prefix_caching) return;
  ForgetSession(request.session);  // the turn before is part of this one, or was another's
  const Residence& residence = *ResidenceOf(request.state);
  const int32_t pages = residence.prefix.depth();
  if (request.retain_us <= 0 || pages == 0 || !FitsAmongSessions(request.seed, pages)) return;

  const int32_t boundary = adjuncts_.empty() ? pages : ResumableDepth(request.hashes, pages);
  Session session{{request.hashes.begin(), request.hashes.begin() + pages}, {}, boundary, request.seed, request.adapter,
                  now_us_ + request.retain_us};
  if (events_.on()) {
    session.tokens.resize(static_cast<size_t>(pages) * static_cast<size_t>(page_size_));
    request.CopyTokens(0, pages * page_size_, session.tokens.data());
  }
  tree_.Keep(residence.prefix, session.until_us);
  if (host_.on() && MissingOnHost(residence.prefix, 0) > 0) QueueWrite(&request, residence.prefix, 0);
  if (!adjuncts_.empty()) {
    QueueCopies(request, boundary, nullptr);
    KeepHolds(session, true);
  }
  CountSession(request.session, sessions_.emplace(request.session, std::move(session)).first->second, true);
  while (SessionsKeepTooMuch()) ForgetSession(NextToGiveWay(request.session));
}

bool Scheduler::SessionsKeepTooMuch() const {
  return static_cast<int64_t>(retained_.size()) > RetainBound() || std::ranges::any_of(adjuncts_, [&](const AdjunctGroup& group) {
           return group.cache.kept() > ShareOf(group.cache.total());
         });
}

bool Scheduler::MayKeep(const AdjunctGroup& group, int32_t boundary) const { return NeededAt(group, boundary).count() <= ShareOf(group.cache.total()); }

// What it needs at its boundary in the window and recurrent groups, above others.
void Scheduler::KeepHolds(const Session& session, bool kept) {
  for (AdjunctGroup& group : adjuncts_) {
    if (!MayKeep(group, session.boundary)) continue;
    const Blocks needed = NeededAt(group, session.boundary);
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      const PageHash& hash = session.hashes[static_cast<size_t>(block)];
      if (kept) {
        if (group.cache.Keep(hash) && group.host.on()) group.host.Keep(hash);
      } else if (group.cache.Unkeep(hash) && group.host.on()) {
        group.host.Unkeep(hash);
      }
    }
  }
}

int64_t Scheduler::RetainBound() const noexcept { return ShareOf(pages_.total()); }

// One that alone would keep as much as any other tenant, and does not fit beside those, is not kept; its tenant loses nothing for it.
bool Scheduler::FitsAmongSessions(const PageHash& tenant, int64_t pages) const {
  const auto own = tenants_.find(tenant);
  const int64_t others = static_cast<int64_t>(retained_.size()) - (own == tenants_.end() ? 0 : own->second.pages);
  const auto other = std::find_if(tenants_by_pages_.rbegin(), tenants_by_pages_.rend(), [&](const auto& entry) { return !(entry.second == tenant); });
  const int64_t others_most = other == tenants_by_pages_.rend() ? 0 : other->first;
  return pages <= RetainBound() && (pages < others_most || others + pages <= RetainBound());
}

// The tenant that keeps most gives way, first its session that ends first: many sessions of one tenant, or long times of theirs, do not
// push out another's few.
int64_t Scheduler::NextToGiveWay(int64_t newest) const {
  const Tenant& most = tenants_.at(tenants_by_pages_.rbegin()->second);
  const auto first = most.ends.begin();
  return first->second == newest && most.ends.size() > 1 ? std::next(first)->second : first->second;
}

int32_t Scheduler::CountSession(int64_t id, const Session& session, bool kept) {
  int32_t shared = 0;
  for (const PageHash& hash : session.hashes) {
    const auto found = retained_.try_emplace(hash, 0).first;
    found->second += kept ? 1 : -1;
    if (found->second > (kept ? 1 : 0)) {
      ++shared;
    } else if (kept) {
      if (host_.on()) host_.Keep(hash);
    } else {
      retained_.erase(found);
      if (host_.on()) host_.Unkeep(hash);
    }
  }
  const int64_t own = static_cast<int64_t>(session.hashes.size()) - shared;
  const std::pair<int64_t, int64_t> end{session.until_us, id};
  Tenant& tenant = tenants_[session.tenant];
  tenants_by_pages_.erase({tenant.pages, session.tenant});
  tenant.pages += kept ? own : -own;
  if (kept) {
    session_ends_.insert(end);
    tenant.ends.insert(end);
  } else {
    session_ends_.erase(end);
    tenant.ends.erase(end);
  }
  if (tenant.ends.empty()) tenants_.erase(session.tenant);
  else tenants_by_pages_.emplace(tenant.pages, session.tenant);
  return shared;
}

// What others keep too is the beginning of its path, for a page's hash names all before it.
void Scheduler::ForgetSession(int64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  if (!adjuncts_.empty()) KeepHolds(found->second, false);
  tree_.Unkeep(found->second.hashes, CountSession(id, found->second, false));
  sessions_.erase(found);
}

void Scheduler::ExpireSessions() {
  while (!session_ends_.empty() && session_ends_.begin()->first <= now_us_) ForgetSession(session_ends_.begin()->second);
}

bool Scheduler::ReleaseSession(int64_t session) {
  if (!sessions_.contains(session)) return false;
  ForgetSession(session);
  return true;
}

std::pair<PrefixTree::Position, int32_t> Scheduler::ReachOf(const Session& session) {
  const auto limit = adjuncts_.empty() ? static_cast<int32_t>(session.hashes.size()) : session.boundary;
  const PrefixTree::Position position = tree_.Match(session.hashes, limit);
  return {position, host_.Match(session.hashes, position.depth(), limit)};
}

int32_t Scheduler::PrefetchSession(int64_t session, int64_t now_us) {
  now_us_ = std::max(now_us_, now_us);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return -1;
  if (!tiers_) return 0;
  Session& kept = found->second;
  const int32_t limit = kept.boundary;
  const auto [position, reach] = ReachOf(kept);
  int32_t pages = QueueSessionLoad(session);
  if (!config_.l3) return pages;
  const int32_t from = ResumableDepth(kept.hashes, reach);
  if (!WorthAsking(from, limit)) return pages;
  if (kept.fetch < 0) kept.fetch = BeginFetch({.owner = {.session = session}, .limit = limit, .from = from, .begin = reach});
  pages = limit - position.depth();
  for (const AdjunctGroup& group : adjuncts_) {
    const Blocks needed = NeededAt(group, limit);
    for (int32_t block = needed.begin; block < needed.end; ++block) pages += group.cache.Has(kept.hashes[static_cast<size_t>(block)]) ? 0 : 1;
  }
  return pages;
}

int32_t Scheduler::QueueSessionLoad(int64_t id) {
  const Session& session = sessions_.at(id);
  const auto [position, reach] = ReachOf(session);
  const int32_t pages = reach - position.depth() + (reach == session.boundary ? HoldsLacking(session) : 0);
  const bool asked = std::ranges::any_of(pending_sessions_, [&](const PendingSession& pending) { return pending.id == id; });
  if (pages > 0 && !asked) pending_sessions_.push_back({id, pages, now_us_ + kSessionPatienceUs});
  return pages;
}

// After the rows of the plan have their pages; never more than half of what is left, so that the next plan finds room. Pages on their way
// to the host are held by that for a moment: a prefetch that would be cut short by it waits.
void Scheduler::BeginSessionLoads() {
  for (const PendingSession& pending : std::exchange(pending_sessions_, {})) {
    const auto found = sessions_.find(pending.id);
    if (found == sessions_.end()) continue;
    if (!adjuncts_.empty()) {
      const PrefixTree::Position whole = ReachOf(found->second).first;
      if (whole.depth() == found->second.boundary) {
        if (!LoadSessionHolds(found->second, whole) && now_us_ < pending.patient_until_us) pending_sessions_.push_back(pending);
        continue;
      }
    }
    const int32_t room = (Available() + 1) / 2;
    const Session& session = found->second;
    const auto [position, reach] = ReachOf(session);
    const int32_t begin = position.depth();
    // What another transfer or a request brings already is not brought twice.
    const bool coming = begin < reach && inflight_prefixes_.Computing(session.hashes[static_cast<size_t>(begin)]);
    // Without room nothing frees but a transfer or a running request; both are waited for as long.
    if (now_us_ < pending.patient_until_us && (coming || room == 0 || (room < pending.pages && PagesLeaving() > 0))) {
      pending_sessions_.push_back(pending);
      continue;
    }
    LoadBackOp made;
    made.pin = tree_.Pin(position);
    const int32_t end = std::min(reach, begin + std::min(room, Available()));  // less than before where the pin took some
    if (end <= begin) continue;
    made.hashes.assign(session.hashes.begin(), session.hashes.begin() + end);
    if (events_.on()) made.tokens.assign(session.tokens.begin(), session.tokens.begin() + ptrdiff_t{end} * page_size_);
    made.adapter = session.adapter;
    if (!adjuncts_.empty() && end == session.boundary) made.session = pending.id;
    const int64_t op_id = next_op_++;
    for (int32_t index = begin; index < end; ++index) {
      made.host.push_back(host_.Pin(made.hashes[static_cast<size_t>(index)]));
      made.device.push_back(TakePage());
      plan_->load_back.op.Push(op_id);
      plan_->load_back.group.Push(0);
      plan_->load_back.host.Push(made.host.back().page());
      plan_->load_back.device.Push(made.device.back().id());
      plan_->load_back.row.Push(-1);
    }
    auto& op = std::get<LoadBackOp>(ops_.emplace(op_id, std::move(made)).first->second);
    op.claim = inflight_prefixes_.Claim(op.hashes, begin, end);
    ++moving_;
  }
}

int32_t Scheduler::HoldsLacking(const Session& session) const {
  int32_t pages = 0;
  for (const AdjunctGroup& group : adjuncts_) {
    const Blocks needed = NeededAt(group, session.boundary);
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      const PageHash& hash = session.hashes[static_cast<size_t>(block)];
      if (group.cache.Has(hash)) continue;
      if (!group.host.Ready(hash)) return 0;
      ++pages;
    }
  }
  return pages;
}

// Once its blocks are there, for a page of a window or a state stands for one that the tree has. Half of the room that is not promised
// has to hold all of them: the next plan finds room too.
bool Scheduler::LoadSessionHolds(const Session& session, const PrefixTree::Position& position) {
  if (HoldsLacking(session) == 0) return true;
  // What is here is not to give its place to what comes.
  std::vector<AdjunctPin> here;
  std::vector<std::vector<int32_t>> missing(adjuncts_.size());
  for (AdjunctGroup& group : adjuncts_) {
    const Blocks needed = NeededAt(group, session.boundary);
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      const PageHash& hash = session.hashes[static_cast<size_t>(block)];
      if (group.cache.Has(hash)) here.push_back(group.cache.Pin(hash));
      else if (!group.coming.contains(hash)) missing[group.place].push_back(block);
    }
  }
  const bool room = std::ranges::all_of(adjuncts_, [&](const AdjunctGroup& group) {
    const auto pages = static_cast<int32_t>(missing[group.place].size());
    return pages == 0 || pages <= (group.cache.available() - PromisedPages(group) + 1) / 2;
  });
  if (!room) return false;
  const NodePin pin = tree_.Pin(position);
  for (AdjunctGroup& group : adjuncts_) {
    if (missing[group.place].empty()) continue;
    const int64_t id = next_op_++;
    AdjunctLoadOp op{{}, group.place, std::move(missing[group.place]), {}, {}, {}, {}};
    op.pin = tree_.PinAgain(pin);
    for (const int32_t block : op.blocks) {
      const auto at = static_cast<size_t>(block);
      op.hashes.emplace_back(session.hashes[at], block > 0 ? session.hashes[at - 1] : PageHash{});
      op.host.push_back(group.host.Pin(session.hashes[at]));
      op.device.push_back(group.cache.Take());
      group.coming.insert(session.hashes[at]);
      plan_->load_back.op.Push(id);
      plan_->load_back.group.Push(group.index);
      plan_->load_back.host.Push(op.host.back().page());
      plan_->load_back.device.Push(op.device.back().id());
      plan_->load_back.row.Push(-1);
    }
    ops_.emplace(id, std::move(op));
    ++moving_;
  }
  return true;
}

}  // namespace tokenspeed
