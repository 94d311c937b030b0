#include <gtest/gtest.h>

#include <random>
#include <string>

#include "cache/page_pool.h"
#include "support/column.h"
#include "support/intrusive_list.h"
#include "support/sha256.h"

namespace tokenspeed {
namespace {

std::string Hex(const Sha256Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string HexOf(Sha256::Compress compress, const std::string& text) {
  Sha256 hash(compress);
  hash.Update(text.data(), text.size());
  return Hex(hash.Finish());
}

TEST(Sha256, GivesTheDigestsOfTheStandard) {
  EXPECT_EQ(HexOf(&Sha256::CompressPortable, ""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HexOf(&Sha256::CompressPortable, "abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HexOf(&Sha256::CompressPortable, std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, AcceleratedEqualsPortableForEveryLengthAndCut) {
  if (Sha256::Accelerated() == nullptr) GTEST_SKIP() << "this processor has no SHA instructions";
  std::mt19937 random(1);
  for (size_t size = 0; size < 300; ++size) {
    std::string text(size, '\0');
    for (char& c : text) c = static_cast<char>(random());
    Sha256 cut(Sha256::Accelerated());
    const size_t first = size == 0 ? 0 : random() % size;
    cut.Update(text.data(), first);
    cut.Update(text.data() + first, size - first);
    EXPECT_EQ(Hex(cut.Finish()), HexOf(&Sha256::CompressPortable, text)) << size;
  }
}

TEST(IdPool, LeaseGivesItsIdBackOnce) {
  PagePool pool(3);
  EXPECT_EQ(pool.available(), 3);
  {
    PageLease first = pool.Take();
    EXPECT_EQ(first.id(), 0);
    PageLease second = pool.Take();
    EXPECT_EQ(second.id(), 1);
    PageLease moved = std::move(first);
    EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): what a moved-from lease holds is what is tested
    EXPECT_EQ(moved.id(), 0);
    second = std::move(moved);  // gives 1 back
    EXPECT_EQ(pool.available(), 2);
    EXPECT_EQ(second.id(), 0);
  }
  EXPECT_EQ(pool.available(), 3);
}

TEST(Column, GrowthLeavesAReadersBlockAlone) {
  Column<int32_t> column(2);
  column.Push(1);
  column.Push(2);
  const auto held = column.block();
  const int32_t* before = column.data();
  for (int32_t i = 0; i < 100; ++i) column.Push(i);
  EXPECT_NE(column.data(), before);
  EXPECT_EQ(held[0], 1);
  EXPECT_EQ(held[1], 2);
  EXPECT_EQ(column.size(), 102U);
  EXPECT_EQ(column[1], 2);
}

struct ItemTag;
struct Item : ListLink<ItemTag> {
  explicit Item(int number) : value(number) {}
  int value;
};

TEST(IntrusiveList, KeepsOrderAcrossInsertAndRemove) {
  Item a(1), b(2), c(3);
  IntrusiveList<Item, ItemTag> list;
  EXPECT_TRUE(list.empty());
  list.PushBack(b);
  list.PushFront(a);
  list.PushBack(c);
  list.Remove(b);
  EXPECT_FALSE(b.linked());
  list.PushFront(b);
  std::vector<int> seen;
  list.ForEach([&](const Item& item) { seen.push_back(item.value); });
  EXPECT_EQ(seen, (std::vector<int>{2, 1, 3}));
  EXPECT_EQ(list.front().value, 2);
}

}  // namespace
}  // namespace tokenspeed
