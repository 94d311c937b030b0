#include "scheduler/scheduler.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

namespace tokenspeed {

namespace {

SchedulerConfig Validated(SchedulerConfig config) {
  config.Validate();
  return config;
}

constexpr int64_t kMaxPriority = 1'000'000;
constexpr int64_t kMaxRetainUs = 86'400'000'000;  // a day

}  // namespace

Scheduler::Scheduler(SchedulerConfig config)
    : config_(Validated(std::move(config))),
      page_size_(config_.groups[0].page_size),
      admission_(MakeAdmissionPolicy(config_.admission)),
      retraction_(MakeRetractionPolicy(config_.retraction)),
      events_(config_.kv_events),
      pages_(config_.groups[0].num_pages),
      slots_(config_.max_num_seqs),
      host_(config_.groups[0].host_pages, events_),
      tiers_(config_.has_host_tier()),
      evicted_pages_(int64_t{config_.groups[0].num_pages} + config_.groups[0].host_pages),
      occupancy_(static_cast<size_t>(config_.max_num_seqs), 0) {
  for (size_t index = 1; index < config_.groups.size(); ++index) {
    if (config_.groups[index].kind != CacheGroupKind::kFull) adjuncts_.emplace_back(config_, index, adjuncts_.size(), events_);
  }
  pending_stores_.resize(adjuncts_.size() + 1);
  for (ExecutionPlan& plan : plans_) plan.Reserve(config_);
  decoding_.reserve(static_cast<size_t>(config_.max_num_seqs));
}

// ---- coming ----

SubmitResult Scheduler::Check(const RequestSpec& spec) const {
  const auto refuse = [](SubmitRefusal refusal, std::string reason) { return SubmitResult{refusal, std::move(reason)}; };
  const auto number = [](auto value) { return std::to_string(value); };
  const auto length = static_cast<int64_t>(spec.tokens.size());
  const int64_t pool_tokens = int64_t{pages_.total()} * page_size_;

  const auto known = requests_.find(spec.id);
  const bool in_use = known != requests_.end() && NameOf(known->second->state) != StateName::kFinished;
  // An end that nobody was told of yet would be taken for that of the new request.
  const bool untold = std::any_of(ended_.begin(), ended_.end(), [&](const auto& ended) { return ended.first == spec.id; });
  if (in_use || untold) {
    return refuse(SubmitRefusal::kDuplicateId, "request id " + number(spec.id) + " is in use; choose another or wait until it has finished");
  }
  if (length == 0) return refuse(SubmitRefusal::kEmptyPrompt, "the prompt has no tokens; send at least one");
  if (spec.max_new_tokens < 1) {
    return refuse(SubmitRefusal::kBadMaxNewTokens, "max_new_tokens is " + number(spec.max_new_tokens) + "; it must be at least 1");
  }
  if (length >= config_.max_model_len) {
    return refuse(SubmitRefusal::kTooLong, "the prompt has " + number(length) + " tokens, and with one new token it passes max_model_len " +
                                               number(config_.max_model_len) + "; shorten it or raise --max-model-len");
  }
  if (length > pool_tokens) {
    return refuse(SubmitRefusal::kNeverFits, "the prompt has " + number(length) + " tokens and the KV pool holds " + number(pool_tokens) +
                                                 "; shorten it or raise --max-total-tokens");
  }
  if (std::any_of(spec.tokens.begin(), spec.tokens.end(), [](int32_t token) { return token < 0; })) {
    return refuse(SubmitRefusal::kBadToken, "the prompt has a negative token; token ids start at 0");
  }
  for (const ExtraKey& extra : spec.extra_keys) {
    if (extra.position >= 0 && extra.position < length) continue;
    return refuse(SubmitRefusal::kBadExtraKey, "an extra key stands at position " + number(extra.position) + "; the prompt has " +
                                                   number(length) + " tokens");
  }
  if (spec.priority < -kMaxPriority || spec.priority > kMaxPriority) {
    return refuse(SubmitRefusal::kBadPriority, "priority is " + number(spec.priority) + "; it must be from " + number(-kMaxPriority) +
                                                   " to " + number(kMaxPriority));
  }
  if (spec.max_reuse_tokens < -1) {
    return refuse(SubmitRefusal::kBadMaxReuse,
                  "max_reuse_tokens is " + number(spec.max_reuse_tokens) + "; it must be -1 (no bound) or a number of tokens");
  }
  if (spec.session < -1 || spec.retain_us < 0 || spec.retain_us > kMaxRetainUs || (spec.session < 0 && spec.retain_us > 0)) {
    return refuse(SubmitRefusal::kBadRetain, "session is " + number(spec.session) + " and retain_us is " + number(spec.retain_us) +
                                                 "; retain_us must be from 0 to " + number(kMaxRetainUs) +
                                                 ", and 0 without a session (a number from 0 on)");
  }
  return {};
}

void Scheduler::Accept(RequestSpec spec) {
  auto request = std::make_unique<Request>();
  request->id = spec.id;
  request->order = {spec.priority * config_.aging_us + now_us_, next_arrival_++};
  request->prompt = std::move(spec.tokens);
  request->prompt_tokens = static_cast<int32_t>(request->prompt.size());
  request->output_limit = static_cast<int32_t>(std::min<int64_t>(spec.max_new_tokens, config_.max_model_len - request->prompt_tokens));
  request->output.reserve(static_cast<size_t>(std::min(request->output_limit, 2'048)));
  request->priority = static_cast<int32_t>(spec.priority);
  request->max_reuse_tokens = spec.max_reuse_tokens;
  request->multimodal = spec.multimodal;
  request->adapter = spec.adapter;
  request->session = spec.session;
  request->retain_us = spec.retain_us;
  request->queued_us = now_us_;
  if (config_.enable_prefix_caching) {
    request->extra_keys = std::move(spec.extra_keys);
    std::sort(request->extra_keys.begin(), request->extra_keys.end());
    request->seed = SeedHash(page_size_, spec.adapter, spec.salt);
    request->hashes = HashPages(request->seed, page_size_, request->prompt, request->extra_keys);
  }
  ++state_counts_[static_cast<size_t>(StateName::kSubmitted)];
  Request& accepted = *request;

  auto& place = requests_[spec.id];
  if (place != nullptr) {  // a finished request of the same id gives way
    std::erase_if(retired_, [&](const auto& retired) { return retired.second == place->order.arrival; });
    --state_counts_[static_cast<size_t>(StateName::kFinished)];
  }
  place = std::move(request);
  AskStoreFor(accepted);
  if (NameOf(accepted.state) == StateName::kSubmitted) waiting_.emplace(accepted.order, &accepted);
}

std::vector<SubmitResult> Scheduler::SubmitRequests(std::vector<RequestSpec> specs, int64_t now_us) {
  now_us_ = std::max(now_us_, now_us);
  std::vector<SubmitResult> results;
  results.reserve(specs.size());
  for (RequestSpec& spec : specs) {
    results.push_back(Check(spec));
    if (results.back().accepted()) {
      ++totals_.submitted;
      Accept(std::move(spec));
    } else {
      ++totals_.refused;
    }
  }
  return results;
}

// ---- going ----

void Scheduler::ForgetRunning(Request& request) {
  ForgetPromises();
  if (request.row < 0) {
    prefilling_.erase(request.order);
  } else {
    decoding_[static_cast<size_t>(request.row)] = nullptr;
    request.row = -1;
    decodes_dirty_ = true;
  }
}

void Scheduler::CompactDecodes() {
  std::erase(decoding_, nullptr);
  for (size_t row = 0; row < decoding_.size(); ++row) decoding_[row]->row = static_cast<int32_t>(row);
}

void Scheduler::Report(const Request& request, FinishReason reason) {
  ended_.emplace_back(request.id, reason);
  switch (reason) {
    case FinishReason::kAborted: ++totals_.aborted; break;
    case FinishReason::kFailed: ++totals_.failed; break;
    default:
      ++totals_.finished;
      output_lengths_.Observe(request.output_tokens);
  }
}

void Scheduler::Finish(Request& request, FinishReason reason) {
  ForgetRunning(request);
  Report(request, reason);
  if (request.inflight_rows > 0) Apply(request, EndInFlight{reason});
  else EndNow(request, reason);
}

void Scheduler::EndNow(Request& request, FinishReason reason) {
  if (!adjuncts_.empty()) KeepStates(request, *ResidenceOf(request.state));
  RetainSession(request, reason);
  if (request.writes > 0) {
    Apply(request, EndWriting{reason});
    request.DropTokens();
  } else {
    Apply(request, End{reason});
    Retire(request);
  }
}

// REQUIRES: the state is Finished.
void Scheduler::Retire(Request& request) {
  request.DropTokens();
  retired_.emplace_back(request.id, request.order.arrival);
  while (retired_.size() > static_cast<size_t>(config_.finished_history)) {
    const int64_t id = retired_.front().first;
    retired_.pop_front();
    --state_counts_[static_cast<size_t>(StateName::kFinished)];
    requests_.erase(id);
  }
}

AbortRefusal Scheduler::AbortRequest(int64_t id, FinishReason reason) {
  if (reason != FinishReason::kAborted && reason != FinishReason::kStop) {
    throw std::invalid_argument("reason is " + std::to_string(static_cast<int32_t>(reason)) + "; a request is ended from outside as ABORTED or by a STOP");
  }
  const auto found = requests_.find(id);
  if (found == requests_.end()) return AbortRefusal::kUnknown;
  Request& request = *found->second;
  const StateName before = NameOf(request.state);
  if (request.inflight_rows > 0) {
    if (!Apply(request, AbortInFlight{reason})) return before == StateName::kAborting ? AbortRefusal::kAborting : AbortRefusal::kFinished;
    if (before != StateName::kRetracting) ForgetRunning(request);
  } else {
    if (Residence* residence = ResidenceOf(request.state); residence != nullptr) {
      if (!adjuncts_.empty()) KeepStates(request, *residence);
      RetainSession(request, reason);
    }
    if (!Apply(request, Abort{reason})) return AbortRefusal::kFinished;
    inflight_prefixes_.Unpark(request);
    const bool running = before == StateName::kPrefilling || before == StateName::kPrefillDone || before == StateName::kDecoding;
    if (running) ForgetRunning(request);
    else waiting_.erase(request.order);  // where it stands there: not while the store is asked, or while it is being retracted
    Report(request, reason);
    Retire(request);
  }
  QueueWoken();
  return AbortRefusal::kNone;
}

void Scheduler::QueueWoken() {
  if (!inflight_prefixes_.any_woken()) return;
  for (PrefixWaiter* waiter : inflight_prefixes_.TakeWoken()) {
    auto* request = static_cast<Request*>(waiter);
    waiting_.emplace(request->order, request);
  }
}

// ---- pages ----

PageLease Scheduler::TakePage() {
  if (pages_.available() > 0) return pages_.Take();
  ++totals_.evicted_pages;
  PrefixTree::Evicted evicted = EvictOne();
  events_.Removed(KvMedium::kDevice, evicted.hash, evicted.depth);
  evicted_pages_.Add(evicted.hash);
  return std::move(evicted.page);
}

PrefixTree::Evicted Scheduler::EvictOne(bool record) {
  PrefixTree::Evicted evicted = tree_.EvictOne();
  for (AdjunctGroup& group : adjuncts_) group.cache.Drop(evicted.hash, record);
  return evicted;
}

void Scheduler::GrowTail(Residence& residence, int32_t pages) {
  for (; pages > 0; --pages) {
    const int32_t index = residence.pages();
    residence.tail.push_back(TakePage());
    plan_->AddDelta(residence.slot.id(), index, residence.tail.back().id());
  }
}

int32_t Scheduler::FlushCache() {
  const int32_t device = tree_.evictable();
  const int32_t host = host_.ready();
  const bool all = device == tree_.pages();
  for (int32_t i = 0; i < device; ++i) {
    const PrefixTree::Evicted evicted = EvictOne(!all);
    if (!all) events_.Removed(KvMedium::kDevice, evicted.hash, evicted.depth);
  }
  while (!sessions_.empty()) ForgetSession(session_ends_.begin()->second);
  host_.Flush(!all);
  for (AdjunctGroup& group : adjuncts_) group.cache.DropIdle(!all);
  bool any = device + host > 0;
  for (AdjunctGroup& group : adjuncts_) {
    any = any || group.host.ready() > 0;
    group.host.Flush(!all);
  }
  evicted_pages_.Clear();
  if (all && any) events_.Cleared();
  return device + host;
}

std::vector<PageHash> Scheduler::CalcRollingHash(std::span<const int32_t> tokens, std::string_view salt, std::vector<ExtraKey> extra_keys,
                                                 int64_t adapter) const {
  std::sort(extra_keys.begin(), extra_keys.end());
  return HashPages(SeedHash(page_size_, adapter, salt), page_size_, tokens, extra_keys);
}

// ---- the plan ----

const ExecutionPlan& Scheduler::NextExecutionPlan(int64_t now_us) {
  if (plans_in_flight() > config_.overlap_depth) {
    throw std::invalid_argument(std::to_string(plans_in_flight()) + " plans are in flight with overlap_depth " +
                                std::to_string(config_.overlap_depth) + "; advance plan " + std::to_string(steps_.front().plan_id) + " first");
  }
  now_us_ = std::max(now_us_, now_us);
  tree_.SetNow(now_us_);
  ExpireFetches();
  ExpireSessions();
  const int64_t id = next_plan_id_++;
  // Neither the plan before nor one in flight is written over.
  const auto readable = [&](const ExecutionPlan& plan) {
    const auto in_flight = [&](const Step& step) { return step.plan_id == plan.plan_id; };
    return plan.plan_id == id - 1 || std::any_of(steps_.begin(), steps_.end(), in_flight);
  };
  plan_ = std::find_if_not(std::begin(plans_), std::end(plans_), readable);
  plan_->Clear(id);
  ++totals_.plans;
  room_measured_ = false;
  ForgetPromises();
  admissions_before_plan_ = admissions_;

  steps_.push_back({id, {}});
  step_ = &steps_.back();
  if (!spare_rows_.empty()) {
    step_->rows = std::move(spare_rows_.back());
    spare_rows_.pop_back();
  }

  for (const int64_t reloaded : reloaded_) plan_->retracted_ids.Push(reloaded);
  reloaded_.clear();
  ReserveDecodes();
  QueueWoken();  // those who waited for a request that has just been retracted
  int32_t decode_tokens = 0;
  for (const Request* request : decoding_) decode_tokens += request->width;
  const PrefillShare share = ShareBeside(decode_tokens);
  PlanPrefills(share);
  if (step_->rows.empty() && decode_tokens == 0 && steps_.size() == 1) UnblockPrefill();
  step_->filled = share.MostlySpentBy(step_->prefill_tokens, prefill_cost_(step_->prefill_tokens, step_->attended));
  plan_->num_extend_rows = plan_->num_rows();
  ArrangeDecodes();
  PlanDecodes();

  for (const TableChange& change : table_changes_) {
    const uint64_t occupant = occupancy_[static_cast<size_t>(change.slot)];
    if (occupant == change.occupancy && occupant <= admissions_before_plan_) plan_->AddDelta(change.slot, change.index, change.page);
  }
  table_changes_.clear();
  for (const auto& [ended, reason] : ended_) {
    plan_->finished_ids.Push(ended);
    plan_->finished_reasons.Push(static_cast<int32_t>(reason));
  }
  ended_.clear();
  BeginTransfers();

  const int32_t decodes = plan_->num_rows() - plan_->num_extend_rows;
  plan_->mode = plan_->num_extend_rows > 0 ? (decodes > 0 ? ForwardMode::kMixed : ForwardMode::kExtend)
                                           : (decodes > 0 ? ForwardMode::kDecode : ForwardMode::kIdle);
  if (plan_->mode == ForwardMode::kIdle) {
    spare_rows_.push_back(std::move(step_->rows));
    steps_.pop_back();
  }
  step_ = nullptr;
  ForgetPromises();
  return *plan_;
}

void Scheduler::AddRow(Request& request, Residence& residence, int32_t tokens, bool samples, bool extend) {
  if (!adjuncts_.empty()) PrepareStates(request, residence, request.upper(), tokens);
  plan_->request_ids.Push(request.id);
  plan_->slots.Push(residence.slot.id());
  plan_->context_lens.Push(request.upper());
  plan_->query_lens.Push(tokens);
  plan_->flags.Push((samples ? kSamples : 0) | (request.new_in_slot ? kNewInSlot : 0));
  plan_->output_lens.Push(request.outputs_upper());
  const bool loads = request.new_in_slot && request.loading();
  request.new_in_slot = false;
  ++request.inflight_rows;
  request.inflight_tokens += tokens;
  if (samples) request.inflight_outputs += extend ? 1 : tokens;
  step_->rows.push_back({&request, tokens, samples, extend, loads});
}

}  // namespace tokenspeed
