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

}  // namespace

void SchedulerConfig::Validate() const {
  constexpr int64_t kMax = 1 << 30;
  if (groups.size() != 1) {
    throw std::invalid_argument("groups has " + std::to_string(groups.size()) + " cache groups; this scheduler serves models with one");
  }
  InRange("groups[0].page_size", groups[0].page_size, 1, 65'536);
  InRange("groups[0].num_pages", groups[0].num_pages, 1, kMax / groups[0].page_size);
  InRange("groups[0].host_pages", groups[0].host_pages, 0, kMax);
  InRange("max_num_seqs", max_num_seqs, 1, 65'536);
  InRange("max_batched_tokens", max_batched_tokens, 1, kMax);
  InRange("max_model_len", max_model_len, 2, kMax);
  InRange("max_row_width", max_row_width, 1, 64);
  InRange("overlap_depth", overlap_depth, 0, 1);
  InRange("max_step_us", max_step_us, 0, 3'600'000'000);
  InRange("hit_window", hit_window, 1, 1'024);
  InRange("aging_us", aging_us, 1, 1'000'000'000'000);
  InRange("finished_history", finished_history, 0, 1 << 24);
  InRange("prefetch_threshold", prefetch_threshold, 1, kMax);
  InRange("prefetch_timeout_us", prefetch_timeout_us, 0, 3'600'000'000);
  InRange("retain_percent", retain_percent, 0, 100);
  if (has_host_tier() && !enable_prefix_caching) {
    throw std::invalid_argument("groups[0].host_pages is " + std::to_string(groups[0].host_pages) +
                                " without prefix caching; the host keeps prefixes: enable it, or give the host no pages");
  }
  if (l3 && !has_host_tier()) {
    throw std::invalid_argument("l3 is set and groups[0].host_pages is 0; a store is reached through host pages: give the host some");
  }
}

}  // namespace tokenspeed
