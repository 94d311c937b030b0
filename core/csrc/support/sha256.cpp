#include "support/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "support/sha256_rounds.h"

namespace tokenspeed {
namespace {

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t LoadBigEndian(const uint8_t* bytes) noexcept {
  return (uint32_t{bytes[0]} << 24) | (uint32_t{bytes[1]} << 16) | (uint32_t{bytes[2]} << 8) | uint32_t{bytes[3]};
}

void StoreBigEndian(uint8_t* bytes, uint32_t word) noexcept {
  bytes[0] = static_cast<uint8_t>(word >> 24);
  bytes[1] = static_cast<uint8_t>(word >> 16);
  bytes[2] = static_cast<uint8_t>(word >> 8);
  bytes[3] = static_cast<uint8_t>(word);
}

}  // namespace

Sha256::Sha256(Compress compress) noexcept : compress_(compress) { std::memcpy(state_, kInitial, sizeof(state_)); }

void Sha256::Update(const void* data, size_t size) noexcept {
  const auto* bytes = static_cast<const uint8_t*>(data);
  length_ += size;
  if (buffered_ != 0) {
    const size_t taken = std::min(size, sizeof(buffer_) - buffered_);
    std::memcpy(buffer_ + buffered_, bytes, taken);
    buffered_ += taken;
    bytes += taken;
    size -= taken;
    if (buffered_ < sizeof(buffer_)) return;
    compress_(state_, buffer_, 1);
    buffered_ = 0;
  }
  const size_t blocks = size / 64;
  if (blocks != 0) compress_(state_, bytes, blocks);
  buffered_ = size - blocks * 64;
  if (buffered_ != 0) std::memcpy(buffer_, bytes + blocks * 64, buffered_);
}

Sha256Digest Sha256::Finish() noexcept {
  const uint64_t bits = length_ * 8;
  uint8_t padding[128] = {0x80};
  const size_t zeros = (buffered_ < 56 ? 56 : 120) - buffered_;
  StoreBigEndian(padding + zeros, static_cast<uint32_t>(bits >> 32));
  StoreBigEndian(padding + zeros + 4, static_cast<uint32_t>(bits));
  Update(padding, zeros + 8);
  Sha256Digest digest;
  for (size_t i = 0; i < 8; ++i) StoreBigEndian(digest.data() + 4 * i, state_[i]);
  return digest;
}

void Sha256::CompressPortable(uint32_t state[8], const uint8_t* data, size_t blocks) noexcept {
  for (; blocks != 0; --blocks, data += 64) {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i) w[i] = LoadBigEndian(data + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t big1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + big1 + ((e & f) ^ (~e & g)) + kSha256Rounds[i] + w[i];
      const uint32_t big0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = big0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
  }
}

Sha256::Compress Sha256::Fastest() noexcept {
  static const Compress fastest = Accelerated() != nullptr ? Accelerated() : &CompressPortable;
  return fastest;
}

}  // namespace tokenspeed
