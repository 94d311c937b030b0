// Looking at a scheduler from outside: statistics, one request, and the invariants.
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "scheduler/scheduler.h"

namespace tokenspeed {

SchedulerStats Scheduler::Stats() const {
  SchedulerStats stats = totals_;
  stats.prefetching = In(StateName::kPrefetching);
  stats.waiting = In(StateName::kSubmitted) + stats.prefetching + In(StateName::kPrefetchDone);
  stats.running = NumRunning();
  stats.leaving = In(StateName::kDraining) + In(StateName::kAborting);
  stats.retracted = In(StateName::kRetracted) + In(StateName::kRetracting);
  stats.writing_back = In(StateName::kWritingBack);
  stats.parked = stats.waiting + In(StateName::kRetracted) - stats.prefetching - static_cast<int64_t>(waiting_.size());
  stats.slots_free = slots_.available();
  const auto pages = [&](int32_t total, int32_t free, int32_t cached) {
    stats.pages_total.push_back(total);
    stats.pages_free.push_back(free);
    stats.pages_cached.push_back(cached);
    stats.pages_active.push_back(total - free - cached);
  };
  auto adjunct = adjuncts_.begin();
  for (const CacheGroupConfig& group : config_.groups) {
    const bool full = group.kind == CacheGroupKind::kFull;
    if (full) {
      pages(pages_.total(), pages_.available(), tree_.evictable());
    } else {
      pages(adjunct->cache.total(), adjunct->cache.free(), adjunct->cache.evictable());
      stats.evicted_pages += adjunct->cache.evicted();
    }
    const HostCache& host = full ? host_ : adjunct->host;
    stats.host_pages_total.push_back(host.total());
    stats.host_pages_free.push_back(host.available());
    stats.host_pages_cached.push_back(host.ready());
    stats.host_pages_moving.push_back(host.pinned());
    if (!full) ++adjunct;
  }
  stats.host_evicted_pages = host_.evicted();
  for (const AdjunctGroup& group : adjuncts_) stats.host_evicted_pages += group.host.evicted();
  stats.cache_ops_in_flight = cache_ops_in_flight();
  stats.cache_ops_pending = cache_ops_pending();
  stats.sessions = static_cast<int64_t>(sessions_.size());
  stats.retained_pages = static_cast<int64_t>(retained_.size());
  stats.expected_output = output_lengths_.Mean();
  stats.context_weight = prefill_cost_.weight();
  return stats;
}

std::optional<RequestInfo> Scheduler::InfoOf(int64_t id) const {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return std::nullopt;
  const Request& request = *found->second;
  RequestInfo info;
  info.id = id;
  info.state = NameOf(request.state);
  if (const auto* finished = std::get_if<Finished>(&request.state)) info.finish_reason = finished->reason;
  if (const auto* draining = std::get_if<Draining>(&request.state)) info.finish_reason = draining->reason;
  if (const auto* writing = std::get_if<WritingBack>(&request.state)) info.finish_reason = writing->reason;
  info.priority = request.priority;
  info.multimodal = request.multimodal;
  info.prompt_tokens = request.prompt_tokens;
  info.output_tokens = request.output_tokens;
  info.computed_tokens = request.computed;
  info.cached_tokens = request.cached_tokens < 0 ? 0 : request.cached_tokens;
  info.host_tokens = request.host_tokens;
  info.storage_tokens = request.storage_tokens;
  info.hit_cut = request.hit_cut;
  info.hit_cut_group = request.hit_cut_group;
  info.retractions = request.retractions;
  info.queued_us = request.queued_us;
  info.first_scheduled_us = request.first_scheduled_us;
  info.retracted_us = request.retracted_us;
  return info;
}

// Every page of a window or recurrent group is in one place, and a shared one stands for a block that the tree has.
void Scheduler::CheckAdjuncts() const {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("scheduler: " + what);
  };
  std::unordered_set<PageHash, PageHashHasher> blocks;
  tree_.VisitHashes([&](const PageHash& hash) { blocks.insert(hash); });
  for (const AdjunctGroup& group : adjuncts_) {
    const std::string name = "group " + std::to_string(group.index) + ": ";
    std::vector<int32_t> owners(static_cast<size_t>(group.cache.total()), 0);
    const auto own = [&](int32_t page) { ++owners.at(static_cast<size_t>(page)); };
    std::unordered_map<int32_t, int32_t> pins;
    const auto pin = [&](const AdjunctPin& held) {
      if (held) ++pins[held.page()];
    };
    const auto lease = [&](const PageLease& held) {
      if (held) own(held.id());
    };
    std::set<std::pair<const Request*, int32_t>> loaded;
    size_t coming = 0;
    for (const auto& [id, op] : ops_) {
      if (const auto* write = std::get_if<AdjunctWriteOp>(&op); write != nullptr && write->place == group.place) {
        for (const AdjunctPin& copied : write->device) pin(copied);
      }
      const auto* load = std::get_if<AdjunctLoadOp>(&op);
      if (load == nullptr || load->place != group.place) continue;
      for (const PageLease& page : load->device) {
        lease(page);
        loaded.insert({Find(load->owner), page.id()});
      }
      for (const auto& [hash, parent] : load->hashes) {
        require(group.coming.contains(hash), name + "a load for a session brings what is not known to come");
        ++coming;
      }
    }
    require(coming == group.coming.size(), name + "what is said to come for sessions is not what their loads bring, each once");
    for (const PendingCopy& copy : pending_copies_) {
      if (copy.place != group.place) continue;
      for (const AdjunctPin& page : copy.pages) pin(page);
    }
    for (const auto& [id, owned] : requests_) {
      const std::string who = name + "request " + std::to_string(id) + ": ";
      const Residence* residence = ResidenceOf(const_cast<RequestState&>(owned->state));
      if (residence == nullptr) continue;
      require(residence->holds.size() == adjuncts_.size(), who + "it does not hold something of each group");
      const AdjunctHold& hold = residence->holds[group.place];
      const StateName state = NameOf(owned->state);
      const bool running = state == StateName::kPrefilling || state == StateName::kPrefillDone || state == StateName::kDecoding;
      for (const AdjunctPage& page : hold.pages) {
        const int kinds = (page.shared ? 1 : 0) + (page.own ? 1 : 0) + (page.loading >= 0 ? 1 : 0);
        require(kinds == 1, who + "a page is neither shared nor its own nor loaded, or more than one of these");
        require(page.loading < 0 || !running || loaded.contains({owned.get(), page.loading}), who + "a page is missing that nothing brings");
        pin(page.shared);
        lease(page.own);
        if (!page.shared || !running) continue;
        const auto block = static_cast<size_t>(hold.begin + (&page - hold.pages.data()));
        require(static_cast<int32_t>(block) < residence->prefix.depth(), who + "it shares a page whose block it does not pin");
        require(page.shared.hash() == owned->hashes[block], who + "it shares the page of another block");
      }
      pin(hold.from);
      if (hold.from && running) require(hold.from.depth() < residence->prefix.depth(), who + "it goes on from a state whose block it does not pin");
      lease(hold.state);
      lease(hold.from_loaded);
      require(hold.from_loading < 0 || !running || loaded.contains({owned.get(), hold.from_loading}), who + "its state is missing, and nothing brings it");
      for (const AdjunctHold::Kept& kept : hold.kept) lease(kept.page);
      if (!running) continue;
      if (group.kind == CacheGroupKind::kWindow) {
        require(hold.end() >= PagesFor(owned->upper()), who + "it has fewer pages than tokens");
        require(hold.begin <= WindowBegin(group, owned->computed), who + "a page of its window is missing");
        require(hold.begin >= WindowBegin(group, owned->computed) || hold.end() == hold.begin, who + "a page behind its window was not given back");
      } else {
        require(hold.state || owned->inflight_rows == 0, who + "a step in flight has no state");
        require(hold.state || hold.from || hold.from_loaded || hold.from_loading >= 0 || owned->computed == 0, who + "nothing tells where its state comes from");
        require(!hold.state || hold.state_at == owned->upper(), who + "its state is not that of its tokens");
        require(hold.kept.empty() || owned->inflight_rows > 0 || owned->loading() || owned->load_failed, who + "a state waits for a step that does not exist");
      }
    }
    for (const DeferredAdjunct& deferred : deferred_adjuncts_) {
      require(!steps_.empty() && deferred.plan_id >= steps_.front().plan_id, name + "a page waits for a plan that has ended");
      if (deferred.place != group.place) continue;
      pin(deferred.pin);
      lease(deferred.page);
    }
    group.cache.CheckIntegrity(
        pins,
        [&](int32_t page, const PageHash& hash) {
          own(page);
          require(blocks.contains(hash), name + "page " + std::to_string(page) + " stands for a block that is gone");
        },
        own);
    for (size_t page = 0; page < owners.size(); ++page) {
      require(owners[page] == 1, name + "page " + std::to_string(page) + " is in " + std::to_string(owners[page]) + " places");
    }
  }
}

