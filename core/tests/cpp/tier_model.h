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
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

class TierModel {
 public:
  enum class Kind { kWriteBack, kLoadBack, kLookup, kPrefetch, kStore };
  using Pick = std::function<int64_t(int64_t, int64_t)>;
  using Content = std::vector<uint64_t>;
  using Name = std::array<uint8_t, 16>;

  // `device`: cells of the device pages of each group, page by page; shared with the executor. Full groups have those of the first.
  TierModel(const SchedulerConfig& config, const std::vector<Content*>& device) {
    for (size_t g = 0; g < config.groups.size(); ++g) {
      const CacheGroupConfig& group = config.groups[g];
      const size_t cells = group.kind == CacheGroupKind::kRecurrent ? 1 : static_cast<size_t>(group.page_size);
      const auto host_pages = static_cast<size_t>(group.host_pages);
      groups_.push_back({cells, device[g], Content(host_pages * cells, 0), std::vector<Use>(static_cast<size_t>(group.num_pages)),
                         std::vector<Use>(host_pages), g == 0 || group.kind != CacheGroupKind::kFull});
      // What the store brought is seen by rows whose loads come whole.
      if (config.l3 && group.kind != CacheGroupKind::kFull) whole_loads_percent_ = 85;
    }
  }

  void Plan(const ExecutionPlan& plan) {
    Begin(Kind::kWriteBack, plan.write_back);
    Begin(Kind::kLoadBack, plan.load_back);
    Begin(Kind::kLookup, plan.lookup);
    Begin(Kind::kPrefetch, plan.prefetch);
    Begin(Kind::kStore, plan.store);
  }

  // No step may write the page now, nor read it as another's.
  [[nodiscard]] bool Moves(int32_t group, int32_t page) const {
    const Use& use = groups_[static_cast<size_t>(group)].device_use[static_cast<size_t>(page)];
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
  // The scheduler knows that it failed.
  [[nodiscard]] bool ToldAsFailed(int64_t id) const { return failed_loads_.contains(id); }

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
    size_t group = 0;
    Name name{};
    Content source;
  };
  struct Transfer {
    Kind kind = Kind::kLookup;
    int32_t good = -1;  // not copied yet
    std::vector<Moved> pages;
  };

