// Pages of windows and kept states on the host: which are copied there, and how they come back.
//
// With full groups alone nothing here is reached.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"

namespace tokenspeed {

// ---- to the host ----

void Scheduler::QueueCopy(AdjunctGroup& group, const PageHash& hash, Request* owner) {
  if (!group.host.on() || !group.cache.Has(hash) || group.host.Find(hash) != nullptr) return;
  AdjunctPin pin = group.cache.PinToCopy(hash);
  if (!pin) return;  // on its way already
  const RequestKey key = owner == nullptr ? RequestKey{} : RequestKey{owner->id, owner->order.arrival};
  if (pending_copies_.empty() || pending_copies_.back().place != group.place || pending_copies_.back().owner != key) {
    pending_copies_.push_back({key, group.place, {}});
    if (owner != nullptr) ++owner->writes;
  }
  pending_copies_.back().pages.push_back(std::move(pin));
}

void Scheduler::QueueCopies(Request& request, int32_t boundary, const Residence* alone) {
  for (AdjunctGroup& group : adjuncts_) {
    if (!group.host.on()) continue;
    const Blocks needed = NeededAt(group, boundary);
    for (int32_t block = needed.begin; block < needed.end; ++block) {
      const PageHash& hash = request.hashes[static_cast<size_t>(block)];
      if (alone != nullptr) {
        const AdjunctHold& hold = alone->holds[group.place];
        const bool in_window = block >= hold.begin && block < hold.end() && hold.pages[static_cast<size_t>(block - hold.begin)].shared;
        const bool continued = hold.from && hold.from.hash() == hash;
        if (group.cache.Users(hash) > (in_window || continued ? 1 : 0)) continue;
      }
      QueueCopy(group, hash, &request);
    }
  }
}

// Keeps the pages that would be evicted next on the host as well: the coldest of each group, and those that leave with the next
// `cold_blocks` blocks of the tree. Of each at most half of the group's host pages, whether they are there already or not, or those
// just copied would push each other out.
void Scheduler::QueueColdCopies(int32_t cold_blocks) {
  for (AdjunctGroup& group : adjuncts_) {
    if (!group.host.on()) continue;
    const auto missing = [&](const PageHash& hash) { return group.host.Find(hash) == nullptr; };
    PendingCopy copy{{}, group.place, {}};
    const int32_t half = group.host.total() / 2;
    const bool window = group.kind == CacheGroupKind::kWindow;
    const int32_t step_pages = (window ? PagesFor(config_.max_step_tokens()) : 0) + config_.max_num_seqs;
    // Not what those who run were promised.
    const int32_t spare = group.cache.available() - PromisedPages(group);
    const int32_t lookahead = std::min({step_pages, group.cache.total() / 2, half}) - group.cache.free();
    if (group.cache.evictable() > 0) copy.pages = group.cache.PinCold(std::min(lookahead, spare), missing);
    int32_t left = half;
    tree_.VisitCold(cold_blocks, [&](const PageHash& hash) {
      if (left == 0 || !group.cache.Has(hash)) return;
      --left;
      if (!missing(hash) || (group.cache.Idle(hash) && group.cache.available() <= PromisedPages(group))) return;
      if (AdjunctPin pin = group.cache.PinToCopy(hash, true)) copy.pages.push_back(std::move(pin));
    });
    if (!copy.pages.empty()) pending_copies_.push_back(std::move(copy));
  }
}

void Scheduler::BeginCopies() {
  for (PendingCopy& copy : std::exchange(pending_copies_, {})) {
    AdjunctGroup& group = adjuncts_[copy.place];
    const int64_t id = next_op_;
    AdjunctWriteOp op{copy.owner, copy.place, {}, {}};
    for (AdjunctPin& page : copy.pages) {
      if (group.host.Find(page.hash()) != nullptr) continue;
      HostPin pin = group.host.Arrive(page.hash(), page.parent(), page.depth(), id);
      if (!pin) {
        ++totals_.host_full;
        continue;
      }
      plan_->write_back.op.Push(id);
      plan_->write_back.group.Push(group.index);
      plan_->write_back.device.Push(page.page());
      plan_->write_back.host.Push(pin.page());
      op.host.push_back(std::move(pin));
      op.device.push_back(std::move(page));
    }
    if (op.host.empty()) {
      WriteEnded(op.owner);
      continue;
    }
    ++next_op_;
    ++moving_;
    ops_.emplace(id, std::move(op));
  }
}

void Scheduler::Answer(int64_t, AdjunctWriteOp& op, int32_t pages) {
  --moving_;
  totals_.pages_written_back += pages;
  totals_.write_backs_failed += static_cast<int64_t>(op.host.size()) - pages;
  for (int32_t i = 0; i < pages; ++i) {
    const HostPin& pin = op.host[static_cast<size_t>(i)];
    adjuncts_[op.place].host.Land(pin);
    QueueStore(op.place + 1, pin);
  }
  op.host.clear();
  while (!op.device.empty()) op.device.pop_back();  // the coldest last, so that it is in front
  WriteEnded(op.owner);
}

int32_t Scheduler::PagesLeavingIn(const AdjunctGroup& group) const {
  if (!AnyMoving()) return 0;
  const auto sole = [](const std::vector<AdjunctPin>& pins) {
    return static_cast<int32_t>(std::count_if(pins.begin(), pins.end(), [](const AdjunctPin& pin) { return pin.sole(); }));
  };
  int32_t pages = 0;
  for (const auto& [id, op] : ops_) {
    if (const auto* write = std::get_if<AdjunctWriteOp>(&op); write != nullptr && write->place == group.place) pages += sole(write->device);
    const auto* load = std::get_if<AdjunctLoadOp>(&op);
    if (load == nullptr || load->place != group.place) continue;
    const Request* owner = Find(load->owner);
    const bool runs = owner != nullptr && std::find(owner->load_ops.begin(), owner->load_ops.end(), id) != owner->load_ops.end() &&
                      (owner->row >= 0 || NameOf(owner->state) == StateName::kPrefilling);
    if (!runs) pages += static_cast<int32_t>(load->device.size());
  }
  for (const PendingCopy& copy : pending_copies_) pages += copy.place == group.place ? sole(copy.pages) : 0;
  return pages;
}

// ---- from the host ----

// REQUIRES: the host has the pages of `blocks`; a page is available for each; the first row of the request is planned next.
void Scheduler::LoadHolds(Request& request, Residence& residence, AdjunctGroup& group, std::vector<int32_t> blocks) {
  const int64_t id = next_op_++;
  AdjunctHold& hold = residence.holds[group.place];
  AdjunctLoadOp op{{request.id, request.order.arrival}, group.place, std::move(blocks), {}, {}, {}, {}};
  const int32_t row = plan_->num_rows();
  for (const int32_t block : op.blocks) {
    op.host.push_back(group.host.Pin(request.hashes[static_cast<size_t>(block)]));
    op.device.push_back(group.cache.Take());
    const int32_t page = op.device.back().id();
    if (group.kind == CacheGroupKind::kWindow) {
      hold.pages[static_cast<size_t>(block - hold.begin)].loading = page;
    } else {
      hold.from_loading = page;
      hold.from_block = block;
    }
    plan_->load_back.op.Push(id);
    plan_->load_back.group.Push(group.index);
    plan_->load_back.host.Push(op.host.back().page());
    plan_->load_back.device.Push(page);
    plan_->load_back.row.Push(row);
  }
  request.load_ops.push_back(id);
  ops_.emplace(id, std::move(op));
  ++moving_;
}

void Scheduler::Answer(int64_t id, AdjunctLoadOp& op, int32_t pages) {
  --moving_;
  AdjunctGroup& group = adjuncts_[op.place];
  const bool failed = pages < static_cast<int32_t>(op.host.size());
  totals_.pages_loaded_back += pages;
  totals_.load_backs_failed += static_cast<int64_t>(op.host.size()) - pages;
  for (size_t i = static_cast<size_t>(pages); i < op.host.size(); ++i) group.host.Discard(op.host[i]);
  op.host.clear();
  if (op.pin) {
    for (const auto& [hash, parent] : op.hashes) group.coming.erase(hash);
    for (size_t i = 0; i < static_cast<size_t>(pages); ++i) {
      (void)group.cache.Publish(op.hashes[i].first, op.device[i], op.hashes[i].second, op.blocks[i]);
    }
    return;
  }

  Request* request = Find(op.owner);
  Residence* residence = request == nullptr || std::erase(request->load_ops, id) == 0 ? nullptr : ResidenceOf(request->state);
  const auto defer = [&](PageLease& page) {
    // A step in flight may still read it, for a row that does not count.
    if (!steps_.empty()) deferred_adjuncts_.push_back({steps_.back().plan_id, op.place, {}, std::move(page)});
  };
  if (residence == nullptr) {
    for (PageLease& page : op.device) defer(page);
    return;
  }
  AdjunctHold& hold = residence->holds[op.place];
  if (group.kind == CacheGroupKind::kRecurrent) {
    hold.from_loading = -1;
    hold.from_loaded = std::move(op.device[0]);
  } else {
    for (size_t i = 0; i < op.device.size(); ++i) {
      const int32_t at = op.blocks[i] - hold.begin;
      if (at < 0) {
        defer(op.device[i]);  // the window has passed it
        continue;
      }
      hold.pages[static_cast<size_t>(at)].loading = -1;
      hold.pages[static_cast<size_t>(at)].own = std::move(op.device[i]);
    }
  }
  LoadAnswered(*request, *residence, failed);
}

// All that its prefix lacked has come, and its blocks stand in the tree: others may use it too.
void Scheduler::LoadsEnded(Request& request, Residence& residence) {
  PublishHolds(request, residence, 0, residence.prefix.depth());
  for (AdjunctGroup& group : adjuncts_) {
    if (group.kind != CacheGroupKind::kRecurrent) continue;
    AdjunctHold& hold = residence.holds[group.place];
    if (hold.from_loaded) {
      AdjunctPin pin = PublishPage(request, group, hold.from_block, hold.from_loaded);
      // Its first row, where that is in flight, copies it, and it stays for that long.
      if (request.load_unsettled) hold.from = std::move(pin);
      else hold.from_loaded = {};
    }
    PublishKept(request, residence, group);
  }
}

}  // namespace tokenspeed
