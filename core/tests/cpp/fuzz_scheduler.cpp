// Random operations on small schedulers, with the invariants checked after each.
//
//     fuzz_scheduler [--ops N] [--seed S] [--no-tiers] [--groups [--tiers]] [--report] [--minimum M]
//
// Each round makes a scheduler with a random configuration, drives it with random operations (good ones and every kind of misuse),
// checks it after each, and at the end drains it and checks that nothing is left over. With --report it prints how often each
// transition and each refusal was reached; with --minimum it fails where one was reached less often. With --no-tiers no round has a host
// tier, and what needs one is not counted: passing states of copies are rare, and would hide how often the others are reached.
// With --groups every round has several cache groups, full, window and recurrent ones; those with full ones alone may have a host tier,
// and with --tiers all of them, each group with host pages of its own or none.
//
// An executor is simulated beside it: page tables built from deltas, and for every page the tokens whose KV it would hold. Every row
// must find, through its table, exactly the KV of its own tokens: this is what a wrong page, a page given away too early, or a
// wrong prefix hit breaks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>

#include "executor_model.h"
#include "scheduler/scheduler.h"

namespace tokenspeed {
namespace {

[[noreturn]] void Fail(const std::string& what) { throw std::logic_error("fuzz: " + what); }

struct Tally {
  TransitionCounts transitions{};
  std::array<int64_t, kSubmitRefusalCount> submit{};
  std::array<int64_t, kRowRefusalCount> row{};
  std::array<int64_t, kAbortRefusalCount> abort{};
  std::map<std::string, int64_t> calls;
};

class Round {
 public:
  Round(uint64_t seed, bool tiers, bool groups, bool group_tiers, Tally& tally)
      : random_(seed), tally_(tally), scheduler_(MakeConfig(tiers, groups, group_tiers)), executor_(scheduler_.config()) {}

  int64_t Run(int64_t operations) {
    if (pressed_ && Chance(80)) {
      // A first request with the shortest output: admission then expects little and takes more than fits.
      RequestSpec spec = GoodSpec();
      spec.max_new_tokens = 1;
      executor_.Submitted(spec);
      (void)scheduler_.SubmitRequests({spec}, now_us_);
    }
    for (int64_t i = 0; i < operations; ++i) {
      Step();
      Check();
    }
    return operations + Drain();
  }

 private:
  int64_t Pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool Chance(int percent) { return Pick(0, 99) < percent; }

  // Full groups have what group 0 has. The pools of the others hold one request at least.
  void AddGroups(SchedulerConfig& config) {
    for (int64_t n = Pick(1, 3); n > 0; --n) {
      CacheGroupConfig group = config.groups[0];
      group.kind = static_cast<CacheGroupKind>(std::min<int64_t>(Pick(0, 4) / 2 + (n == 1 ? 1 : 0), 2));
      if (group.kind == CacheGroupKind::kWindow) {
        group.window = static_cast<int32_t>(Pick(1, 5 * group.page_size));
        group.num_pages = config.WindowPages(group) + static_cast<int32_t>(Chance(50) ? Pick(0, 3) : Pick(0, 20));
      } else if (group.kind == CacheGroupKind::kRecurrent) {
        if (config.max_row_width > 1) continue;
        group.page_size *= static_cast<int32_t>(Pick(1, 3));
        group.num_pages = static_cast<int32_t>(Chance(50) ? Pick(2, 5) : Pick(2, 20));
      }
      config.groups.push_back(group);
    }
  }

