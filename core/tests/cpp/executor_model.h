// A stand-in for the execution plane that knows what every KV page would hold.
//
// It keeps page tables from deltas, the tokens of every request, and for every page and offset the token sequence whose KV is there
// (named by a chained hash). Before a row "computes" it checks that the row finds the KV of exactly its own context through its
// table, and that no page which it writes can be read by another request as something else.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"
#include "group_model.h"
#include "tier_model.h"

namespace tokenspeed {

class ExecutorModel {
 public:
  struct Row {
    int64_t id;
    uint64_t incarnation;
    int32_t slot;
    int32_t query;
    bool samples, extend;
    int32_t context;          // upper bound, as planned
    int32_t output_len;
    std::vector<int32_t> input;
    std::vector<int32_t> table;  // the slot's row as it stands when the step runs
    int residency;               // which stay of the request in a slot
    std::vector<int64_t> loads;  // the transfers that bring its prefix, one for each group
    GroupModel::Tables groups;   // the same of the window and recurrent groups
  };
  struct Step {
    int64_t plan_id;
    std::vector<Row> rows;
    std::vector<GroupModel::StateOp> state_ops;
  };
  struct Results {
    int64_t plan_id = 0;
    std::vector<int32_t> counts, tokens, outcomes;
    std::vector<Row> rows;
    std::vector<bool> good;
    std::vector<bool> reload;  // its prefix did not come
  };
  struct Known {
    uint64_t incarnation;
    std::vector<int32_t> tokens;
    uint64_t seed;
    std::map<int64_t, uint64_t> extra;
    size_t prompt;
    int32_t kv = 0;        // tokens with KV
    bool ended = false;    // finished for the client
    bool aborted = false;  // ended from outside
    FinishReason end = FinishReason::kNone;  // as which, in that case
    int64_t limit;
    int residency = 0;
    int lost = -1;  // the stay whose prefix did not come: nothing of it counts
  };

  explicit ExecutorModel(const SchedulerConfig& config)
      : config_(config),
        page_(config.groups[0].page_size),
        tables_(static_cast<size_t>(config.max_num_seqs)),
        content_(static_cast<size_t>(config.groups[0].num_pages) * static_cast<size_t>(page_), 0),
        groups_(config),
        tiers_(config, CellsOf(config)) {}

  void Submitted(const RequestSpec& spec) {
    Known known;
    known.incarnation = ++incarnations_;
    known.tokens = spec.tokens;
    known.seed = std::hash<std::string>{}(spec.salt) * 31 + static_cast<uint64_t>(spec.adapter) + 17;
    for (const ExtraKey& extra : spec.extra_keys) known.extra[extra.position] = extra.key[0];
    known.prompt = spec.tokens.size();
    known.limit = std::min<int64_t>(spec.max_new_tokens, config_.max_model_len - static_cast<int64_t>(spec.tokens.size()));
    live_[spec.id] = known;
  }

