#include "scheduler/request.h"

#include <algorithm>

namespace tokenspeed {

void Request::CopyTokens(int32_t begin, int32_t count, int32_t* out) const noexcept {
  const int32_t from_prompt = std::clamp(prompt_tokens - begin, 0, count);
  std::copy_n(prompt.data() + begin, from_prompt, out);
  if (from_prompt < count) std::copy_n(output.data() + (begin + from_prompt - prompt_tokens), count - from_prompt, out + from_prompt);
}

void Request::ExtendHashes(int32_t page_size) {
  while ((static_cast<int64_t>(hashes.size()) + 1) * page_size <= computed) {
    const auto begin = static_cast<int32_t>(hashes.size()) * page_size;
    const auto in_page = [&](const ExtraKey& extra) { return extra.position < begin; };
    const auto first = std::partition_point(extra_keys.begin(), extra_keys.end(), in_page);
    const PageHash& previous = hashes.empty() ? seed : hashes.back();
    // Keys stand behind prompt tokens, so those from `first` on are all of this page.
    if (begin >= prompt_tokens) {
      const std::span<const int32_t> tokens(output.data() + (begin - prompt_tokens), static_cast<size_t>(page_size));
      hashes.push_back(NextPageHash(previous, tokens, {}, begin));
    } else {
      std::vector<int32_t> tokens(static_cast<size_t>(page_size));
      CopyTokens(begin, page_size, tokens.data());
      hashes.push_back(NextPageHash(previous, tokens, {first, extra_keys.end()}, begin));
    }
  }
}

void Request::DropTokens() noexcept {
  std::vector<int32_t>().swap(prompt);
  std::vector<int32_t>().swap(output);
  std::vector<PageHash>().swap(hashes);
  std::vector<ExtraKey>().swap(extra_keys);
}

}  // namespace tokenspeed
