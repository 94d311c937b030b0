// Prefixes kept between the turns of a session: a client that calls a tool comes back with what it had and a little more.
#include <algorithm>

#include "scheduler/scheduler.h"

namespace tokenspeed {

namespace {

constexpr int64_t kSessionPatienceUs = 1'000'000;  // what a prefetch waits for room before it takes what there is

}  // namespace

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

  Session session{{request.hashes.begin(), request.hashes.begin() + pages}, {}, request.seed, request.adapter, now_us_ + request.retain_us};
  if (events_.on()) {
    session.tokens.resize(static_cast<size_t>(pages) * static_cast<size_t>(page_size_));
    request.CopyTokens(0, pages * page_size_, session.tokens.data());
  }
  tree_.Keep(residence.prefix, session.until_us);
  if (host_.on() && MissingOnHost(residence.prefix, 0) > 0) QueueWrite(&request, residence.prefix, 0);
  CountSession(request.session, sessions_.emplace(request.session, std::move(session)).first->second, true);
  while (static_cast<int64_t>(retained_.size()) > RetainBound()) ForgetSession(NextToGiveWay(request.session));
}

int64_t Scheduler::RetainBound() const noexcept { return int64_t{pages_.total()} * config_.retain_percent / 100; }

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
  const auto limit = static_cast<int32_t>(session.hashes.size());
  const PrefixTree::Position position = tree_.Match(session.hashes, limit);
  return {position, host_.Match(session.hashes, position.depth(), limit)};
}

int32_t Scheduler::PrefetchSession(int64_t session, int64_t now_us) {
  now_us_ = std::max(now_us_, now_us);
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return -1;
  if (!host_.on()) return 0;
  const auto limit = static_cast<int32_t>(found->second.hashes.size());
  const int32_t reach = ReachOf(found->second).second;
  const int32_t pages = QueueSessionLoad(session);
  if (!config_.l3 || int64_t{limit - reach} * page_size_ < config_.prefetch_threshold) return pages;
  if (!std::exchange(found->second.asked, true)) pending_lookups_.push_back({{.session = session}, reach, limit});
  return pages + limit - reach;
}

int32_t Scheduler::QueueSessionLoad(int64_t id) {
  const auto [position, reach] = ReachOf(sessions_.at(id));
  const int32_t pages = reach - position.depth();
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

}  // namespace tokenspeed
