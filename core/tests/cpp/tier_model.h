// What the host and the store below would hold, and what moves between the tiers: a transfer is begun by a plan, copies at a moment
// that nobody is told, and is answered later, in any order, wholly, in part or not at all.
//
// It fails where a page in transfer is used again: what a transfer reads must not change until its answer, and what it writes must be
// read or written by nobody else. What a transfer has not brought is garbage, so a row that reads it finds another's KV.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

class TierModel {
 public:
  enum class Kind { kWriteBack, kLoadBack, kLookup, kPrefetch, kStore };
  using Pick = std::function<int64_t(int64_t, int64_t)>;
  using Content = std::vector<uint64_t>;
  using Name = std::array<uint8_t, 16>;

  // `device`: cells of the device pages, page by page; shared with the executor.
  TierModel(const SchedulerConfig& config, Content& device)
      : page_(static_cast<size_t>(config.groups[0].page_size)),
        device_(device),
        host_(static_cast<size_t>(config.groups[0].host_pages) * page_, 0),
        device_use_(static_cast<size_t>(config.groups[0].num_pages)),
        host_use_(static_cast<size_t>(config.groups[0].host_pages)) {}

  void Plan(const ExecutionPlan& plan) {
    Begin(Kind::kWriteBack, plan.write_back);
    Begin(Kind::kLoadBack, plan.load_back);
    Begin(Kind::kLookup, plan.lookup);
    Begin(Kind::kPrefetch, plan.prefetch);
    Begin(Kind::kStore, plan.store);
  }

  // No step may write the page now, nor read it as another's.
  [[nodiscard]] bool Moves(int32_t page) const {
    const Use& use = device_use_[static_cast<size_t>(page)];
    return use.readers > 0 || use.writers > 0;
  }
  [[nodiscard]] size_t in_flight() const { return transfers_.size(); }

