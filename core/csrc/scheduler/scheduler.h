// The scheduler: turns requests into plans, and results into the next state of requests.
//
//     SubmitRequests --> waiting --> NextExecutionPlan --> [executor] --> Advance --> finished
//
// A pure function of its calls: no clock, no randomness, no order by address or by request id. Not thread-safe: one caller at a
// time. Misuse of one request ends or refuses that request; misuse of a call throws std::invalid_argument and changes nothing.
//
// Who owns what: the scheduler owns the pools, the tree, every request and the plan buffers. Every page is in one place:
//
//     free in the pool | cached in the tree | in the tail of one residence | deferred until a step in flight has ended |
//     in a load back
//
// and so is every page of a window or recurrent group: free | in its AdjunctCache | in one residence | deferred | in a load back.
//
// A plan costs O(rows + changes): nothing in it walks the cached pages, the context of a row or the queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/adjunct_cache.h"
#include "cache/evicted_pages.h"
#include "cache/host_cache.h"
#include "cache/kv_events.h"
#include "cache/page_pool.h"
#include "cache/prefix_tree.h"
#include "scheduler/cache_ops.h"
#include "scheduler/config.h"
#include "scheduler/execution_plan.h"
#include "scheduler/inflight_prefixes.h"
#include "scheduler/observations.h"
#include "scheduler/policies.h"
#include "scheduler/request.h"
#include "scheduler/results.h"
#include "scheduler/row_order.h"
#include "scheduler/transitions.h"
#include "scheduler/waiting_queue.h"

