// The record of what entered and left each tier, in order of mutation: who replays it knows which prefixes are where.
//
// One event a page of a group; those of window and recurrent groups name the block that they belong to, and carry no tokens. Nothing is recorded, and nothing but one branch is paid, unless the log is on.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cache/page_hash.h"

namespace tokenspeed {

enum class KvEventKind : int32_t { kStored = 0, kRemoved = 1, kCleared = 2 };
enum class KvMedium : int32_t { kDevice = 0, kHost = 1, kStorage = 2 };

struct KvEvents {
  // (events)
  std::vector<int32_t> kind;
  std::vector<int32_t> medium;
  std::vector<int32_t> group;
  std::vector<int32_t> depth;  // page index in its chain; -1 where all was cleared
  std::vector<PageHash> hash;
  std::vector<PageHash> parent;  // zeros at depth 0 and where nothing was stored
  std::vector<int64_t> adapter;  // of stores on the device; else 0
  std::vector<int32_t> token_counts;
  // (tokens) event by event
  std::vector<int32_t> tokens;
};

class KvEventLog {
 public:
  explicit KvEventLog(bool on) : on_(on) {}
  [[nodiscard]] bool on() const noexcept { return on_; }

  void Stored(KvMedium medium, const PageHash& hash, const PageHash& parent, int32_t depth, int64_t adapter = 0,
              std::span<const int32_t> tokens = {}, int32_t group = 0) {
    if (!on_) return;
    Add(KvEventKind::kStored, medium, group, hash, depth > 0 ? parent : PageHash{}, depth, adapter, static_cast<int32_t>(tokens.size()));
    events_.tokens.insert(events_.tokens.end(), tokens.begin(), tokens.end());
  }
  void Removed(KvMedium medium, const PageHash& hash, int32_t depth, int32_t group = 0) {
    if (on_) Add(KvEventKind::kRemoved, medium, group, hash, {}, depth, 0, 0);
  }
  // Device and host hold nothing any more, in no group.
  void Cleared() {
    if (on_) Add(KvEventKind::kCleared, KvMedium::kDevice, 0, {}, {}, -1, 0, 0);
  }
  // Everything since the last call.
  [[nodiscard]] KvEvents Drain() { return std::exchange(events_, {}); }

 private:
  void Add(KvEventKind kind, KvMedium medium, int32_t group, const PageHash& hash, const PageHash& parent, int32_t depth, int64_t adapter,
           int32_t tokens) {
    events_.kind.push_back(static_cast<int32_t>(kind));
    events_.medium.push_back(static_cast<int32_t>(medium));
    events_.group.push_back(group);
    events_.depth.push_back(depth);
    events_.hash.push_back(hash);
    events_.parent.push_back(parent);
    events_.adapter.push_back(adapter);
    events_.token_counts.push_back(tokens);
  }

  const bool on_;
  KvEvents events_;
};

}  // namespace tokenspeed