  // The moment at which the copy of a load back is made. Whether all of it is good.
  bool Settle(int64_t id, const Pick& pick) {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) return !failed_loads_.contains(id);  // answered already
    Copy(found->second, pick);
    return found->second.good == static_cast<int32_t>(found->second.pages.size());
  }
  [[nodiscard]] bool Answered(int64_t id) const { return !transfers_.contains(id); }

  // Chooses up to `most` transfers, ends them, and says what to tell the scheduler.
  void Answer(const Pick& pick, int64_t most, std::vector<int64_t>& ids, std::vector<int32_t>& pages) {
    while (most-- > 0 && !transfers_.empty()) {
      auto at = std::next(transfers_.begin(), pick(0, static_cast<int64_t>(transfers_.size()) - 1));
      Transfer& transfer = at->second;
      Copy(transfer, pick);
      if (transfer.kind == Kind::kLoadBack && transfer.good < static_cast<int32_t>(transfer.pages.size())) failed_loads_.insert(at->first);
      for (const Moved& moved : transfer.pages) Release(transfer.kind, moved);
      ids.push_back(at->first);
      pages.push_back(transfer.good);
      transfers_.erase(at);
    }
  }

 private:
  struct Use {
    int readers = 0;
    int writers = 0;
  };
  struct Moved {
    int32_t device = -1;
    int32_t host = -1;
    Name name{};
    Content source;
  };
  struct Transfer {
    Kind kind = Kind::kLookup;
    int32_t good = -1;  // not copied yet
    std::vector<Moved> pages;
  };

  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("tiers: ") + what);
  }
  [[nodiscard]] Content Read(const Content& cells, int32_t page) const {
    const auto begin = cells.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(page) * page_);
    return {begin, begin + static_cast<ptrdiff_t>(page_)};
  }
  void Write(Content& cells, int32_t page, const Content& content) const {
    std::copy(content.begin(), content.end(), cells.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(page) * page_));
  }
  Content Garbage() { return Content(page_, 0xdead'0000'0000'0000ULL + ++garbage_); }

  void Begin(Kind kind, const TransferColumns& columns) {
    for (size_t i = 0; i < columns.op.size(); ++i) {
      const int64_t id = columns.op[i];
      Require(columns.group[i] == 0, "an unknown cache group");
      Require(i > 0 && columns.op[i - 1] == id ? true : seen_.insert(id).second, "a transfer is begun twice");
      Transfer& transfer = transfers_[id];
      transfer.kind = kind;
      Moved moved;
      if (!columns.device.empty()) moved.device = columns.device[i];
      if (!columns.host.empty()) moved.host = columns.host[i];
      if (!columns.hash.empty()) moved.name = columns.hash[i].bytes;
      Take(kind, moved);
      transfer.pages.push_back(std::move(moved));
    }
  }

  void Take(Kind kind, Moved& moved) {
    const auto reads = [](Use& use) {
      Require(use.writers == 0, "a transfer reads a page that another writes");
      ++use.readers;
    };
    const auto writes = [](Use& use) {
      Require(use.writers == 0 && use.readers == 0, "a transfer writes a page that another uses");
      ++use.writers;
    };
    switch (kind) {
      case Kind::kWriteBack:
        reads(device_use_[static_cast<size_t>(moved.device)]);
        writes(host_use_[static_cast<size_t>(moved.host)]);
        moved.source = Read(device_, moved.device);
        Write(host_, moved.host, Garbage());
        break;
      case Kind::kLoadBack:
        reads(host_use_[static_cast<size_t>(moved.host)]);
        writes(device_use_[static_cast<size_t>(moved.device)]);
        moved.source = Read(host_, moved.host);
        Write(device_, moved.device, Garbage());
        break;
      case Kind::kLookup: break;
      case Kind::kPrefetch:
        writes(host_use_[static_cast<size_t>(moved.host)]);
        Write(host_, moved.host, Garbage());
        break;
      case Kind::kStore: {
        reads(host_use_[static_cast<size_t>(moved.host)]);
        moved.source = Read(host_, moved.host);
        const auto [place, is_new] = named_.emplace(moved.name, moved.source);
        Require(is_new || place->second == moved.source, "a page is stored under the name of another");
        break;
      }
    }
  }

  void Release(Kind kind, const Moved& moved) {
    if (kind == Kind::kWriteBack) {
      --device_use_[static_cast<size_t>(moved.device)].readers;
      Require(Read(device_, moved.device) == moved.source, "a device page changed while it was copied");
    }
    if (kind == Kind::kLoadBack) {
      --device_use_[static_cast<size_t>(moved.device)].writers;
      --host_use_[static_cast<size_t>(moved.host)].readers;
      Require(Read(host_, moved.host) == moved.source, "a host page changed while it was copied");
    }
    if (kind == Kind::kWriteBack || kind == Kind::kPrefetch) --host_use_[static_cast<size_t>(moved.host)].writers;
    if (kind == Kind::kStore) {
      --host_use_[static_cast<size_t>(moved.host)].readers;
      Require(Read(host_, moved.host) == moved.source, "a host page changed while it was stored");
    }
  }

  // Makes the copies, once: all of them, or a leading part.
  void Copy(Transfer& transfer, const Pick& pick) {
    if (transfer.good >= 0) return;
    const auto count = static_cast<int64_t>(transfer.pages.size());
    int64_t good = pick(0, 99) < (transfer.kind == Kind::kLoadBack ? 40 : 80) ? count : pick(0, count - 1);
    if (transfer.kind == Kind::kLookup || transfer.kind == Kind::kPrefetch) {
      int64_t there = 0;
      while (there < count && stored_.contains(transfer.pages[static_cast<size_t>(there)].name)) ++there;
      const bool lies = transfer.kind == Kind::kLookup && pick(0, 99) < 8;  // it says so, and then it is gone
      good = lies ? pick(0, count) : std::min(good, there);
    }
    for (int64_t i = 0; i < good; ++i) {
      const Moved& moved = transfer.pages[static_cast<size_t>(i)];
      switch (transfer.kind) {
        case Kind::kWriteBack: Write(host_, moved.host, moved.source); break;
        case Kind::kLoadBack: Write(device_, moved.device, moved.source); break;
        case Kind::kLookup: break;
        case Kind::kPrefetch: Write(host_, moved.host, stored_.at(moved.name)); break;
        case Kind::kStore: stored_[moved.name] = moved.source; break;
      }
    }
    transfer.good = static_cast<int32_t>(good);
  }

  const size_t page_;
  Content& device_;
  Content host_;
  std::vector<Use> device_use_, host_use_;
  std::map<Name, Content> stored_;
  std::map<Name, Content> named_;
  std::map<int64_t, Transfer> transfers_;
  std::set<int64_t> seen_;
  std::set<int64_t> failed_loads_;
  uint64_t garbage_ = 0;
};

// Replays KV events: what each tier holds by its own account.
class EventReplay {
 public:
  void Apply(const KvEvents& events) {
    size_t tokens = 0;
    for (size_t i = 0; i < events.kind.size(); ++i) {
      tokens += static_cast<size_t>(events.token_counts[i]);
      const auto kind = static_cast<KvEventKind>(events.kind[i]);
      if (kind == KvEventKind::kCleared) {
        for (auto& held : held_) held.clear();
        continue;
      }
      const auto medium = static_cast<size_t>(events.medium[i]);
      auto& held = held_[medium];
      const TierModel::Name name = events.hash[i].bytes;
      if (kind == KvEventKind::kRemoved) {
        Require(held.erase(name) == 1, "a page is removed that was not there");
        continue;
      }
      if (medium == static_cast<size_t>(KvMedium::kStorage)) continue;  // it may be told of again, and forgets on its own
      Require(held.emplace(name, events.parent[i].bytes).second, "a page is stored twice");
      if (medium == 0 && events.depth[i] > 0) Require(held.contains(events.parent[i].bytes), "a page is stored before its parent");
    }
    Require(tokens == events.tokens.size(), "the tokens do not fit the events");
  }
  // No page without the one before it is left on the device.
  void CheckClosed() const {
    for (const auto& [name, parent] : held_[0]) Require(parent == TierModel::Name{} || held_[0].contains(parent), "a parent left before its child");
  }
  [[nodiscard]] size_t device() const { return held_[0].size(); }
  [[nodiscard]] size_t host() const { return held_[1].size(); }

 private:
  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("events: ") + what);
  }
  std::array<std::map<TierModel::Name, TierModel::Name>, 3> held_;
};

}  // namespace tokenspeed