  void Plan(const ExecutionPlan& plan) {
    Require(plan.plan_id > last_plan_, "plan ids do not increase");
    last_plan_ = plan.plan_id;
    last_idle_ = plan.mode == ForwardMode::kIdle;
    Require(plan.num_tokens() <= config_.max_step_tokens(), "a plan has too many tokens");
    std::map<std::pair<int32_t, int32_t>, int> seen;
    for (size_t i = 0; i < plan.delta_slot.size(); ++i) {
      if (plan.delta_group[i] != 0) {
        groups_.Delta(plan.delta_group[i], plan.delta_slot[i], plan.delta_index[i], plan.delta_page[i]);
        continue;
      }
      Require(++seen[{plan.delta_slot[i], plan.delta_index[i]}] == 1, "a table entry stands twice in a plan");
      auto& table = tables_[static_cast<size_t>(plan.delta_slot[i])];
      const auto index = static_cast<size_t>(plan.delta_index[i]);
      if (table.size() <= index) table.resize(index + 1, -1);
      table[index] = plan.delta_page[i];
    }
    Step step{plan.plan_id, {}, groups_.Begin(plan)};
    size_t token = 0;
    std::map<int32_t, int> slots;
    for (int32_t r = 0; r < plan.num_rows(); ++r) {
      const auto i = static_cast<size_t>(r);
      Row row;
      row.id = plan.request_ids[i];
      row.slot = plan.slots[i];
      row.query = plan.query_lens[i];
      row.context = plan.context_lens[i];
      row.output_len = plan.output_lens[i];
      row.samples = (plan.flags[i] & kSamples) != 0;
      row.extend = r < plan.num_extend_rows;
      Require(++slots[row.slot] == 1, "a slot has two rows");
      const auto found = live_.find(row.id);
      Require(found != live_.end() && !found->second.ended, "a row for a request that has ended");
      Require(!found->second.aborted, "a row for a request that was aborted");
      row.incarnation = found->second.incarnation;
      row.input.assign(plan.input_ids.data() + token, plan.input_ids.data() + token + row.query);
      token += static_cast<size_t>(row.query);
      row.table = tables_[static_cast<size_t>(row.slot)];
      row.groups = groups_.TablesOf(row.slot);
      groups_.CheckRow(row.groups, row.context, row.query);
      if ((plan.flags[i] & kNewInSlot) != 0) {
        found->second.kv = row.context;  // resumed or first: what the cache gave
        ++found->second.residency;
      }
      row.residency = found->second.residency;
      for (size_t k = 0; k < plan.load_back.op.size(); ++k) {
        if (plan.load_back.row[k] == r && (row.loads.empty() || row.loads.back() != plan.load_back.op[k])) row.loads.push_back(plan.load_back.op[k]);
      }
      Require(row.query >= 1 && (row.extend || row.query <= config_.max_row_width), "a bad row width");
      step.rows.push_back(std::move(row));
    }
    Require(token == plan.input_ids.size(), "input_ids do not fit the rows");
    for (const PrefixInterval& interval : plan.prefix_intervals) CheckInterval(interval, step, plan.num_extend_rows);
    for (size_t i = 0; i < plan.finished_ids.size(); ++i) Ended(plan.finished_ids[i], plan.finished_reasons[i]);
    CheckLoads(plan, step);
    tiers_.Plan(plan);
    CheckStates(step);
    for (const Row& row : step.rows) {
      CheckWrites(row);
      CheckNobodyElseUses(row);
    }
    if (!step.rows.empty()) steps_.push_back(std::move(step));
    Require((plan.mode == ForwardMode::kIdle) == (plan.num_rows() == 0), "the mode does not fit the rows");
  }

  // Runs the oldest step. `good_percent`: how many of the rows get a legal result; `stop_percent`: how many of those stop.
  Results Execute(const std::function<int64_t(int64_t, int64_t)>& pick, int good_percent, int stop_percent) {
    Step step = std::move(steps_.front());
    steps_.pop_front();
    Results results;
    results.plan_id = step.plan_id;
    // What comes back from the host is there before states are copied, for it may be the source of a copy.
    std::map<int32_t, bool> arrived;
    for (const Row& row : step.rows) {
      bool& all = arrived[row.slot] = true;
      for (const int64_t load : row.loads) all = tiers_.Settle(load, pick) && all;
    }
    groups_.Apply(step.state_ops);
    for (const Row& row : step.rows) {
      const auto found = live_.find(row.id);
      const bool valid = found != live_.end() && found->second.incarnation == row.incarnation;
      const bool came = arrived.at(row.slot);
      const bool told = std::any_of(row.loads.begin(), row.loads.end(), [&](int64_t load) { return tiers_.ToldAsFailed(load); });
      if (valid && !came) found->second.lost = row.residency;
      const bool lost = valid && found->second.lost == row.residency;
      const bool good = lost || pick(0, 99) < good_percent;
      int32_t outcome = 0;
      int32_t count = row.samples ? static_cast<int32_t>(pick(1, row.extend ? 1 : row.query)) : 0;
      int32_t token = static_cast<int32_t>(pick(0, 2));
      if (good) {
        if (row.samples && pick(0, 99) < stop_percent) outcome = 1;
      } else {
        switch (pick(0, 4)) {
          case 0: outcome = 2; break;
          case 1: outcome = std::array<int32_t, 3>{-1, 4, row.loads.empty() ? 3 : 4}[static_cast<size_t>(pick(0, 2))]; break;  // 3: it loads nothing
          case 2: count = row.samples ? 0 : 1; break;
          case 3: count = row.samples ? (row.extend ? 1 : row.query) + 1 : -1; break;
          default:
            if (row.samples) token = -1;
            else outcome = 1;
        }
      }
      for (int32_t w = 0; w < config_.max_row_width; ++w) results.tokens.push_back(token);
      if (!came && (!told || pick(0, 1) == 0)) outcome = 3;
      if (lost) Scribble(row);
      else if (valid) Compute(found->second, row, good && !row.extend ? std::vector<int32_t>(static_cast<size_t>(count), token) : std::vector<int32_t>{});
      else Scribble(row);
      results.counts.push_back(count);
      results.outcomes.push_back(outcome);
      results.good.push_back(good);
      results.reload.push_back(outcome == 3);
    }
    results.rows = std::move(step.rows);
    return results;
  }

