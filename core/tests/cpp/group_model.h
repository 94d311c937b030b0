// What the pages of window and recurrent groups hold, for the executor's model: the token sequence behind each offset of a window page
// and behind each state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

class GroupModel {
 public:
  struct StateOp {
    StateKind kind;
    int32_t group, source, target;
  };
  // The table of a slot in each group; empty for full ones.
  using Tables = std::vector<std::vector<int32_t>>;
  static constexpr uint64_t kZeroState = 1;

  explicit GroupModel(const SchedulerConfig& config) : config_(config) {
    for (const CacheGroupConfig& group : config.groups) {
      const size_t cells = group.kind == CacheGroupKind::kRecurrent ? 1 : static_cast<size_t>(group.page_size);
      content_.emplace_back(Full(group) ? 0 : static_cast<size_t>(group.num_pages) * cells, 0xdead);
    }
    slots_.assign(static_cast<size_t>(config.max_num_seqs), Tables(config.groups.size()));
  }

  void Delta(int32_t group, int32_t slot, int32_t index, int32_t page) {
    const auto number = static_cast<size_t>(group);
    Require(number < config_.groups.size() && !Full(config_.groups[number]), "an unknown cache group");
    Require(page >= 0 && page < config_.groups[number].num_pages, "a page that does not exist");
    Require(seen_.insert({group, {slot, index}}).second, "a table entry stands twice in a plan");
    std::vector<int32_t>& table = slots_[static_cast<size_t>(slot)][number];
    if (table.size() <= static_cast<size_t>(index)) table.resize(static_cast<size_t>(index) + 1, -1);
    table[static_cast<size_t>(index)] = page;
  }

  // Ends the deltas of a plan; its state ops.
  [[nodiscard]] std::vector<StateOp> Begin(const ExecutionPlan& plan) {
    seen_.clear();
    std::vector<StateOp> ops;
    std::set<std::pair<int32_t, int32_t>> sources, targets;
    for (size_t i = 0; i < plan.state_kind.size(); ++i) {
      const StateOp op{static_cast<StateKind>(plan.state_kind[i]), plan.state_group[i], plan.state_source[i], plan.state_target[i]};
      Require(config_.groups.at(static_cast<size_t>(op.group)).kind == CacheGroupKind::kRecurrent, "an op on a group without states");
      Require((op.kind == StateKind::kZero) == (op.source < 0), "a copy of nothing, or a zero of something");
      Require(targets.insert({op.group, op.target}).second, "a state is made twice in a plan");
      if (op.source >= 0) sources.insert({op.group, op.source});
      ops.push_back(op);
    }
    for (const auto& target : targets) Require(!sources.contains(target), "a state is both source and target");
    return ops;
  }
  void Apply(const std::vector<StateOp>& ops) {
    for (const StateOp& op : ops) {
      auto& states = content_[static_cast<size_t>(op.group)];
      states[static_cast<size_t>(op.target)] = op.kind == StateKind::kZero ? kZeroState : states[static_cast<size_t>(op.source)];
    }
  }

  // The cells of a group's pages, page by page.
  [[nodiscard]] std::vector<uint64_t>* CellsOf(size_t group) { return &content_[group]; }
  // (group, page) of each page that a row from `begin` on reads or writes; `written`: those alone that it writes.
  [[nodiscard]] std::vector<std::pair<int32_t, int32_t>> PagesOf(const Tables& tables, int32_t begin, int32_t query, bool written) const {
    std::vector<std::pair<int32_t, int32_t>> pages = StatesOf(tables);
    ForEach(CacheGroupKind::kWindow, [&](size_t g) {
      const int32_t size = config_.groups[g].page_size;
      const int32_t first = written ? begin : std::max(0, begin - config_.groups[g].window + 1);
      for (int32_t index = first / size; index <= (begin + query - 1) / size; ++index) {
        pages.emplace_back(static_cast<int32_t>(g), tables[g].at(static_cast<size_t>(index)));
      }
    });
    return pages;
  }
  [[nodiscard]] const Tables& TablesOf(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }
  // (group, page) of each state that a row writes.
  [[nodiscard]] std::vector<std::pair<int32_t, int32_t>> StatesOf(const Tables& tables) const {
    std::vector<std::pair<int32_t, int32_t>> states;
    ForEach(CacheGroupKind::kRecurrent, [&](size_t g) { states.emplace_back(static_cast<int32_t>(g), tables[g].at(0)); });
    return states;
  }

  // It has a state of each group, and the pages that it writes.
  void CheckRow(const Tables& tables, int32_t context, int32_t query) const {
    ForEach(CacheGroupKind::kRecurrent, [&](size_t g) { Require(tables[g].size() == 1 && tables[g][0] >= 0, "a row has no state"); });
    ForEach(CacheGroupKind::kWindow, [&](size_t g) {
      const auto last = static_cast<size_t>((context + query - 1) / config_.groups[g].page_size);
      Require(tables[g].size() > last && tables[g][last] >= 0, "a row lacks a page of its window");
    });
  }
  // A row whose first token stands at `begin` finds `chain` at `position` where it reads it.
  void CheckRead(const Tables& tables, int32_t begin, int32_t position, uint64_t chain) {
    ForEach(CacheGroupKind::kWindow, [&](size_t g) {
      if (position > begin - config_.groups[g].window) Require(Cell(g, tables, position) == chain, "a row reads a window that is not its own");
    });
    if (position == begin - 1) CheckState(tables, chain);
  }
  void CheckState(const Tables& tables, uint64_t chain) {
    ForEach(CacheGroupKind::kRecurrent, [&](size_t g) { Require(State(g, tables) == chain, "a row goes on from a state that is not its own"); });
  }
  void Write(const Tables& tables, int32_t position, uint64_t chain) {
    ForEach(CacheGroupKind::kWindow, [&](size_t g) { Cell(g, tables, position) = chain; });
    ForEach(CacheGroupKind::kRecurrent, [&](size_t g) { State(g, tables) = chain; });
  }
  // A row that does not count writes what it likes into its state, and where its tokens go.
  void Scribble(const Tables& tables, int32_t begin, int32_t query) {
    for (int32_t position = begin; position < begin + query; ++position) {
      ForEach(CacheGroupKind::kWindow, [&](size_t g) { Cell(g, tables, position) = 0xbad; });
    }
    ForEach(CacheGroupKind::kRecurrent, [&](size_t g) { State(g, tables) = 0xbad; });
  }

 private:
  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("groups: ") + what);
  }
  [[nodiscard]] static bool Full(const CacheGroupConfig& group) { return group.kind == CacheGroupKind::kFull; }
  template <class Visit>
  void ForEach(CacheGroupKind kind, Visit&& visit) const {
    for (size_t g = 1; g < config_.groups.size(); ++g) {
      if (config_.groups[g].kind == kind) visit(g);
    }
  }
  uint64_t& Cell(size_t group, const Tables& tables, int32_t position) {
    const int32_t size = config_.groups[group].page_size;
    const auto index = static_cast<size_t>(position / size);
    Require(index < tables[group].size() && tables[group][index] >= 0, "a row lacks a page of its window");
    return content_[group][static_cast<size_t>(tables[group][index]) * static_cast<size_t>(size) + static_cast<size_t>(position % size)];
  }
  uint64_t& State(size_t group, const Tables& tables) { return content_[group][static_cast<size_t>(tables[group].at(0))]; }

  const SchedulerConfig config_;
  std::vector<std::vector<uint64_t>> content_;  // by group
  std::vector<Tables> slots_;
  std::set<std::pair<int32_t, std::pair<int32_t, int32_t>>> seen_;
};

}  // namespace tokenspeed
