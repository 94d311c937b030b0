#include "cache/page_hash.h"

#include <algorithm>
#include <bit>

#include "support/sha256.h"

namespace tokenspeed {
namespace {

// Everything is absorbed as little-endian words, so that the names are the same on every machine.
void UpdateWord64(Sha256& hash, uint64_t word) {
  uint8_t bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(word >> (8 * i));
  hash.Update(bytes, sizeof(bytes));
}

void UpdateTokens(Sha256& hash, std::span<const int32_t> tokens) {
  if constexpr (std::endian::native == std::endian::little) {
    hash.Update(tokens.data(), tokens.size_bytes());
  } else {
    for (const int32_t token : tokens) {
      uint8_t bytes[4];
      for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(static_cast<uint32_t>(token) >> (8 * i));
      hash.Update(bytes, sizeof(bytes));
    }
  }
}

PageHash Cut(const Sha256Digest& digest) {
  PageHash hash;
  std::memcpy(hash.bytes.data(), digest.data(), hash.bytes.size());
  return hash;
}

}  // namespace

PageHash SeedHash(int32_t page_size, int64_t adapter, std::string_view salt) {
  constexpr std::string_view kDomain = "tokenspeed.kv.page.1";
  Sha256 hash;
  hash.Update(kDomain.data(), kDomain.size());
  UpdateWord64(hash, static_cast<uint64_t>(page_size));
  UpdateWord64(hash, static_cast<uint64_t>(adapter));
  UpdateWord64(hash, salt.size());
  hash.Update(salt.data(), salt.size());
  return Cut(hash.Finish());
}

PageHash NextPageHash(const PageHash& previous, std::span<const int32_t> tokens, std::span<const ExtraKey> extra_keys, int64_t page_begin) {
  Sha256 hash;
  hash.Update(previous.bytes.data(), previous.bytes.size());
  UpdateTokens(hash, tokens);
  // The token block has the one length that the seed names, so what follows it can only be keys.
  for (const ExtraKey& extra : extra_keys) {
    UpdateWord64(hash, static_cast<uint64_t>(extra.position - page_begin));
    hash.Update(extra.key.data(), extra.key.size());
  }
  return Cut(hash.Finish());
}

std::vector<PageHash> HashPages(const PageHash& seed, int32_t page_size, std::span<const int32_t> tokens,
                                std::span<const ExtraKey> extra_keys) {
  const auto size = static_cast<size_t>(page_size);
  std::vector<PageHash> hashes;
  hashes.reserve(tokens.size() / size + 8);
  PageHash previous = seed;
  auto first_key = extra_keys.begin();
  for (size_t begin = 0; begin + size <= tokens.size(); begin += size) {
    auto last_key = first_key;
    while (last_key != extra_keys.end() && last_key->position < static_cast<int64_t>(begin + size)) ++last_key;
    previous = NextPageHash(previous, tokens.subspan(begin, size), {first_key, last_key}, static_cast<int64_t>(begin));
    hashes.push_back(previous);
    first_key = last_key;
  }
  return hashes;
}

}  // namespace tokenspeed