  void Advanced(const Results& results, const AdvanceResult& answer) {
    const auto width = static_cast<size_t>(config_.max_row_width);
    for (size_t i = 0; i < results.rows.size(); ++i) {
      const Row& row = results.rows[i];
      const auto refusal = static_cast<RowRefusal>(answer.row_refusals[i]);
      const auto found = live_.find(row.id);
      const bool valid = found != live_.end() && found->second.incarnation == row.incarnation && !found->second.ended &&
                         !found->second.aborted;
      if (valid && found->second.lost == row.residency) {
        const bool told = !row.loads.empty() && results.reload[i];
        Require((refusal == RowRefusal::kLate) != told && (told ? refusal == RowRefusal::kNone : true), "a row without its prefix was not sent back");
        continue;
      }
      Require(valid == (refusal != RowRefusal::kLate), "a late result was taken, or a timely one was not");
      if (!valid) continue;
      const bool failed = results.outcomes[i] == 2;
      Require(!results.good[i] || refusal == RowRefusal::kNone, "a good result was refused");
      Require(results.good[i] || failed || refusal != RowRefusal::kNone, "a bad result was taken");
      if (!results.good[i]) continue;
      Known& known = found->second;
      known.kv += row.extend ? row.query : results.counts[i];
      for (int32_t k = 0; k < results.counts[i]; ++k) known.tokens.push_back(results.tokens[i * width + static_cast<size_t>(k)]);
      Require(static_cast<int64_t>(known.tokens.size() - known.prompt) <= known.limit, "more tokens than were asked for");
    }
    for (size_t i = 0; i < answer.finished_ids.size(); ++i) Ended(answer.finished_ids[i], answer.finished_reasons[i]);
  }

  void Aborted(int64_t id, FinishReason reason) {
    Require(live_.contains(id) && !live_[id].aborted, "an abort of an ended request was taken");
    live_[id].aborted = true;
    live_[id].end = reason;
  }

  [[nodiscard]] TierModel& tiers() { return tiers_; }
  [[nodiscard]] const std::map<int64_t, Known>& live() const { return live_; }
  [[nodiscard]] size_t in_flight() const { return steps_.size(); }
  [[nodiscard]] int64_t oldest_plan() const { return steps_.front().plan_id; }
  [[nodiscard]] bool last_was_idle() const { return last_idle_; }