  struct Group {
    size_t cells;  // of a page
    Content* device;
    Content host;
    std::vector<Use> device_use, host_use;
    bool moves;  // its pages have transfers of their own
  };

  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("tiers: ") + what);
  }
  [[nodiscard]] static Content ReadPage(const Group& group, const Content& cells, int32_t page) {
    const auto begin = cells.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(page) * group.cells);
    return {begin, begin + static_cast<ptrdiff_t>(group.cells)};
  }
  static void WritePage(const Group& group, Content& cells, int32_t page, const Content& content) {
    std::copy(content.begin(), content.end(), cells.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(page) * group.cells));
  }
  [[nodiscard]] Content OnDevice(const Moved& moved) const { return ReadPage(groups_[moved.group], *groups_[moved.group].device, moved.device); }
  [[nodiscard]] Content OnHost(const Moved& moved) const { return ReadPage(groups_[moved.group], groups_[moved.group].host, moved.host); }
  void ToDevice(const Moved& moved, const Content& content) { WritePage(groups_[moved.group], *groups_[moved.group].device, moved.device, content); }
  void ToHost(const Moved& moved, const Content& content) { WritePage(groups_[moved.group], groups_[moved.group].host, moved.host, content); }
  Content Garbage(const Moved& moved) { return Content(groups_[moved.group].cells, 0xdead'0000'0000'0000ULL + ++garbage_); }

  void Begin(Kind kind, const TransferColumns& columns) {
    for (size_t i = 0; i < columns.op.size(); ++i) {
      const int64_t id = columns.op[i];
      const auto group = static_cast<size_t>(columns.group[i]);
      Require(group < groups_.size() && groups_[group].moves, "an unknown cache group");
      Require(i == 0 || columns.op[i - 1] != id || columns.group[i - 1] == columns.group[i], "an op has pages of two groups");
      Require(i > 0 && columns.op[i - 1] == id ? true : seen_.insert(id).second, "a transfer is begun twice");
      Transfer& transfer = transfers_[id];
      transfer.kind = kind;
      Moved moved;
      moved.group = group;
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
    Group& group = groups_[moved.group];
    const auto device = [&]() -> Use& { return group.device_use.at(static_cast<size_t>(moved.device)); };
    const auto host = [&]() -> Use& { return group.host_use.at(static_cast<size_t>(moved.host)); };
    switch (kind) {
      case Kind::kWriteBack:
        reads(device());
        writes(host());
        moved.source = OnDevice(moved);
        ToHost(moved, Garbage(moved));
        break;
      case Kind::kLoadBack:
        reads(host());
        writes(device());
        moved.source = OnHost(moved);
        ToDevice(moved, Garbage(moved));
        break;
      case Kind::kLookup: break;
      case Kind::kPrefetch:
        writes(host());
        ToHost(moved, Garbage(moved));
        break;
      case Kind::kStore: {
        reads(host());
        moved.source = OnHost(moved);
        const auto [place, is_new] = named_.emplace(std::pair{moved.group, moved.name}, moved.source);
        Require(is_new || place->second == moved.source, "a page is stored under the name of another");
        break;
      }
    }
  }

  void Release(Kind kind, const Moved& moved) {
    Group& group = groups_[moved.group];
    const auto device = [&]() -> Use& { return group.device_use[static_cast<size_t>(moved.device)]; };
    const auto host = [&]() -> Use& { return group.host_use[static_cast<size_t>(moved.host)]; };
    if (kind == Kind::kWriteBack) {
      --device().readers;
      Require(OnDevice(moved) == moved.source, "a device page changed while it was copied");
    }
    if (kind == Kind::kLoadBack) {
      --device().writers;
      --host().readers;
      Require(OnHost(moved) == moved.source, "a host page changed while it was copied");
    }
    if (kind == Kind::kWriteBack || kind == Kind::kPrefetch) --host().writers;
    if (kind == Kind::kStore) {
      --host().readers;
      Require(OnHost(moved) == moved.source, "a host page changed while it was stored");
    }
  }

  // Makes the copies, once: all of them, or a leading part.
  void Copy(Transfer& transfer, const Pick& pick) {
    if (transfer.good >= 0) return;
    const auto count = static_cast<int64_t>(transfer.pages.size());
    int64_t good = pick(0, 99) < (transfer.kind == Kind::kLoadBack ? whole_loads_percent_ : 80) ? count : pick(0, count - 1);
    if (transfer.kind == Kind::kLookup || transfer.kind == Kind::kPrefetch) {
      int64_t there = 0;
      while (there < count && stored_.contains(KeyOf(transfer.pages[static_cast<size_t>(there)]))) ++there;
      const bool lies = transfer.kind == Kind::kLookup && pick(0, 99) < 8;  // it says so, and then it is gone
      good = lies ? pick(0, count) : std::min(good, there);
    }
    for (int64_t i = 0; i < good; ++i) {
      const Moved& moved = transfer.pages[static_cast<size_t>(i)];
      switch (transfer.kind) {
        case Kind::kWriteBack: ToHost(moved, moved.source); break;
        case Kind::kLoadBack: ToDevice(moved, moved.source); break;
        case Kind::kLookup: break;
        case Kind::kPrefetch: ToHost(moved, stored_.at(KeyOf(moved))); break;
        case Kind::kStore: stored_[KeyOf(moved)] = moved.source; break;
      }
    }
    transfer.good = static_cast<int32_t>(good);
  }

  using Key = std::pair<size_t, Name>;  // group and block
  [[nodiscard]] static Key KeyOf(const Moved& moved) { return {moved.group, moved.name}; }

  std::vector<Group> groups_;
  std::map<Key, Content> stored_;
  std::map<Key, Content> named_;
  std::map<int64_t, Transfer> transfers_;
  std::set<int64_t> seen_;
  std::set<int64_t> failed_loads_;
  uint64_t garbage_ = 0;
  int whole_loads_percent_ = 40;
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
      const int32_t group = events.group[i];
      auto& held = held_[medium];
      const Key key{group, events.hash[i].bytes};
      if (kind == KvEventKind::kRemoved) {
        Require(held.erase(key) == 1, "a page is removed that was not there");
        continue;
      }
      if (medium == static_cast<size_t>(KvMedium::kStorage)) continue;  // it may be told of again, and forgets on its own
      Require(held.emplace(key, events.parent[i].bytes).second, "a page is stored twice");
      if (medium == 0 && group > 0) Require(held.contains({0, events.hash[i].bytes}), "a page is stored before its block");
      if (medium == 0 && group == 0 && events.depth[i] > 0) Require(held.contains({0, events.parent[i].bytes}), "a page is stored before its parent");
    }
    Require(tokens == events.tokens.size(), "the tokens do not fit the events");
  }
  // No page without the one before it is left on the device, and none of a window or a state without its block.
  void CheckClosed() const {
    for (const auto& [key, parent] : held_[0]) {
      if (key.first > 0) Require(held_[0].contains({0, key.second}), "a block left before its pages");
      else Require(parent == TierModel::Name{} || held_[0].contains({0, parent}), "a parent left before its child");
    }
  }
  [[nodiscard]] int64_t device(size_t group) const { return Count(0, group); }
  [[nodiscard]] int64_t host(size_t group) const { return Count(1, group); }

 private:
  using Key = std::pair<int32_t, TierModel::Name>;
  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("events: ") + what);
  }
  [[nodiscard]] int64_t Count(size_t medium, size_t group) const {
    return std::count_if(held_[medium].begin(), held_[medium].end(),
                         [&](const auto& held) { return held.first.first == static_cast<int32_t>(group); });
  }
  std::array<std::map<Key, TierModel::Name>, 3> held_;
};

}  // namespace tokenspeed
