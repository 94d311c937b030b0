// SHA-256 (FIPS 180-4). The portable code is the definition; a processor's own instructions are used where they exist and give
// the same digests (a test compares them).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenspeed {

using Sha256Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  // Absorbs `blocks` blocks of 64 bytes into the eight working words.
  using Compress = void (*)(uint32_t state[8], const uint8_t* data, size_t blocks);

  Sha256() noexcept : Sha256(Fastest()) {}
  explicit Sha256(Compress compress) noexcept;

  void Update(const void* data, size_t size) noexcept;
  // REQUIRES: called once; the object is spent afterwards.
  [[nodiscard]] Sha256Digest Finish() noexcept;

  static void CompressPortable(uint32_t state[8], const uint8_t* data, size_t blocks) noexcept;
  // The fastest one that this processor runs, chosen once.
  [[nodiscard]] static Compress Fastest() noexcept;
  // The one that uses the processor's SHA instructions, or nullptr where there are none.
  [[nodiscard]] static Compress Accelerated() noexcept;

 private:
  Compress compress_;
  uint32_t state_[8];
  uint8_t buffer_[64];
  size_t buffered_ = 0;
  uint64_t length_ = 0;
};

[[nodiscard]] inline Sha256Digest Sha256Of(std::span<const uint8_t> bytes) noexcept {
  Sha256 hash;
  hash.Update(bytes.data(), bytes.size());
  return hash.Finish();
}

}  // namespace tokenspeed