namespace tokenspeed {

class Scheduler {
 public:
  // Throws std::invalid_argument naming the field.
  explicit Scheduler(SchedulerConfig config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // One result a spec, in order; a bad spec is refused and the others go on.
  std::vector<SubmitResult> SubmitRequests(std::vector<RequestSpec> specs, int64_t now_us);

  // The next step. Valid until the plan after next is taken, and as long as it is in flight. A plan with rows must be answered by Advance, an IDLE one must not.
  // Throws std::invalid_argument where overlap_depth + 1 plans wait for their results.
  const ExecutionPlan& NextExecutionPlan(int64_t now_us);

  // The results of the oldest plan in flight: counts and outcomes (rows), tokens (rows * max_row_width) row by row.
  // Throws std::invalid_argument where it is not that plan, or a size is wrong.
  AdvanceResult Advance(int64_t plan_id, std::span<const int32_t> counts, std::span<const int32_t> tokens, std::span<const int32_t> outcomes,
                        int64_t step_us = 0);

  // kNone where the request ends now or once its step in flight has; the end is reported by the next result or plan. kStop: it is
  // complete (a stop string); it counts as finished, and the length of its output is learnt from. Throws for any other reason.
  AbortRefusal AbortRequest(int64_t id, FinishReason reason = FinishReason::kAborted);

  [[nodiscard]] std::vector<PageHash> CalcRollingHash(std::span<const int32_t> tokens, std::string_view salt,
                                                      std::vector<ExtraKey> extra_keys, int64_t adapter) const;
  // Answers transfers: pages[i] is how many leading pages of op_ids[i] are good. All of them is success; what is not good is a miss.
  // Throws std::invalid_argument, with nothing changed, for an op that is not in flight or a count that it does not have.
  void CacheDone(std::span<const int64_t> op_ids, std::span<const int32_t> pages);

  // Drops every cached page that nothing uses, on the device and on the host; returns how many.
  int32_t FlushCache();

  // Brings the last turn of a session back to the device before its next turn comes: pages that it lacks and that the host has or the
  // store is asked for; 0 where nothing of it is missing or can be had, -1 where the session is not known. A plan begins to load them
  // once there is room, into at most half of that, in each group; after a second it takes that half as it is, and windows and states, of
  // which a part is of no use, are left for the turn itself.
  int32_t PrefetchSession(int64_t session, int64_t now_us);
  // Keeps its prefix no longer than others. False where it is not known.
  bool ReleaseSession(int64_t session);

  // What entered and left each tier since the last call. Empty unless config().kv_events.
  [[nodiscard]] KvEvents DrainKvEvents() { return events_.Drain(); }

  // Throws std::logic_error naming what is wrong.
  void CheckIntegrity() const;

  [[nodiscard]] SchedulerStats Stats() const;
  [[nodiscard]] std::optional<RequestInfo> InfoOf(int64_t id) const;
  [[nodiscard]] bool HasWork() const noexcept { return LiveRequests() > 0; }
  [[nodiscard]] int64_t NumWaiting() const noexcept {
    return In(StateName::kSubmitted) + In(StateName::kPrefetching) + In(StateName::kPrefetchDone) + In(StateName::kRetracting) +
           In(StateName::kRetracted);
  }
  [[nodiscard]] int64_t NumRunning() const noexcept {
    return In(StateName::kPrefilling) + In(StateName::kPrefillDone) + In(StateName::kDecoding);
  }
  [[nodiscard]] int64_t cache_ops_in_flight() const noexcept { return static_cast<int64_t>(ops_.size()); }
  // Transfers decided on that stand in no plan yet.
  [[nodiscard]] int64_t cache_ops_pending() const noexcept {
    size_t pending = pending_writes_.size() + pending_copies_.size() + pending_lookups_.size() + pending_prefetches_.size() + pending_sessions_.size();
    for (const auto& stores : pending_stores_) pending += stores.size();
    return static_cast<int64_t>(pending);
  }
  [[nodiscard]] int32_t plans_in_flight() const noexcept { return static_cast<int32_t>(steps_.size()); }
  [[nodiscard]] const SchedulerConfig& config() const noexcept { return config_; }
  [[nodiscard]] const TransitionCounts& transitions() const noexcept { return transitions_; }

 private:
  struct StepRow {
    Request* request;
    int32_t tokens;
    bool samples;
    bool extend;
    bool loads;  // the first row after an admission that loads a prefix back
  };
  struct Step {
    int64_t plan_id;
    std::vector<StepRow> rows;
    int32_t prefill_tokens = 0;
    double attended = 0.0;  // by them, in all
    bool filled = false;    // with most of the prompt tokens that it could have
  };

  // A window or recurrent group. REQUIRES of its cache: an entry exists only while the tree has its block. A page on the host may outlive
  // its block, which may come back: it is found by matches alone, and leaves as the coldest.
  struct AdjunctGroup {
    AdjunctGroup(const SchedulerConfig& config, size_t group, size_t at, KvEventLog& events)
        : index(static_cast<int32_t>(group)),
          place(at),
          kind(config.groups[group].kind),
          window(config.groups[group].window),
          interval(config.groups[group].page_size),
          steady(kind == CacheGroupKind::kWindow ? config.WindowPages(config.groups[group]) : 1),
          cache(config.groups[group].num_pages, &events, index),
          host(config.groups[group].host_pages, events, index, HostOrder::kFlat) {}
    [[nodiscard]] bool Has(const PageHash& hash, bool or_host) const noexcept { return cache.Has(hash) || (or_host && host.Ready(hash)); }
    int32_t index;  // of the config's groups
    size_t place;   // of a residence's holds
    CacheGroupKind kind;
    int32_t window;    // tokens
    int32_t interval;  // tokens between two states that can be kept
    int32_t steady;    // pages that a request needs at most to go on token by token
    AdjunctCache cache;
    HostCache host;
    std::unordered_set<PageHash, PageHashHasher> coming;  // what loads for sessions bring: nobody else brings it too
    mutable int32_t promised = -1;  // PromisedPages within the plan being made; -1: not measured
  };
  // Blocks [begin, end).
  struct Blocks {
    int32_t begin, end;
    [[nodiscard]] int32_t count() const noexcept { return end - begin; }
  };

  // ---- scheduler.cpp: requests come and go ----
  [[nodiscard]] SubmitResult Check(const RequestSpec& spec) const;
  void Accept(RequestSpec spec);
  // Takes the transition that the state has for the event; false, with nothing changed, where it has none.
  template <class Event>
  bool Apply(Request& request, Event event);
  // Ends a running request, at once or, with a step in flight, when that has ended.
  void Finish(Request& request, FinishReason reason);
  void ForgetRunning(Request& request);
  void CompactDecodes();
  // REQUIRES: no step of it in flight, and it has left the running.
  void EndNow(Request& request, FinishReason reason);
  void Retire(Request& request);
  void Report(const Request& request, FinishReason reason);
  void QueueWoken();
  [[nodiscard]] int64_t In(StateName name) const noexcept { return state_counts_[static_cast<size_t>(name)]; }
  [[nodiscard]] int64_t LiveRequests() const noexcept { return static_cast<int64_t>(requests_.size() - retired_.size()); }

  // ---- scheduler_decode.cpp: decodes and page pressure ----
  // Below, `group` is where pages are short: a window group, or nullptr for the full ones.
  void ReserveDecodes();
  void SettleShortage(const AdjunctGroup* group);
  [[nodiscard]] int32_t PagesLacking(const AdjunctGroup* group, const Request& request) const;
  [[nodiscard]] int32_t AvailableIn(const AdjunctGroup* group) const noexcept { return group == nullptr ? Available() : group->cache.available(); }
  // The best one to retract, or nullptr. `fair_only`: not one that has made no progress since its resumption.
  Request* PickVictim(bool fair_only, const AdjunctGroup* group);
  void RetractRequest(Request& request);
  void ArrangeDecodes();
  void PlanDecodes();
  [[nodiscard]] Request* OldestRunning() const;

  // ---- scheduler_prefill.cpp: chunks and admission ----
  void PlanPrefills(PrefillShare share);
  [[nodiscard]] PrefillShare ShareBeside(int32_t decode_tokens);
  // Microseconds that a step with decodes may take: max_step_us for each kPromptsInBound prompts that could run, and at least once.
  static constexpr double kPromptsInBound = 4.0;
  [[nodiscard]] double StepBound();
  // The prefill cost that keeps a step with decodes within the bound; `untried` before any was timed.
  double PrefillCostWithin(double max_step_us, double untried);
  // Plans the next chunk out of the share; its tokens, 0 where no page is left for it.
  int32_t PlanChunk(Request& request, PrefillShare& share);
  bool AdmitNext(PrefillShare& share);
  void UnblockPrefill();
  // The tokens that pages are there for.
  [[nodiscard]] int32_t Reachable(const Request& request, const Residence& residence) const;
  // Refreshes the hint; true where the request waits for a prefix being computed (and has left the queue).
  bool ParkIfComputing(Request& request);
  [[nodiscard]] bool CanAdmit(Request& request);
  // Whether it might be, were all of its prefix there that the hint says.
  [[nodiscard]] bool MightAdmit(const Request& request);
  void AdmitRequest(Request& request);
  // Begins to bring pages [from, to) of its prefix back from the host.
  void LoadBack(Request& request, Residence& residence, int32_t from, int32_t to);
  void MeasureRoom();
  [[nodiscard]] int32_t MatchLimit(const Request& request) const;
  // Why its prefix in the cache ends after `reach` pages; sets the group that ends it.
  [[nodiscard]] HitCut CutOf(Request& request, int32_t reach);
  [[nodiscard]] int32_t GrowthPages(const Request& request) const;

  // ---- scheduler_advance.cpp ----
  RowRefusal Settle(Request& request, const StepRow& row, int32_t count, const int32_t* tokens, int32_t outcome);
  [[nodiscard]] RowRefusal CheckResult(const StepRow& row, int32_t count, const int32_t* tokens, int32_t outcome) const;
  void Publish(Request& request, Residence& residence);
  void RecordStored(const Request& request, int32_t begin, int32_t end);
  void LastStepEnded(Request& request, StateName name);

  // ---- scheduler_groups.cpp: window and recurrent groups ----
  [[nodiscard]] int32_t WindowBegin(const AdjunctGroup& group, int32_t position) const;
  // The blocks whose pages a request needs to go on at that boundary.
  [[nodiscard]] Blocks NeededAt(const AdjunctGroup& group, int32_t boundary) const;
  // The longest boundary, at most `depth` blocks, at which this group can go on, and at which all can. `has(group, block)`: whether it has
  // the page of that block. `cut_by`: set to the group that cut it last.
  template <class Has>
  [[nodiscard]] int32_t LongestBoundary(const AdjunctGroup& group, int32_t depth, Has&& has) const;
  template <class Has>
  [[nodiscard]] int32_t CommonBoundary(int32_t depth, Has&& has, int32_t* cut_by = nullptr) const;
  // The same by what the device has, or the host.
  [[nodiscard]] int32_t ResumableDepth(const std::vector<PageHash>& hashes, int32_t depth, bool or_host = true, int32_t* cut_by = nullptr) const;
  [[nodiscard]] int32_t SteadyPages(const AdjunctGroup& group, const Request& request) const;
  [[nodiscard]] int32_t OwedPages(const AdjunctGroup& group, const Request& request) const;
  [[nodiscard]] int32_t PromisedPages(const AdjunctGroup& group) const;
  void ForgetPromises() noexcept {
    for (AdjunctGroup& group : adjuncts_) group.promised = -1;
  }
  [[nodiscard]] bool CanHold(const Request& request, bool at_best = false) const;
  // Whether every group may come to have a boundary between the two, in blocks.
  [[nodiscard]] bool BoundaryBetween(int32_t depth, int32_t limit) const;
  [[nodiscard]] HitCut CutByGroup(Request& request, int32_t reach, int32_t full);
  void Hold(Request& request, Residence& residence, int32_t boundary);
  [[nodiscard]] int32_t LackingPages(const AdjunctGroup& group, const Residence& residence, int32_t end) const;
  [[nodiscard]] int32_t ReachIn(const AdjunctGroup& group, const Request& request, const Residence& residence) const;
  [[nodiscard]] int32_t ChunkBound(const Request& request, const Residence& residence, int32_t begin) const;
  void GrowHolds(Residence& residence, int32_t end);
  void PrepareStates(Request& request, Residence& residence, int32_t begin, int32_t tokens);
  [[nodiscard]] AdjunctPin PublishPage(const Request& request, AdjunctGroup& group, int32_t block, PageLease& page);
  [[nodiscard]] AdjunctPin PublishState(Request& request, AdjunctGroup& group, int32_t position, PageLease& page);
  void PublishHolds(Request& request, Residence& residence, int32_t first, int32_t full);
  void PublishKept(Request& request, Residence& residence, AdjunctGroup& group);
  void SettleHolds(Request& request, Residence& residence);
  void SettleWindow(Request& request, Residence& residence, AdjunctGroup& group);
  void KeepStates(Request& request, Residence& residence);
  [[nodiscard]] int32_t HeldAlone(const AdjunctGroup& group, const Residence& residence) const;
  void CheckAdjuncts() const;
  void CheckFetches() const;
  // ---- scheduler_group_tiers.cpp: their pages on the host ----
  // Copies the page of that block to the host, from the next plan on, where the device has it and the host has not.
  void QueueCopy(AdjunctGroup& group, const PageHash& hash, Request* owner);
  // The same for all that a request needs to go on at that boundary; `alone`: but what others use.
  void QueueCopies(Request& request, int32_t boundary, const Residence* alone);
  void QueueColdCopies(int32_t cold_blocks);
  void BeginCopies();
  // Pages of this group in transfer that no running request will have afterwards.
  [[nodiscard]] int32_t PagesLeavingIn(const AdjunctGroup& group) const;
  void LoadHolds(Request& request, Residence& residence, AdjunctGroup& group, std::vector<int32_t> blocks);
  void LoadsEnded(Request& request, Residence& residence);
  void Answer(int64_t id, AdjunctWriteOp& op, int32_t pages);
  void Answer(int64_t id, AdjunctLoadOp& op, int32_t pages);

  // ---- scheduler_cache.cpp: transfers between the tiers ----
  [[nodiscard]] Request* Find(const RequestKey& key) const;
  // Copies pages [begin, pin.depth()) of the pinned path to the host, those that it has not, from the next plan on.
  void QueueWrite(Request* owner, const NodePin& pin, int32_t begin);
  [[nodiscard]] int32_t MissingOnHost(const NodePin& pin, int32_t begin) const;
  // Pages that copies to the host keep, and that no running request will have afterwards; at most this many.
  [[nodiscard]] int32_t PagesLeaving() const;
  [[nodiscard]] bool AnyMoving() const;
  void BeginTransfers();
  void BeginWrites();
  void QueueColdWrites();
  // The pages of an op of its load have come, or not.
  void LoadAnswered(Request& request, Residence& residence, bool failed);
  void Answer(int64_t id, WriteBackOp& op, int32_t pages);
  void Answer(int64_t id, LoadBackOp& op, int32_t pages);
  void WriteEnded(const RequestKey& owner);
  // ---- scheduler_sessions.cpp: prefixes kept between the turns of a session ----
  struct Session {
    std::vector<PageHash> hashes;  // of its last turn
    std::vector<int32_t> tokens;   // of those pages, where events tell of them
    int32_t boundary;              // pages: where the next turn can go on, in all groups
    PageHash tenant;               // whose pages it can share: salt and adapter
    int64_t adapter;
    int64_t until_us;
    int64_t fetch = -1;  // what the store is asked for it; -1: nothing now
  };
  struct Tenant {
    int64_t pages = 0;                            // kept for its sessions, each once
    std::set<std::pair<int64_t, int64_t>> ends;  // of these, as session_ends_
  };
  [[nodiscard]] int64_t RetainBound() const noexcept;
  // Of the pages of a pool, what sessions may keep.
  [[nodiscard]] int64_t ShareOf(int32_t pages) const noexcept { return int64_t{pages} * config_.retain_percent / 100; }
  // Whether a session of so many pages may be kept if others give way.
  [[nodiscard]] bool FitsAmongSessions(const PageHash& tenant, int64_t pages) const;
  // The session that gives way for the new one, which is itself the answer where its tenant has no other.
  [[nodiscard]] int64_t NextToGiveWay(int64_t newest) const;
  // Counts the session's pages; answers how many of them, from the first on, others keep too.
  int32_t CountSession(int64_t id, const Session& session, bool kept);
  void RetainSession(Request& request, FinishReason reason);
  void ExpireSessions();
  void ForgetSession(int64_t id);
  void BeginSessionLoads();
  // From the next plan on. The pages that it lacks.
  int32_t QueueSessionLoad(int64_t id);
  static constexpr int64_t kSessionPatienceUs = 1'000'000;  // what a prefetch waits for room before it takes what there is
  // Whether the pages of windows and the state at its boundary, of which it needs so many, are a share that sessions may keep.
  [[nodiscard]] bool MayKeep(const AdjunctGroup& group, int32_t boundary) const;
  [[nodiscard]] bool SessionsKeepTooMuch() const;
  void KeepHolds(const Session& session, bool kept);
  // Pages of windows and states that the device lacks and the host has; 0 where one cannot be had.
  [[nodiscard]] int32_t HoldsLacking(const Session& session) const;
  // Whether that was begun or is on its way, or will not be; else there is no room for it now.
  bool LoadSessionHolds(const Session& session, const PrefixTree::Position& position);
  struct PendingSession {
    int64_t id;
    int32_t pages;  // that it lacked when it was asked for
    int64_t patient_until_us;
  };
  // The device's depth of its prefix, and the host's below it.
  [[nodiscard]] std::pair<PrefixTree::Position, int32_t> ReachOf(const Session& session);

  // Its prefix did not come back from the host: it gives everything up and computes.
  void Reload(Request& request);

  // ---- scheduler_store.cpp: the store below ----
  struct Fetch {
    RequestKey owner;
    int32_t limit;      // blocks that the owner has a use for
    int32_t from;       // where it can go on by the tiers above alone
    int32_t begin;      // blocks that these have in the full groups
    int32_t full = -1;  // blocks that these and the store have there; -1: not known yet
    int32_t goal = 0;   // where it is to go on, once that is known
    int32_t rounds = 0;  // of questions about windows and states
    int32_t waits = 0;   // transfers that it waits for
    bool asked = false, hit = false;  // counted as such
    // Pages of windows and states, by place of the group and block: what the store said.
    std::map<std::pair<size_t, int32_t>, bool> told{};
  };
  void AskStoreFor(Request& request);
  [[nodiscard]] bool WorthAsking(int32_t from, int32_t limit) const;
  int64_t BeginFetch(Fetch fetch);
  // The blocks of the request or session that waits for it; nullptr where none does any more, and the fetch is forgotten.
  const std::vector<PageHash>* AskedFor(int64_t fetch);
  [[nodiscard]] bool MayHave(const Fetch& fetch, const PageHash& hash, const AdjunctGroup& group, int32_t block) const;
  [[nodiscard]] int32_t BoundaryOf(const Fetch& fetch, const std::vector<PageHash>& hashes) const;
  [[nodiscard]] std::vector<int32_t> Unasked(const Fetch& fetch, const std::vector<PageHash>& hashes, const AdjunctGroup& group, int32_t boundary) const;
  void BeginLookups();
  void Ask(int64_t id, const std::vector<PageHash>& hashes, size_t tier, std::vector<int32_t> blocks);
  void AskForHolds(int64_t id, const std::vector<PageHash>& hashes);
  void Weigh(int64_t id, const std::vector<PageHash>& hashes);
  void BeginPrefetches();
  void BeginPrefetch(int64_t id, const std::vector<PageHash>& hashes);
  void EndFetch(int64_t id);
  void ExpireFetches();
  void QueueStore(size_t tier, const HostPin& pin);
  void BeginStores();
  bool BeginStore(size_t tier);
  void Answer(int64_t id, LookupOp& op, int32_t pages);
  void Answer(int64_t id, PrefetchOp& op, int32_t pages);
  void Answer(int64_t id, StoreOp& op, int32_t pages);
  [[nodiscard]] HostCache& HostOf(size_t tier) noexcept { return tier == 0 ? host_ : adjuncts_[tier - 1].host; }
  [[nodiscard]] int32_t GroupOf(size_t tier) const noexcept { return tier == 0 ? 0 : adjuncts_[tier - 1].index; }

  [[nodiscard]] int32_t PagesFor(int32_t tokens) const noexcept { return (tokens + page_size_ - 1) / page_size_; }
  [[nodiscard]] int32_t Available() const noexcept { return pages_.available() + tree_.evictable(); }
  // REQUIRES: Available() > 0.
  [[nodiscard]] PageLease TakePage();
  PrefixTree::Evicted EvictOne(bool record = true);
  void GrowTail(Residence& residence, int32_t pages);
  void AddRow(Request& request, Residence& residence, int32_t tokens, bool samples, bool extend);

  const SchedulerConfig config_;
  const int32_t page_size_;
  const AdmissionPolicy admission_;
  const RetractionPolicy retraction_;

  // Declared before everything that holds a lease on them.
  KvEventLog events_;
  PagePool pages_;
  SlotPool slots_;
  HostCache host_;  // of the full groups
  const bool tiers_;  // some group has host pages
  std::deque<AdjunctGroup> adjuncts_;  // a deque: they stay where they are
  EvictedPages evicted_pages_;
  PrefixTree tree_;
  InflightPrefixes inflight_prefixes_;

  // Pages given up while a step in flight reads them: free once that plan is advanced.
  std::deque<std::pair<int64_t, PageLease>> deferred_;

  struct DeferredAdjunct {
    int64_t plan_id;
    size_t place;
    AdjunctPin pin;
    PageLease page;
  };
  std::deque<DeferredAdjunct> deferred_adjuncts_;

  // Transfers in flight by id, and those that the next plan begins.
  std::map<int64_t, CacheOp> ops_;
  std::vector<std::map<int64_t, CacheOp>::node_type> spare_ops_;  // of those answered, for their memory
  struct PendingWrite {
    RequestKey owner;
    NodePin pin;
    int32_t begin;
    uint64_t cold_since;
  };
  struct PendingCopy {
    RequestKey owner;
    size_t place;
    std::vector<AdjunctPin> pages;
  };
  std::vector<PendingWrite> pending_writes_;
  std::vector<PendingCopy> pending_copies_;  // of windows and states
  std::map<int64_t, Fetch> fetches_;
  int64_t next_fetch_ = 0;
  std::vector<int64_t> pending_lookups_;     // fetches with something to ask
  std::vector<int64_t> pending_prefetches_;  // and those that know what they want
  std::vector<std::deque<PageHash>> pending_stores_;  // by tier
  size_t next_store_ = 0;  // the tier whose turn it is
  int64_t next_op_ = 1;
  int64_t moving_ = 0;  // of those in flight: between host and device
  struct Deadline {
    int64_t at_us;
    int64_t fetch;
  };
  std::deque<Deadline> fetch_deadlines_;  // the earliest first: all wait equally long
  std::unordered_map<int64_t, Session> sessions_;
  std::set<std::pair<int64_t, int64_t>> session_ends_;  // (until_us, session)
  std::map<PageHash, Tenant> tenants_;                       // those with sessions
  std::set<std::pair<int64_t, PageHash>> tenants_by_pages_;  // (pages, tenant)
  std::unordered_map<PageHash, int32_t, PageHashHasher> retained_;  // pages of sessions, with how many keep each
  std::vector<PendingSession> pending_sessions_;  // to be brought up by a plan that has room
  std::vector<int64_t> reloaded_;         // told of by the next plan

  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  std::deque<std::pair<int64_t, uint64_t>> retired_;  // finished ones still known, oldest first: (id, arrival)
  RequestsInOrder waiting_;
  RequestsInOrder prefilling_;
  std::vector<Request*> decoding_;  // PrefillDone and Decoding, in tree order once arranged; nullptr where one left since
  bool decodes_dirty_ = false;

  ExecutionPlan plans_[3];  // being made, the one before, and one in flight with IDLE plans taken since
  ExecutionPlan* plan_ = &plans_[0];
  std::deque<Step> steps_;  // in flight, oldest first
  std::vector<std::vector<StepRow>> spare_rows_;
  Step* step_ = nullptr;  // of the plan being made

  // Page-table entries that changed outside a plan (a page replaced by its twin), by slot occupancy.
  struct TableChange {
    int32_t slot, index, page;
    uint64_t occupancy;
  };
  std::vector<TableChange> table_changes_;
  std::vector<uint64_t> occupancy_;  // per slot: the admission that holds or held it
  uint64_t admissions_ = 0;
  uint64_t admissions_before_plan_ = 0;

  std::vector<std::pair<int64_t, FinishReason>> ended_;  // not reported yet
  int64_t next_plan_id_ = 1;  // while a plan is being made: one more than its id
  uint64_t next_arrival_ = 0;
  int64_t now_us_ = 0;

  // Room for admission within the plan being made; measured on demand.
  bool room_measured_ = false;
  int32_t room_ = 0;         // pages available and not promised to chunks still to come
  int32_t growth_room_ = 0;  // pages that the running ones are expected to add

  OutputLengths output_lengths_;
  PrefillCost prefill_cost_;
  StepTimes step_times_;
  StepTimes filled_times_;  // of steps that the device fills up (`step_sizes`): those that are not cost another price a token
  std::array<int64_t, kStateCount> state_counts_{};
  TransitionCounts transitions_{};
  SchedulerStats totals_;  // its "ever" part

  // Scratch, kept for its memory.
  RowOrder row_order_;
  std::vector<const PrefixNode*> pins_scratch_;
  std::vector<Request*> rows_scratch_;
  std::vector<int32_t> index_scratch_;
  std::vector<PrefixTree::Replaced> replaced_scratch_;
  std::vector<PageHash> hash_scratch_;
};

template <class Has>
int32_t Scheduler::LongestBoundary(const AdjunctGroup& group, int32_t depth, Has&& has) const {
  if (group.kind == CacheGroupKind::kRecurrent) {
    const int32_t step = group.interval / page_size_;
    int32_t at = depth - depth % step;
    while (at > 0 && !has(group, at - 1)) at -= step;
    return at;
  }
  // A block that is missing cuts the boundary to its begin; those between are known to be there.
  int32_t boundary = depth;
  for (int32_t block = depth - 1; boundary > 0 && block >= WindowBegin(group, boundary * page_size_); --block) {
    if (!has(group, block)) boundary = block;
  }
  return boundary;
}

template <class Has>
int32_t Scheduler::CommonBoundary(int32_t depth, Has&& has, int32_t* cut_by) const {
  for (bool cut = true; cut && depth > 0;) {
    cut = false;
    for (const AdjunctGroup& group : adjuncts_) {
      const int32_t boundary = LongestBoundary(group, depth, has);
      if (boundary == depth) continue;
      cut = true;
      if (cut_by != nullptr) *cut_by = group.index;
      depth = boundary;
    }
  }
  return depth;
}

template <class Event>
bool Scheduler::Apply(Request& request, Event event) {
  const size_t from = request.state.index();
  if (!Dispatch(request.state, std::move(event))) return false;
  ++transitions_[from][kEventIndex<Event>];
  --state_counts_[from];
  ++state_counts_[request.state.index()];
  return true;
}

}  // namespace tokenspeed