// Who waits for the store waits for a transfer, or for the next plan.
void Scheduler::CheckFetches() const {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("scheduler: " + what);
  };
  std::unordered_map<int64_t, int32_t> waits, pending;
  for (const auto& [id, op] : ops_) {
    if (const auto* lookup = std::get_if<LookupOp>(&op)) ++waits[lookup->fetch];
    if (const auto* prefetch = std::get_if<PrefetchOp>(&op)) {
      for (const int64_t fetch : prefetch->fetches) ++waits[fetch];
    }
  }
  for (const int64_t fetch : pending_lookups_) ++pending[fetch];
  for (const int64_t fetch : pending_prefetches_) ++pending[fetch];
  const auto check = [&](int64_t id, const RequestKey& owner, int32_t blocks, const std::string& who) {
    const auto found = fetches_.find(id);
    require(found != fetches_.end() && found->second.owner == owner, who + "it waits for a question that nobody asks");
    const Fetch& fetch = found->second;
    require(fetch.waits == waits[id], who + "the transfers that it waits for are miscounted");
    require(fetch.waits > 0 ? pending[id] == 0 : pending[id] == 1, who + "its question is not in exactly one place");
    require(fetch.limit <= blocks && fetch.from <= fetch.begin && fetch.begin <= fetch.limit && fetch.full <= fetch.limit, who + "it asks for more than it has");
  };
  for (const auto& [id, owned] : requests_) {
    const std::string who = "request " + std::to_string(id) + ": ";
    if (NameOf(owned->state) != StateName::kPrefetching) continue;
    check(owned->fetch, {id, owned->order.arrival}, static_cast<int32_t>(owned->hashes.size()), who);
  }
  for (const auto& [id, session] : sessions_) {
    if (session.fetch >= 0) check(session.fetch, {.session = id}, static_cast<int32_t>(session.hashes.size()), "session " + std::to_string(id) + ": ");
  }
  for (const auto& [id, fetch] : fetches_) require(waits.contains(id) || pending.contains(id), "a question that nobody asks is kept");
}