  SchedulerConfig MakeConfig(bool tiers, bool groups, bool group_tiers) {
    SchedulerConfig config;
    const int32_t page_sizes[] = {1, 2, 4, 16};
    // Most rounds are under page pressure: a small pool, many rows, small chunks.
    pressed_ = Chance(92);
    good_percent_ = pressed_ ? 94 : 85;
    const int32_t page_size = page_sizes[pressed_ ? std::max<int64_t>(0, Pick(-3, 2)) : Pick(0, 3)];
    config.groups = {{page_size, static_cast<int32_t>(pressed_ ? Pick(6, 14) : Pick(4, 40)), CacheGroupKind::kFull}};
    config.max_num_seqs = static_cast<int32_t>(pressed_ ? Pick(4, 8) : Pick(1, 6));
    config.max_batched_tokens = static_cast<int32_t>(pressed_ ? Pick(1, 5) : Pick(1, 40));
    config.max_model_len = static_cast<int32_t>(Pick(8, 30 * page_size + 8));
    config.max_row_width = Chance(60) ? 1 : static_cast<int32_t>(Pick(2, 4));
    config.overlap_depth = Chance(52) ? 1 : 0;
    config.enable_prefix_caching = !Chance(10);
    config.max_step_us = Chance(30) ? 1'000 : 0;
    if (config.max_step_us > 0 && Chance(50)) config.step_sizes = {2, 5, 6, 12};
    config.hit_window = static_cast<int32_t>(Pick(1, 4));
    config.aging_us = Pick(1, 1'000);
    config.finished_history = static_cast<int32_t>(Chance(20) ? 0 : Pick(1, 50));
    config.admission = Chance(20) ? AdmissionRule::kWholeOutput : AdmissionRule::kExpectedOutput;
    config.retraction = Chance(50) ? RetractionRule::kYoungest : RetractionRule::kCheapestToRestore;
    if (groups) {
      if (Chance(50)) config.max_row_width = 1;
      AddGroups(config);
    }
    const bool no_full_host = group_tiers && Chance(8);
    const bool full = std::all_of(config.groups.begin(), config.groups.end(), [](const auto& group) { return group.kind == CacheGroupKind::kFull; });
    if (tiers && (full || group_tiers) && config.enable_prefix_caching && Chance(full ? 75 : 90)) {
      const auto host_pages = static_cast<int32_t>(Chance(30) ? Pick(1, 6) : Pick(8, 60));
      for (CacheGroupConfig& group : config.groups) {
        group.host_pages = host_pages;
        if (full) continue;
        if (group.kind == CacheGroupKind::kFull) group.host_pages = no_full_host ? 0 : host_pages;
        else group.host_pages = static_cast<int32_t>(Chance(8) ? 0 : Chance(30) ? Pick(1, 4) : Pick(5, 40));
      }
      config.write_policy = Chance(50) ? WritePolicy::kThrough : static_cast<WritePolicy>(Pick(1, 2));
      if (full && Chance(60)) config.overlap_depth = 1;  // what happens with a step in flight is the rarest
      config.l3 = config.groups[0].host_pages > 0 && Chance(50);
      if (!full) {
        // A hit needs all groups, and requests that come to their end; a session brought up needs one that lost its pages.
        again_percent_ = 70;
        sessions_percent_ = 3;
        if (Chance(75)) config.max_batched_tokens = static_cast<int32_t>(Pick(6, 40));
      }
      config.prefetch_threshold = static_cast<int32_t>(Pick(1, 2 * page_size));
      config.prefetch_timeout_us = Chance(20) ? 0 : Pick(1, 2'000);
      if (!full && config.l3) {
        // A hit of the store needs the same prompt again after both tiers have lost it, all groups' parts of it, and answers in time.
        again_percent_ = 95;
        flush_percent_ = 4;
        if (Chance(70)) config.max_row_width = 1;
        if (Chance(80)) config.prefetch_timeout_us = Pick(2'000, 20'000);
        if (Chance(80)) config.write_policy = WritePolicy::kThrough;
      }
    }
    config.kv_events = Chance(50);
    config.retain_percent = static_cast<int32_t>(Pick(sessions_percent_ > 0 ? 60 : 0, 100));
    return config;
  }

  // Full groups have the events of the first.
  [[nodiscard]] bool TellsFull(size_t group) const { return scheduler_.config().groups[group].kind == CacheGroupKind::kFull; }
  [[nodiscard]] bool TellsEvents(size_t group) const { return group == 0 || !TellsFull(group); }

  void Check() {
    scheduler_.CheckIntegrity();
    if (!scheduler_.config().kv_events) return;
    replay_.Apply(scheduler_.DrainKvEvents());
    replay_.CheckClosed();
    const SchedulerStats stats = scheduler_.Stats();
    for (size_t group = 0; group < stats.host_pages_cached.size(); ++group) {
      if (!TellsEvents(group)) continue;
      if (replay_.host(group) != stats.host_pages_cached[group]) Fail("the events of the host do not add up");
    }
  }

  // Ends a few transfers, in any order.
  void AnswerTransfers(int64_t most) {
    std::vector<int64_t> ids;
    std::vector<int32_t> pages;
    executor_.tiers().Answer([&](int64_t low, int64_t high) { return Pick(low, high); }, most, ids, pages);
    scheduler_.CacheDone(ids, pages);
    if (executor_.tiers().in_flight() != static_cast<size_t>(scheduler_.cache_ops_in_flight())) Fail("a transfer was lost");
  }

  void Step() {
    now_us_ += Pick(0, 50);
    if (executor_.tiers().in_flight() > 0 && Chance(executor_.tiers().in_flight() > 6 ? 40 : 20)) {
      AnswerTransfers(Pick(1, 3));
      return;
    }
    if (flush_percent_ > 0 && Chance(flush_percent_)) {
      (void)scheduler_.FlushCache();
      return;
    }
    if (sessions_percent_ > 0 && Chance(sessions_percent_)) {
      (void)scheduler_.PrefetchSession(Pick(0, 5), now_us_);
      return;
    }
    const int64_t dice = Pick(0, 99);
    if (dice < (executor_.live().size() > 12 ? 5 : 18)) Submit();
    else if (dice < 53) Plan();
    else if (dice < (pressed_ ? 89 : 86)) Advance();
    else if (dice < 94) Abort();
    else if (dice < 96) (void)scheduler_.FlushCache();
    else if (dice < 98) MisuseCalls();
    else if (Chance(60)) (void)scheduler_.PrefetchSession(Pick(0, 6), now_us_);
    else if (Chance(30)) (void)scheduler_.ReleaseSession(Pick(0, 6));
    else (void)scheduler_.InfoOf(Pick(0, next_id_));
  }

  RequestSpec GoodSpec() {
    RequestSpec spec;
    spec.id = next_id_++;
    const int32_t page = scheduler_.config().groups[0].page_size;
    const int64_t longest = std::min<int64_t>(scheduler_.config().max_model_len - 1, int64_t{scheduler_.config().groups[0].num_pages} * page);
    const int64_t length = Pick(1, Chance(pressed_ ? 40 : 70) ? std::min<int64_t>(longest, 6 * page + 3) : longest);
    const int32_t family = static_cast<int32_t>(Pick(0, 2));  // few families, so that prefixes are shared
    const int64_t shared = Chance(again_percent_) ? length : Pick(0, length);
    for (int64_t i = 0; i < length; ++i) spec.tokens.push_back(static_cast<int32_t>(i < shared ? 1'000 * family + i : Pick(0, 3)));
    spec.max_new_tokens = Chance(50) ? Pick(1, 6) : Pick(1, 60);
    if (Chance(10)) spec.salt = "salt";
    if (Chance(10)) spec.adapter = 1;
    if (Chance(10)) spec.extra_keys.push_back({Pick(0, length - 1), {7}});
    if (Chance(30)) spec.priority = Pick(-2, 2);
    if (Chance(10)) spec.max_reuse_tokens = Pick(0, length);
    if (Chance(40)) {
      spec.session = Pick(0, 5);
      spec.retain_us = Chance(80) ? Pick(1, sessions_percent_ > 0 ? 60'000 : 3'000) : 0;
    }
    return spec;
  }

  void Submit() {
    std::vector<RequestSpec> specs;
    for (int64_t n = Pick(1, 3); n > 0; --n) specs.push_back(GoodSpec());
    std::vector<SubmitRefusal> expected(specs.size(), SubmitRefusal::kNone);
    if (Chance(25)) Spoil(specs.back(), expected.back());
    const auto kept = specs;
    const auto results = scheduler_.SubmitRequests(std::move(specs), now_us_);
    for (size_t i = 0; i < results.size(); ++i) {
      ++tally_.submit[static_cast<size_t>(results[i].refusal)];
      if (results[i].refusal != expected[i]) Fail("a submission was answered " + results[i].reason);
      if (results[i].accepted() != results[i].reason.empty()) Fail("a refusal has no reason");
      if (results[i].accepted()) executor_.Submitted(kept[i]);
    }
  }

  void Spoil(RequestSpec& spec, SubmitRefusal& expected) {
    const SchedulerConfig& config = scheduler_.config();
    const int64_t pool = int64_t{config.groups[0].num_pages} * config.groups[0].page_size;
    switch (Pick(1, 12)) {
      case 1:
        if (executor_.live().empty()) return;
        spec.id = executor_.live().begin()->first;
        expected = SubmitRefusal::kDuplicateId;
        break;
      case 2: spec.tokens.clear(); expected = SubmitRefusal::kEmptyPrompt; break;
      case 3: spec.tokens.back() = -1; expected = SubmitRefusal::kBadToken; break;
      case 4: spec.max_new_tokens = Pick(-1, 0); expected = SubmitRefusal::kBadMaxNewTokens; break;
      case 5: spec.tokens.assign(static_cast<size_t>(config.max_model_len), 1); expected = SubmitRefusal::kTooLong; break;
      case 6:
      case 10:
      case 11:
        if (pool + 1 >= config.max_model_len) return;
        spec.tokens.assign(static_cast<size_t>(pool + 1), 1);
        expected = SubmitRefusal::kNeverFits;
        break;
      case 7: spec.extra_keys = {{static_cast<int64_t>(spec.tokens.size()), {1}}}; expected = SubmitRefusal::kBadExtraKey; break;
      case 8: spec.priority = 2'000'000; expected = SubmitRefusal::kBadPriority; break;
      case 9: spec.max_reuse_tokens = -2; expected = SubmitRefusal::kBadMaxReuse; break;
      case 12: spec.session = -1; spec.retain_us = Chance(50) ? -1 : 1; expected = SubmitRefusal::kBadRetain; break;
      default: break;
    }
  }

  void Plan() {
    if (scheduler_.plans_in_flight() > scheduler_.config().overlap_depth) {
      Refused("plan", [&] { (void)scheduler_.NextExecutionPlan(now_us_); });
      return;
    }
    TakePlan();
    AbortInPassing();
  }

  void TakePlan() {
    const ExecutionPlan& plan = scheduler_.NextExecutionPlan(now_us_);
    executor_.Plan(plan);
    for (const int32_t group : plan.write_back.group) {
      if (group > 0) ++tally_.calls["page of a window or state copied to the host"];
    }
    for (const int32_t group : plan.lookup.group) tally_.calls[group > 0 ? "page of a window or state looked up" : "block looked up"] += 1;
    for (const int32_t group : plan.prefetch.group) tally_.calls[group > 0 ? "page of a window or state prefetched" : "block prefetched"] += 1;
    for (const int32_t group : plan.store.group) tally_.calls[group > 0 ? "page of a window or state stored" : "block stored"] += 1;
    for (size_t i = 0; i < plan.load_back.group.size(); ++i) {
      if (plan.load_back.group[i] == 0) continue;
      ++tally_.calls[plan.load_back.row[i] < 0 ? "page of a window or state brought up for a session" : "page of a window or state loaded for a row"];
    }
    for (const int32_t kind : plan.state_kind) ++tally_.calls[kind == static_cast<int32_t>(StateKind::kCopy) ? "state copied" : "state zeroed"];
  }

  void Advance() {
    if (executor_.in_flight() == 0) return;
    const ExecutorModel::Results results = executor_.Execute([&](int64_t low, int64_t high) { return Pick(low, high); }, good_percent_, pressed_ ? 8 : 4);
    const AdvanceResult answer =
        scheduler_.Advance(results.plan_id, results.counts, results.tokens, results.outcomes, Chance(50) ? Pick(0, 3'000) : 0);
    for (const int32_t refusal : answer.row_refusals) ++tally_.row[static_cast<size_t>(refusal)];
    executor_.Advanced(results, answer);
    AbortInPassing();
  }

  void Abort() {
    const bool known = !executor_.live().empty() && Chance(80);
    int64_t id = Pick(-1, next_id_);
    // Those that run or were retracted are few beside those that wait: look for one.
    for (int tries = 0; known && tries < 6; ++tries) {
      id = std::next(executor_.live().begin(), Pick(0, static_cast<int64_t>(executor_.live().size()) - 1))->first;
      const StateName state = scheduler_.InfoOf(id)->state;
      if (state == StateName::kRetracted || (state != StateName::kSubmitted && tries >= 3)) break;
    }
    if (scheduler_.Stats().retracted > 0 && Chance(75)) {
      for (const auto& [live, known_request] : executor_.live()) {
        const auto info = scheduler_.InfoOf(live);
        if (info && info->state == StateName::kRetracted) id = live;
      }
    }
    // A stop string ends a request as complete, an abort does not: the totals and the reason that is reported tell them apart.
    const FinishReason reason = Chance(40) ? FinishReason::kStop : FinishReason::kAborted;
    const SchedulerStats before = scheduler_.Stats();
    const AbortRefusal refusal = scheduler_.AbortRequest(id, reason);
    ++tally_.abort[static_cast<size_t>(refusal)];
    ++tally_.calls[reason == FinishReason::kStop ? "end by a stop" : "end by an abort"];
    if (refusal == AbortRefusal::kNone) executor_.Aborted(id, reason);
    const SchedulerStats after = scheduler_.Stats();
    const int64_t ended = after.finished + after.aborted - before.finished - before.aborted;
    const int64_t stopped = after.finished - before.finished;
    if (ended != (refusal == AbortRefusal::kNone && after.leaving == before.leaving ? 1 : 0)) Fail("an end from outside was not counted once");
    if (ended == 1 && stopped != (reason == FinishReason::kStop ? 1 : 0)) Fail("an end from outside was counted as another");
    if (Chance(50)) ++tally_.abort[static_cast<size_t>(scheduler_.AbortRequest(id, reason))];  // a second time: never taken
  }

  // The states that last a moment only: an abort would hardly ever meet one.
  void AbortInPassing() {
    for (const auto& [live, known] : executor_.live()) {
      const auto info = scheduler_.InfoOf(live);
      if (!info || info->state != StateName::kRetracting || known.aborted || !Chance(50)) continue;
      ++tally_.abort[static_cast<size_t>(scheduler_.AbortRequest(live))];
      executor_.Aborted(live, FinishReason::kAborted);
      return;
    }
  }

  void MisuseCalls() {
    const std::vector<int32_t> none;
    Refused("cache_done", [&] { scheduler_.CacheDone(std::vector<int64_t>{-1}, std::vector<int32_t>{0}); });
    Refused("advance", [&] { (void)scheduler_.Advance(-5, none, none, none); });
    Refused("abort reason", [&] { (void)scheduler_.AbortRequest(Pick(-1, next_id_), Chance(50) ? FinishReason::kLength : FinishReason::kFailed); });
    if (executor_.in_flight() == 0) return;
    const std::vector<int32_t> many(100, 0);
    Refused("size", [&] { (void)scheduler_.Advance(executor_.oldest_plan(), many, many, many); });
  }

  template <class Call>
  void Refused(const char* name, Call&& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      ++tally_.calls[name];
      return;
    }
    Fail(std::string(name) + " was not refused");
  }

  // Everything accepted must come to an end, and leave nothing behind.
  int64_t Drain() {
    int64_t operations = 0;
    while (scheduler_.HasWork() || executor_.in_flight() > 0) {
      if (++operations > 200'000) Fail("the scheduler does not come to an end");
      now_us_ += 10;
      if (scheduler_.plans_in_flight() <= scheduler_.config().overlap_depth) executor_.Plan(scheduler_.NextExecutionPlan(now_us_));
      if (executor_.in_flight() > 0 && (scheduler_.plans_in_flight() > scheduler_.config().overlap_depth || Chance(30) || executor_.last_was_idle())) {
        const auto results = executor_.Execute([&](int64_t low, int64_t high) { return Pick(low, high); }, 100, 4);
        executor_.Advanced(results, scheduler_.Advance(results.plan_id, results.counts, results.tokens, results.outcomes));
      }
      if (executor_.tiers().in_flight() > 0 && (Chance(50) || executor_.last_was_idle())) AnswerTransfers(Pick(1, 4));
      Check();
    }
    executor_.Plan(scheduler_.NextExecutionPlan(now_us_));  // carries the reports of aborts outside of steps
    for (int64_t session = 0; session < 6; ++session) (void)scheduler_.PrefetchSession(session, now_us_);
    while (executor_.tiers().in_flight() > 0 || scheduler_.cache_ops_pending() > 0) {
      if (++operations > 200'000) Fail("the transfers do not come to an end");
      now_us_ += 10;
      TakePlan();
      AnswerTransfers(4);
      Check();
    }
    for (size_t group = 0; scheduler_.config().kv_events && group < scheduler_.config().groups.size(); ++group) {
      if (TellsEvents(group) && replay_.device(group) != scheduler_.Stats().pages_cached[group]) Fail("the events of the device do not add up");
    }
    if (!executor_.live().empty()) Fail("request " + std::to_string(executor_.live().begin()->first) + " was never reported as finished");
    const SchedulerStats stats = scheduler_.Stats();
    for (const int64_t active : stats.pages_active) {
      if (active != 0) Fail("a page is still held when idle");
    }
    if (stats.pages_active[0] != 0 || stats.slots_free != scheduler_.config().max_num_seqs) Fail("something is still held when idle");
    if (stats.retracted + stats.waiting + stats.running + stats.leaving + stats.parked != 0) Fail("a count of now is not zero when idle");
    if (stats.submitted != stats.finished + stats.aborted + stats.failed) Fail("the totals do not add up");
    if (scheduler_.config().groups.size() > 1) tally_.calls["token found by all groups"] += stats.prefix_hit_tokens;
    if (stats.host_pages_total.back() > 0 && !TellsFull(stats.host_pages_total.size() - 1)) {
      tally_.calls["token of several groups that the host had"] += stats.host_hit_tokens;
      tally_.calls["request of several groups that was reloaded"] += stats.reloads;
      tally_.calls["token of several groups that the store had"] += stats.storage_hit_tokens;
      tally_.calls["deadline of several groups that passed"] += stats.prefetch_timeouts;
    }
    (void)scheduler_.FlushCache();
    for (size_t group = 0; group < scheduler_.config().groups.size(); ++group) {
      if (scheduler_.Stats().host_pages_free[group] != scheduler_.config().groups[group].host_pages) Fail("a host page was lost");
      if (scheduler_.Stats().pages_free[group] != scheduler_.config().groups[group].num_pages) Fail("a page was lost");
    }
    scheduler_.CheckIntegrity();
    for (size_t s = 0; s < kStateCount; ++s) {
      for (size_t e = 0; e < kEventCount; ++e) tally_.transitions[s][e] += scheduler_.transitions()[s][e];
    }
    return operations;
  }

  std::mt19937_64 random_;
  Tally& tally_;
  bool pressed_ = false;
  int again_percent_ = 30;    // prompts that others have as well
  int sessions_percent_ = 0;  // operations that bring a session up, beside those below
  int flush_percent_ = 0;     // operations that flush, beside those below
  int good_percent_ = 85;
  Scheduler scheduler_;
  ExecutorModel executor_;
  EventReplay replay_;
  int64_t next_id_ = 0;
  int64_t now_us_ = 0;
};

// Whether a state or event exists only where pages are copied to or from the host.
bool OfTiers(std::string_view name) {
  constexpr std::string_view kNames[] = {"Prefetching", "PrefetchDone", "Retracting",     "WritingBack", "AskStore",   "StoreAnswered",
                                         "RetractLater", "Reload",      "ReloadInFlight", "Released",    "EndWriting", "StepEndedWriting"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// Prints the counts; returns the lowest of those that can be reached.
int64_t Report(const Tally& tally, bool tiers, bool print) {
  int64_t lowest = INT64_MAX;
  const auto line = [&](const std::string& name, int64_t count) {
    if (print) std::printf("%12lld  %s\n", static_cast<long long>(count), name.c_str());
    lowest = std::min(lowest, count);
  };
  const TransitionTable table = MakeTransitionTable();
  for (size_t s = 0; s < kStateCount; ++s) {
    for (size_t e = 0; e < kEventCount; ++e) {
      if (table[s][e] < 0 || (!tiers && (OfTiers(kStateNames[s]) || OfTiers(kEventNames[e])))) continue;
      line(std::string(kStateNames[s]) + " + " + std::string(kEventNames[e]), tally.transitions[s][e]);
    }
  }
  for (size_t i = 0; i < kSubmitRefusalCount; ++i) line("submit refusal " + std::to_string(i), tally.submit[i]);
  for (size_t i = 0; i < kRowRefusalCount; ++i) line("row refusal " + std::to_string(i), tally.row[i]);
  for (size_t i = 0; i < kAbortRefusalCount; ++i) line("abort refusal " + std::to_string(i), tally.abort[i]);
  for (const auto& [name, count] : tally.calls) line("call refusal " + name, count);
  return lowest;
}

}  // namespace
}  // namespace tokenspeed

int main(int argc, char** argv) {
  int64_t operations = 20'000;
  uint64_t seed = 1;
  int64_t minimum = 0;
  bool report = false;
  bool tiers = true;
  bool groups = false;
  bool group_tiers = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--report") report = true;
    else if (name == "--no-tiers") tiers = false;
    else if (name == "--groups") groups = true;
    else if (name == "--tiers") group_tiers = true;
    else if (name == "--ops" && i + 1 < argc) operations = std::atoll(argv[++i]);
    else if (name == "--seed" && i + 1 < argc) seed = static_cast<uint64_t>(std::atoll(argv[++i]));
    else if (name == "--minimum" && i + 1 < argc) minimum = std::atoll(argv[++i]);
    else {
      std::fprintf(stderr, "usage: fuzz_scheduler [--ops N] [--seed S] [--no-tiers] [--groups [--tiers]] [--report] [--minimum M]\n");
      return 2;
    }
  }
  tokenspeed::Tally tally;
  int64_t done = 0;
  for (uint64_t round = seed; done < operations; ++round) {
    try {
      done += tokenspeed::Round(round, tiers, groups, group_tiers, tally).Run(600);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(round), error.what());
      return 1;
    }
  }
  const int64_t lowest = tokenspeed::Report(tally, tiers && (!groups || group_tiers), report);
  std::printf("%lld operations, integrity after each; the rarest transition or refusal was reached %lld times\n",
              static_cast<long long>(done), static_cast<long long>(lowest));
  return lowest >= minimum ? 0 : 1;
}
