// Chained page hashes: the name of a page is the name of everything before it and its own content.
//
//     h[-1] = seed(page size, adapter, salt)
//     h[k]  = SHA-256(h[k-1] | tokens of page k | extra keys whose position lies in page k), cut to 16 bytes
//
// So equal hashes mean equal prefixes, in every process and after every restart; two prompts can be compared at depth k by one
// comparison, and the shared depth of two chains can be found by bisection.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace tokenspeed {

struct PageHash {
  std::array<uint8_t, 16> bytes{};
  friend bool operator==(const PageHash& a, const PageHash& b) noexcept { return std::memcmp(a.bytes.data(), b.bytes.data(), 16) == 0; }
  friend bool operator<(const PageHash& a, const PageHash& b) noexcept { return std::memcmp(a.bytes.data(), b.bytes.data(), 16) < 0; }
};

// For hash maps: the bytes are uniform already.
struct PageHashHasher {
  size_t operator()(const PageHash& hash) const noexcept {
    size_t word;
    std::memcpy(&word, hash.bytes.data(), sizeof(word));
    return word;
  }
};

// Content that stands behind a placeholder token (an image, an audio clip): the token at `position` means `key`.
struct ExtraKey {
  int64_t position = 0;
  std::array<uint8_t, 16> key{};
  friend auto operator<=>(const ExtraKey&, const ExtraKey&) = default;
};

[[nodiscard]] PageHash SeedHash(int32_t page_size, int64_t adapter, std::string_view salt);

// REQUIRES: `tokens` is one whole page; `extra_keys` are those of this page, sorted; `page_begin` is the position of tokens[0].
[[nodiscard]] PageHash NextPageHash(const PageHash& previous, std::span<const int32_t> tokens, std::span<const ExtraKey> extra_keys,
                                    int64_t page_begin);

// The hashes of every full page of `tokens`. REQUIRES: `extra_keys` sorted by position.
[[nodiscard]] std::vector<PageHash> HashPages(const PageHash& seed, int32_t page_size, std::span<const int32_t> tokens,
                                              std::span<const ExtraKey> extra_keys);

}  // namespace tokenspeed
