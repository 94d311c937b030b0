#include "cache/host_cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace tokenspeed {

void HostPin::Release() noexcept {
  if (cache_ != nullptr) std::exchange(cache_, nullptr)->DropPin(*std::exchange(entry_, nullptr));
}

// ---- finding ----

HostEntry* HostCache::FindEntry(const PageHash& hash) const noexcept {
  const auto found = entries_.find(hash);
  return found == entries_.end() ? nullptr : found->second.get();
}

const HostEntry* HostCache::Find(const PageHash& hash) const noexcept { return FindEntry(hash); }

int32_t HostCache::Match(std::span<const PageHash> hashes, int32_t depth, int32_t limit, int32_t known) const noexcept {
  if (ready_ == 0) return depth;
  const auto ready = [&](int32_t index) {
    const HostEntry* entry = FindEntry(hashes[static_cast<size_t>(index)]);
    return entry != nullptr && entry->ready();
  };
  int32_t end = std::max(depth, std::min(known, limit));
  // A page that is there vouches for those before it: none of them leaves first.
  while (end > depth && !ready(end - 1)) --end;
  while (end < limit && ready(end)) ++end;
  return end;
}

// ---- coming ----

HostPin HostCache::Arrive(const PageHash& hash, const PageHash& parent, int32_t depth, int64_t transfer) {
  assert(Find(hash) == nullptr);
  // The parent counts its child before a page is sought, or it could be the one to go.
  HostEntry* above = HasParent(depth) ? FindEntry(parent) : nullptr;
  if (above != nullptr && ++above->children_ == 1) Unlist(*above);
  if (pool_.available() == 0 && !EvictOne()) {
    if (above != nullptr && --above->children_ == 0) Enlist(*above);
    return {};
  }
  if (HasParent(depth) && above == nullptr) ++orphans_[parent];

  auto owned = std::make_unique<HostEntry>();
  HostEntry& entry = *owned;
  entry.hash_ = hash;
  entry.parent_ = parent;
  entry.depth_ = depth;
  entry.transfer_ = transfer;
  entry.lease_ = pool_.Take();
  entry.kept_ = kept_names_.contains(hash);
  const auto orphans = orphans_.find(hash);
  if (orphans != orphans_.end()) {
    entry.children_ = orphans->second;
    orphans_.erase(orphans);
  }
  entries_.emplace(hash, std::move(owned));
  entry.pins_ = 1;
  ++pinned_;
  return HostPin(this, &entry);
}

void HostCache::Land(const HostPin& pin) {
  HostEntry& entry = *pin.entry_;
  if (entry.state_ != HostEntry::State::kArriving) return;  // forgotten by a flush meanwhile
  entry.state_ = HostEntry::State::kReady;
  ++ready_;
  events_.Stored(KvMedium::kHost, entry.hash_, entry.parent_, entry.depth_, 0, {}, group_);
}

HostPin HostCache::Pin(const PageHash& hash) noexcept {
  HostEntry& entry = *FindEntry(hash);
  assert(entry.ready());
  if (entry.pins_++ == 0) {
    ++pinned_;
    Unlist(entry);
  }
  return HostPin(this, &entry);
}

void HostCache::Keep(const PageHash& hash) {
  kept_names_.insert(hash);
  HostEntry* entry = FindEntry(hash);
  if (entry == nullptr) return;
  entry->kept_ = true;
  if (!entry->linked()) return;
  Unlist(*entry);
  kept_.PushBack(*entry);
}

void HostCache::Unkeep(const PageHash& hash) noexcept {
  kept_names_.erase(hash);
  HostEntry* entry = FindEntry(hash);
  if (entry == nullptr) return;
  entry->kept_ = false;
  if (!entry->linked()) return;
  Unlist(*entry);
  HostEntry* before = nullptr;
  lru_.VisitWhile([&](HostEntry& other) {
    if (other.last_use_ > entry->last_use_) before = &other;
    return before == nullptr;
  });
  if (before == nullptr) lru_.PushBack(*entry);
  else lru_.InsertBefore(*entry, *before);
}

void HostCache::Touch(const PageHash& hash) noexcept {
  HostEntry* entry = FindEntry(hash);
  if (entry == nullptr || !entry->ready()) return;
  ++tick_;
  Unlist(*entry);
  entry->last_use_ = tick_;
  if (Cold(*entry)) Enlist(*entry);
}

// ---- going ----

void HostCache::Enlist(HostEntry& entry) noexcept {
  if (Cold(entry) && !entry.linked()) ListOf(entry).PushBack(entry);
}

void HostCache::Unlist(HostEntry& entry) noexcept {
  if (entry.linked()) lru_.Remove(entry);
}

void HostCache::DropPin(HostEntry& entry) noexcept {
  if (--entry.pins_ > 0) return;
  --pinned_;
  switch (entry.state_) {
    case HostEntry::State::kReady:
      entry.last_use_ = ++tick_;
      Enlist(entry);
      return;
    case HostEntry::State::kArriving: Unmap(entry); return;  // it never came
    case HostEntry::State::kDiscarded:
      std::erase_if(discarded_, [&](const auto& owned) { return owned.get() == &entry; });
  }
}