 private:
  static void Require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("executor: ") + what);
  }

  void Ended(int64_t id, int32_t reason) {
    const auto found = live_.find(id);
    Require(found != live_.end(), "a request was reported as finished twice, or never submitted");
    const auto given = static_cast<FinishReason>(reason);
    const Known& known = found->second;
    Require(known.aborted ? given == known.end : given != FinishReason::kAborted && given != FinishReason::kNone, "a request ended for another reason");
    live_.erase(found);
  }

  // Where a load back writes, no step in flight reads; where a row writes, no transfer reads or writes.
  void CheckLoads(const ExecutionPlan& plan, const Step& step) {
    const auto used = [&](const Row& row, int32_t page) {
      // A decode's context is an upper bound: of the row before it one token is accepted at least, and pages past that went back.
      const int32_t tokens = std::max(0, row.context + row.query - (row.extend ? 0 : config_.max_row_width - 1));
      const auto pages = std::min(row.table.size(), static_cast<size_t>((tokens + page_ - 1) / page_));
      return std::find(row.table.begin(), row.table.begin() + static_cast<ptrdiff_t>(pages), page) != row.table.begin() + static_cast<ptrdiff_t>(pages);
    };
    for (size_t k = 0; k < plan.load_back.op.size(); ++k) {
      const int32_t row_at = plan.load_back.row[k];
      Require(row_at < plan.num_rows(), "a load back for a row that does not exist");
      if (plan.load_back.group[k] != 0) {
        CheckGroupLoad(plan.load_back.group[k], plan.load_back.device[k], plan.load_back.op[k], step);
        continue;
      }
      for (const Step& earlier : steps_) {
        for (const Row& row : earlier.rows) Require(!used(row, plan.load_back.device[k]), "a load back writes where a step in flight reads");
      }
      for (const Row& row : step.rows) {
        if (std::find(row.loads.begin(), row.loads.end(), plan.load_back.op[k]) == row.loads.end()) Require(!used(row, plan.load_back.device[k]), "a load back writes where another row reads");
      }
    }
  }
  // What a row writes, no step in flight of another stay uses.
  void CheckNobodyElseUses(const Row& row) {
    const auto written = groups_.PagesOf(row.groups, row.context, row.query, true);
    for (const Step& earlier : steps_) {
      for (const Row& other : earlier.rows) {
        if (other.id == row.id && other.residency == row.residency && other.incarnation == row.incarnation) continue;
        for (const auto& page : GroupPagesOf(other)) {
          Require(std::find(written.begin(), written.end(), page) == written.end(), "a row writes a window or a state that a step in flight uses");
        }
      }
    }
  }
  // Those of the window and recurrent groups that it surely reads or writes: a decode's context is an upper bound.
  [[nodiscard]] std::vector<std::pair<int32_t, int32_t>> GroupPagesOf(const Row& row) const {
    return groups_.PagesOf(row.groups, row.context, row.query - (row.extend ? 0 : config_.max_row_width - 1), false);
  }
  void CheckGroupLoad(int32_t group, int32_t page, int64_t op, const Step& step) {
    const std::pair target{group, page};
    const auto uses = [&](const Row& row) {
      const auto pages = GroupPagesOf(row);
      return std::find(pages.begin(), pages.end(), target) != pages.end();
    };
    for (const Step& earlier : steps_) {
      for (const Row& row : earlier.rows) Require(!uses(row), "a load back writes a window or a state that a step in flight uses");
      for (const GroupModel::StateOp& state : earlier.state_ops) {
        Require(state.group != group || (state.source != page && state.target != page), "a load back writes a state that a step in flight copies");
      }
    }
    for (const Row& row : step.rows) {
      if (std::find(row.loads.begin(), row.loads.end(), op) == row.loads.end()) Require(!uses(row), "a load back writes where another row reads");
    }
    for (const GroupModel::StateOp& state : step.state_ops) Require(state.group != group || state.target != page, "a state is made where one is loaded");
  }
  void CheckWrites(const Row& row) {
    for (int32_t index = row.context / page_; index <= (row.context + row.query - 1) / page_; ++index) {
      Require(static_cast<size_t>(index) < row.table.size(), "a row lacks a page");
      Require(!tiers_.Moves(0, row.table[static_cast<size_t>(index)]), "a row writes a page in transfer");
    }
    for (const auto& [group, page] : groups_.PagesOf(row.groups, row.context, row.query, true)) {
      Require(!tiers_.Moves(group, page), "a row writes a page of a window, or a state, in transfer");
    }
  }
  [[nodiscard]] std::vector<std::vector<uint64_t>*> CellsOf(const SchedulerConfig& config) {
    std::vector<std::vector<uint64_t>*> cells;
    for (size_t g = 0; g < config.groups.size(); ++g) cells.push_back(g == 0 ? &content_ : groups_.CellsOf(g));
    return cells;
  }
  // A row whose prefix did not come writes garbage.
  void Scribble(const Row& row) {
    for (int32_t position = row.context; position < row.context + row.query; ++position) Cell(row, position) = 0xbad;
    groups_.Scribble(row.groups, row.context, row.query);
  }

  // A state belongs to one row, and what is to be kept is not written; what the plan makes is of use to no step in flight.
  void CheckStates(const Step& step) {
    std::set<std::pair<int32_t, int32_t>> written, kept;
    for (const GroupModel::StateOp& op : step.state_ops) kept.insert({op.group, op.source});
    for (const Row& row : step.rows) {
      for (const auto& state : groups_.StatesOf(row.groups)) {
        Require(written.insert(state).second, "two rows write one state");
        Require(!kept.contains(state), "a row writes a state that is kept");
      }
    }
    for (const Step& earlier : steps_) {
      std::set<std::pair<int32_t, int32_t>> used;
      for (const GroupModel::StateOp& op : earlier.state_ops) used.insert({{op.group, op.source}, {op.group, op.target}});
      for (const Row& row : earlier.rows) {
        for (const auto& state : groups_.StatesOf(row.groups)) used.insert(state);
      }
      for (const GroupModel::StateOp& op : step.state_ops) {
        Require(!used.contains({op.group, op.target}), "a state is made where a step in flight has one");
      }
    }
  }

  static uint64_t Chain(uint64_t previous, int32_t token, uint64_t extra) {
    uint64_t x = previous ^ (static_cast<uint64_t>(static_cast<uint32_t>(token)) + 0x9e3779b97f4a7c15ULL + extra * 1'000'003);
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    return x * 0x94d049bb133111ebULL + 1;
  }

  uint64_t& Cell(const Row& row, int32_t position) {
    const auto index = static_cast<size_t>(position / page_);
    Require(index < row.table.size() && row.table[index] >= 0, "a row lacks a page");
    return content_[static_cast<size_t>(row.table[index]) * static_cast<size_t>(page_) + static_cast<size_t>(position % page_)];
  }

  // `accepted`: what the step will accept; all but the last of them are the drafts that it computes.
  void Compute(Known& known, const Row& row, const std::vector<int32_t>& accepted) {
    // The true position: what was accepted so far, which the host may only have bounded when it made the plan.
    const int32_t begin = known.ended || known.aborted ? std::min(known.kv, row.context) : known.kv;
    Require(begin <= row.context, "the context was planned too short");
    Require(row.extend ? begin == row.context || known.aborted : true, "a chunk does not begin where the last one ended");
    if (known.aborted) {  // what it computes is of no use to anybody
      Scribble(row);
      return;
    }
    Require(row.output_len >= static_cast<int32_t>(known.tokens.size() - known.prompt), "output_lens is too small");
    uint64_t chain = known.seed;
    if (begin == 0) groups_.CheckState(row.groups, GroupModel::kZeroState);
    for (int32_t position = 0; position < begin + row.query; ++position) {
      const bool is_known = static_cast<size_t>(position) < known.tokens.size();
      const size_t draft = static_cast<size_t>(position) - known.tokens.size();
      const int32_t token = is_known ? known.tokens[static_cast<size_t>(position)] : draft < accepted.size() ? accepted[draft] : -1 - position;
      const auto extra = known.extra.find(position);
      chain = Chain(chain, token, extra == known.extra.end() ? 0 : extra->second + 1);
      if (position < begin) {
        Require(Cell(row, position) == chain, "a row reads KV that is not its own");
        groups_.CheckRead(row.groups, begin, position, chain);
      } else {
        const int32_t given = row.input[static_cast<size_t>(position - begin)];
        Require(given == kUnknownToken ? !row.extend : (is_known && given == token), "a row has a wrong input");
        Cell(row, position) = chain;
        groups_.Write(row.groups, position, chain);
      }
    }
    if (row.samples && row.extend) Require(begin + row.query == static_cast<int32_t>(known.tokens.size()), "a chunk samples too early");
  }

  void CheckInterval(const PrefixInterval& interval, const Step& step, int32_t extends) {
    Require(interval.row_begin >= extends && interval.row_end - interval.row_begin >= 2, "an interval is not over decode rows");
    Require(interval.row_end <= static_cast<int32_t>(step.rows.size()) && interval.pages > 0, "an interval is out of range");
    const Row& first = step.rows[static_cast<size_t>(interval.row_begin)];
    for (int32_t r = interval.row_begin; r < interval.row_end; ++r) {
      const Row& row = step.rows[static_cast<size_t>(r)];
      Require(row.context >= (interval.first_page + interval.pages) * page_, "an interval passes the context of a row");
      for (int32_t index = interval.first_page; index < interval.first_page + interval.pages; ++index) {
        Require(row.table[static_cast<size_t>(index)] == first.table[static_cast<size_t>(index)], "rows of an interval differ in a page");
      }
    }
  }

  const SchedulerConfig config_;
  const int32_t page_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<uint64_t> content_;
  GroupModel groups_;
  TierModel tiers_;
  std::map<int64_t, Known> live_;
  std::deque<Step> steps_;
  uint64_t incarnations_ = 0;
  int64_t last_plan_ = 0;
  bool last_idle_ = false;
};

}  // namespace tokenspeed
