#include "scheduler/config.h"

#include <stdexcept>
#include <string>

namespace tokenspeed {
namespace {

void InRange(const char* field, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return;
  throw std::invalid_argument(std::string(field) + " is " + std::to_string(value) + "; it must be from " + std::to_string(low) + " to " +
                              std::to_string(high));
}

constexpr int64_t kMax = 1 << 30;

[[noreturn]] void Refuse(const std::string& field, int64_t value, const std::string& what) {
  throw std::invalid_argument(field + " is " + std::to_string(value) + "; " + what);
}

void ValidateGroup(const SchedulerConfig& config, size_t index) {
  const CacheGroupConfig& first = config.groups[0];
  const CacheGroupConfig& group = config.groups[index];
  const std::string name = "groups[" + std::to_string(index) + "]";
  InRange((name + ".page_size").c_str(), group.page_size, 1, index == 0 ? 65'536 : kMax);
  InRange((name + ".num_pages").c_str(), group.num_pages, 1, kMax / (group.kind == CacheGroupKind::kRecurrent ? 1 : group.page_size));
  InRange((name + ".host_pages").c_str(), group.host_pages, 0, kMax);
  if (group.kind == CacheGroupKind::kWindow) InRange((name + ".window").c_str(), group.window, 1, kMax);
  else if (group.window != 0) Refuse(name + ".window", group.window, "only window groups have one");
  if (index == 0) return;
  const auto same = [&](const char* field, int64_t value, int64_t expected) {
    if (value != expected) Refuse(name + "." + field, value, "such a group has that of groups[0], " + std::to_string(expected));
  };
  switch (group.kind) {
    case CacheGroupKind::kFull:
      // Every token has a page in all of them or in none, so their ids are the same.
      same("page_size", group.page_size, first.page_size);
      same("num_pages", group.num_pages, first.num_pages);
      same("host_pages", group.host_pages, first.host_pages);
      return;
    case CacheGroupKind::kWindow:
      same("page_size", group.page_size, first.page_size);
      if (group.num_pages < config.WindowPages(group)) {
        Refuse(name + ".num_pages", group.num_pages,
               "one request with a window of " + std::to_string(group.window) + " tokens needs " + std::to_string(config.WindowPages(group)));
      }
      break;
    case CacheGroupKind::kRecurrent:
      if (group.page_size % first.page_size != 0) {
        Refuse(name + ".page_size", group.page_size,
               "the tokens between two kept states are a multiple of groups[0].page_size, " + std::to_string(first.page_size));
      }
      if (group.num_pages < 2) Refuse(name + ".num_pages", group.num_pages, "a request needs two: its state, and the one that it continues");
      if (config.max_row_width > 1) {
        Refuse("max_row_width", config.max_row_width, name + " is recurrent, and a rejected draft cannot be taken out of a state; it must be 1");
      }
      break;
  }
}

}  // namespace

void SchedulerConfig::Validate() const {
  if (groups.empty()) throw std::invalid_argument("groups is empty; the first cache group is full and names the prefixes");
  if (groups[0].kind != CacheGroupKind::kFull) {
    Refuse("groups[0].kind", static_cast<int64_t>(groups[0].kind), "the first cache group is full: its pages are what prefixes are shared in");
  }
  InRange("max_row_width", max_row_width, 1, 64);
  InRange("overlap_depth", overlap_depth, 0, 1);
  for (size_t index = 0; index < groups.size(); ++index) ValidateGroup(*this, index);
  InRange("max_num_seqs", max_num_seqs, 1, 65'536);
  InRange("max_batched_tokens", max_batched_tokens, 1, kMax);
  InRange("max_model_len", max_model_len, 2, kMax);
  InRange("max_step_us", max_step_us, 0, 3'600'000'000);
  for (size_t i = 0; i < step_sizes.size(); ++i) {
    const std::string name = "step_sizes[" + std::to_string(i) + "]";
    InRange(name.c_str(), step_sizes[i], i == 0 ? 1 : step_sizes[i - 1] + 1, kMax);
  }
  InRange("hit_window", hit_window, 1, 1'024);
  InRange("aging_us", aging_us, 1, 1'000'000'000'000);
  InRange("finished_history", finished_history, 0, 1 << 24);
  InRange("prefetch_threshold", prefetch_threshold, 1, kMax);
  InRange("prefetch_timeout_us", prefetch_timeout_us, 0, 3'600'000'000);
  InRange("retain_percent", retain_percent, 0, 100);
  for (size_t index = 0; index < groups.size() && !enable_prefix_caching; ++index) {
    if (groups[index].host_pages == 0) continue;
    Refuse("groups[" + std::to_string(index) + "].host_pages", groups[index].host_pages,
           "without prefix caching it must be 0, for the host keeps prefixes: enable that, or give the host no pages");
  }
  if (l3 && groups[0].host_pages == 0) {
    throw std::invalid_argument("l3 is set and groups[0].host_pages is 0; a store is reached through host pages: give the host some");
  }
}

}  // namespace tokenspeed