std::unique_ptr<HostEntry> HostCache::Unmap(HostEntry& entry, bool record) noexcept {
  Unlist(entry);
  if (entry.ready()) {
    --ready_;
    if (record) events_.Removed(KvMedium::kHost, entry.hash_, entry.depth_, group_);
  }
  if (entry.children_ > 0) orphans_[entry.hash_] = entry.children_;
  if (HasParent(entry.depth_)) {
    if (HostEntry* parent = FindEntry(entry.parent_); parent != nullptr) {
      if (--parent->children_ == 0 && Cold(*parent)) {
        // Used together with this child: as cold as that was. Used later: behind the others.
        if (parent->last_use_ > entry.last_use_) ListOf(*parent).PushBack(*parent);
        else ListOf(*parent).PushFront(*parent);
      }
    } else if (const auto orphans = orphans_.find(entry.parent_); --orphans->second == 0) {
      orphans_.erase(orphans);
    }
  }
  const auto found = entries_.find(entry.hash_);
  std::unique_ptr<HostEntry> owned = std::move(found->second);
  entries_.erase(found);
  return owned;
}

bool HostCache::EvictOne() {
  IntrusiveList<HostEntry, HostLruTag>& list = lru_.empty() ? kept_ : lru_;
  if (list.empty()) return false;
  Unmap(list.front());
  ++evicted_;
  return true;
}

void HostCache::Discard(HostEntry& entry, bool record) noexcept {
  if (entry.state_ == HostEntry::State::kDiscarded) return;
  ++discards_;
  std::unique_ptr<HostEntry> owned = Unmap(entry, record);
  owned->state_ = HostEntry::State::kDiscarded;
  if (owned->pins_ > 0) discarded_.push_back(std::move(owned));
}

void HostCache::Flush(bool record) {
  std::vector<HostEntry*> all;
  all.reserve(entries_.size());
  for (const auto& [hash, entry] : entries_) all.push_back(entry.get());
  // By page id, so that what is free afterwards stands in an order that the calls decide.
  std::sort(all.begin(), all.end(), [](const HostEntry* a, const HostEntry* b) { return a->page() < b->page(); });
  for (HostEntry* entry : all) Discard(*entry, record);
}

// ---- checking ----

void HostCache::CheckIntegrity(const std::unordered_map<int32_t, int32_t>& pins) const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("host cache: ") + what);
  };
  std::unordered_set<const HostEntry*> cold;
  const auto list = [&](const IntrusiveList<HostEntry, HostLruTag>& entries, bool kept) {
    entries.ForEach([&](const HostEntry& entry) {
      require(cold.insert(&entry).second, "a page stands twice in the LRU lists");
      require(entry.kept_ == kept, "a page stands in the wrong LRU list");
    });
  };
  list(lru_, false);
  list(kept_, true);
  std::vector<int32_t> owners(static_cast<size_t>(pool_.total()), 0);
  for (const int32_t page : pool_.free_ids()) ++owners[static_cast<size_t>(page)];

  std::unordered_map<PageHash, int32_t, PageHashHasher> children;
  for (const auto& [hash, entry] : entries_) {
    if (HasParent(entry->depth_)) ++children[entry->parent_];
  }
  int32_t ready = 0, pinned = 0;
  size_t cold_seen = 0;
  const auto check_pins = [&](const HostEntry& entry) {
    const auto known = pins.find(entry.page());
    require(entry.pins_ == (known == pins.end() ? 0 : known->second), "a page has other pins than the transfers say");
    pinned += entry.pins_ > 0 ? 1 : 0;
    ++owners[static_cast<size_t>(entry.page())];
  };
  for (const auto& [hash, owned] : entries_) {
    const HostEntry& entry = *owned;
    require(hash == entry.hash_, "a page stands under a wrong name");
    require(entry.state_ != HostEntry::State::kDiscarded, "a discarded page is found");
    require(entry.ready() || entry.pins_ == 1, "a page arrives and no transfer brings it");
    ready += entry.ready() ? 1 : 0;
    check_pins(entry);
    const auto below = children.find(hash);
    require(entry.children_ == (below == children.end() ? 0 : below->second), "the children of a page are miscounted");
    require(cold.contains(&entry) == Cold(entry), "the LRU lists are not exactly the unused leaves");
    require(entry.kept_ == kept_names_.contains(hash), "a page is kept that is not to be, or the other way round");
    cold_seen += cold.contains(&entry) ? 1 : 0;
  }
  for (const auto& owned : discarded_) {
    require(owned->pins_ > 0, "a discarded page that nobody uses is kept");
    check_pins(*owned);
  }
  size_t orphaned = 0;
  for (const auto& [parent, count] : children) {
    if (entries_.contains(parent)) continue;
    ++orphaned;
    const auto found = orphans_.find(parent);
    require(found != orphans_.end() && found->second == count, "orphans are miscounted");
  }
  require(orphaned == orphans_.size(), "orphans are counted that do not exist");
  require(cold_seen == cold.size(), "an LRU list holds a page that is not known");
  require(ready == ready_ && pinned == pinned_, "the counts are wrong");
  for (const int32_t count : owners) require(count == 1, "a page is in two places, or nowhere");
}

}  // namespace tokenspeed