void Scheduler::CheckIntegrity() const {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("scheduler: " + what);
  };
  std::vector<int32_t> page_owner(static_cast<size_t>(pages_.total()), 0);
  const auto own = [&](int32_t page, const char* where) {
    require(page >= 0 && page < pages_.total(), "page " + std::to_string(page) + " does not exist");
    require(page_owner[static_cast<size_t>(page)]++ == 0, "page " + std::to_string(page) + " is in two places, one of them " + where);
  };
  for (const int32_t page : pages_.free_ids()) own(page, "the free list");
  tree_.CheckIntegrity([&](int32_t page) { own(page, "the prefix tree"); });
  for (const auto& [plan, lease] : deferred_) own(lease.id(), "a deferred release");
  std::vector<std::unordered_map<int32_t, int32_t>> host_pins(adjuncts_.size() + 1);
  std::unordered_map<const Request*, int32_t> writes;
  int64_t moving = 0;
  for (const auto& [id, op] : ops_) {
    std::visit(
        [&](const auto& concrete) {
          if constexpr (requires { concrete.host; }) {
            const size_t group = [&] {
              if constexpr (requires { concrete.place; }) return concrete.place + 1;
              else if constexpr (requires { concrete.tier; }) return concrete.tier;
              else return size_t{0};
            }();
            for (const HostPin& pin : concrete.host) ++host_pins[group][pin.page()];
          }
        },
        op);
    const bool stays = std::holds_alternative<LookupOp>(op) || std::holds_alternative<PrefetchOp>(op) || std::holds_alternative<StoreOp>(op);
    moving += stays ? 0 : 1;
    if (const auto* write = std::get_if<WriteBackOp>(&op)) ++writes[Find(write->owner)];
    if (const auto* write = std::get_if<AdjunctWriteOp>(&op)) ++writes[Find(write->owner)];
    if (const auto* load = std::get_if<LoadBackOp>(&op)) {
      for (const PageLease& page : load->device) own(page.id(), "a load back");
    }
  }
  if (!adjuncts_.empty()) CheckAdjuncts();
  require(moving == moving_, "the transfers between host and device are miscounted");
  for (const PendingWrite& write : pending_writes_) ++writes[Find(write.owner)];
  for (const PendingCopy& copy : pending_copies_) ++writes[Find(copy.owner)];
  CheckFetches();
  host_.CheckIntegrity(host_pins[0]);
  for (const AdjunctGroup& group : adjuncts_) group.host.CheckIntegrity(host_pins[group.place + 1]);
  std::unordered_map<PageHash, int32_t, PageHashHasher> retained;
  std::map<PageHash, int64_t> by_tenant;
  for (const auto& [id, session] : sessions_) {
    for (const PageHash& hash : session.hashes) by_tenant[session.tenant] += retained[hash]++ == 0 ? 1 : 0;
    require(session_ends_.contains({session.until_us, id}), "the end of a session is not known");
    const auto tenant = tenants_.find(session.tenant);
    require(tenant != tenants_.end() && tenant->second.ends.contains({session.until_us, id}), "a session is not among its tenant's");
  }
  require(by_tenant.size() == tenants_.size() && by_tenant.size() == tenants_by_pages_.size(), "a tenant without sessions is kept");
  for (const auto& [tenant, pages] : by_tenant) {
    require(tenants_.at(tenant).pages == pages && tenants_by_pages_.contains({pages, tenant}), "the pages of a tenant are miscounted");
  }
  require(retained == retained_ && session_ends_.size() == sessions_.size(), "sessions are miscounted");
  require(static_cast<int64_t>(retained.size()) <= RetainBound(), "sessions keep more than their share");
  require(host_.kept() == (host_.on() ? retained.size() : 0), "the host keeps other pages above others than sessions do");

  std::unordered_set<int32_t> slots(slots_.free_ids().begin(), slots_.free_ids().end());
  const auto free_slots = static_cast<int32_t>(slots.size());
  require(free_slots == slots_.available(), "a slot is free twice");
  std::array<int64_t, kStateCount> states{};
  std::unordered_map<const Request*, int32_t> rows_in_flight;
  for (const Step& step : steps_) {
    for (const StepRow& row : step.rows) ++rows_in_flight[row.request];
  }
  int64_t pins = 0;
  for (const auto& [id, owned] : requests_) {
    const Request& request = *owned;
    const std::string who = "request " + std::to_string(id) + ": ";
    ++states[request.state.index()];
    const StateName name = NameOf(request.state);
    const auto rows = rows_in_flight.find(&request);
    require(request.inflight_rows == (rows == rows_in_flight.end() ? 0 : rows->second), who + "its rows in flight are miscounted");
    const bool queued = waiting_.contains(request.order);
    const bool waits = name == StateName::kSubmitted || name == StateName::kPrefetchDone || name == StateName::kRetracted;
    require(waits == (queued || request.parked()) && !(queued && request.parked()), who + "it is not in exactly one place to wait");
    require((name == StateName::kPrefilling) == prefilling_.contains(request.order), who + "its place among the prefills is wrong");
    const bool decodes = name == StateName::kPrefillDone || name == StateName::kDecoding;
    require(decodes == (request.row >= 0), who + "its place among the decodes is wrong");
    if (decodes) require(decoding_[static_cast<size_t>(request.row)] == &request, who + "another stands in its place");
    const auto copies = writes.find(&request);
    require(request.writes == (copies == writes.end() ? 0 : copies->second), who + "its copies to the host are miscounted");
    require(name != StateName::kWritingBack || request.writes > 0, who + "it waits for a copy that does not exist");
    require(name != StateName::kRetracting || request.writes + request.inflight_rows > 0, who + "it waits for nothing");
    const bool draining = name == StateName::kDraining || name == StateName::kAborting;
    const bool leaving = draining || name == StateName::kRetracting;
    if (draining || name == StateName::kPrefillDone) require(request.inflight_rows > 0, who + "it waits for a step that does not exist");

    const Residence* residence = ResidenceOf(const_cast<RequestState&>(request.state));
    if (residence == nullptr) {
      require(request.inflight_rows == 0, who + "a step in flight uses pages that it gave up");
      continue;
    }
    ++pins;
    require(slots.insert(residence->slot.id()).second, who + "its slot is in two places");
    for (const PageLease& page : residence->tail) own(page.id(), "the tail of a residence");
    require(leaving || residence->pages() * page_size_ >= request.upper(), who + "it has fewer pages than tokens");
    require(residence->loading == 0 || request.loading() || leaving, who + "pages are missing that nothing brings");
    if (config_.enable_prefix_caching && !leaving && !request.loading() && !request.load_failed) {
      require(residence->prefix.depth() == request.computed / page_size_, who + "a finished page is not published");
      require(static_cast<int32_t>(request.hashes.size()) >= residence->prefix.depth(), who + "a published page has no name");
    }
  }
  require(states == state_counts_, "the counts by state are wrong");
  require(static_cast<int32_t>(slots.size()) == slots_.total() && pins == slots_.total() - free_slots, "a slot is nowhere");
  for (size_t page = 0; page < page_owner.size(); ++page) {
    require(page_owner[page] == 1, "page " + std::to_string(page) + " is nowhere");
  }
  for (const auto& [plan, lease] : deferred_) {
    require(!steps_.empty() && plan >= steps_.front().plan_id, "page " + std::to_string(lease.id()) + " waits for a plan that has ended");
  }
}

}  // namespace tokenspeed
