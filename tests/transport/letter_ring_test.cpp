#include "transport/shm/letter_ring.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/random.h"
#include "support.h"
#include "support/expect_error.h"

namespace convoy::shm {
namespace {

using convoy::test::expect_error;
using transport::test::Bytes;
using transport::test::some_bytes;

constexpr std::uint64_t kProbe = 7;

Bytes entry_of(std::size_t head) {
  Bytes bytes(sizeof(LetterEntry) + padded(head));
  const LetterEntry entry{.bytes = static_cast<std::uint32_t>(bytes.size()),
                          .kind = 3,
                          .flags = 0,
                          .zero = 0,
                          .head_bytes = static_cast<std::uint32_t>(head),
                          .pieces = 0,
                          .loan = 0};
  std::memcpy(bytes.data(), &entry, sizeof entry);
  return bytes;
}

TEST(LetterRingTest, WrapsAroundAtEveryPlace) {
  RingWriter writer = RingWriter::create(kProbe);
  RingReader reader(writer.mapping());
  Random random(1);
  std::deque<Bytes> under_way;
  for (int i = 0; i < 20'000; ++i) {
    const Bytes entry = entry_of(random.below(random.below(50) == 0 ? 8000 : 300));
    const auto to = writer.begin(entry.size());
    if (!to.empty()) {
      std::memcpy(to.data(), entry.data(), entry.size());
      writer.commit();
      under_way.push_back(entry);
    }
    if (to.empty() || random.below(2) == 0) {
      std::array<std::byte, 64> small;
      Bytes large;
      const auto got = reader.take(small, large);
      ASSERT_EQ(got.empty(), under_way.empty());
      if (got.empty()) continue;
      ASSERT_TRUE(std::ranges::equal(got, under_way.front()));
      under_way.pop_front();
    }
  }
}

TEST(LetterRingTest, NonsenseIsAnError) {
  const auto with = [](auto change) {
    RingWriter writer = RingWriter::create(kProbe);
    RingReader reader(writer.mapping());
    const Bytes entry = entry_of(16);
    const auto to = writer.begin(entry.size());
    std::memcpy(to.data(), entry.data(), entry.size());
    writer.commit();
    change(writer.layout(), reinterpret_cast<std::uint32_t*>(to.data()));
    expect_error(ErrorKind::kInvalidArgument, "ring of messages", [&] {
      std::array<std::byte, 64> small;
      Bytes large;
      parse_letter(reader.take(small, large));
    });
  };
  with([](RingLayout& layout, std::uint32_t*) { layout.written = RingLayout::kCapacity + 8; });
  with([](RingLayout& layout, std::uint32_t*) { layout.written = ~std::uint64_t{0}; });
  with([](RingLayout&, std::uint32_t* entry) { entry[0] = 0; });
  with([](RingLayout&, std::uint32_t* entry) { entry[0] = 1 << 30; });
  with([](RingLayout&, std::uint32_t* entry) { entry[0] = 33; });
  with([](RingLayout&, std::uint32_t* entry) { entry[0] = LetterEntry::kSkip; });
  with([](RingLayout&, std::uint32_t* entry) { entry[1] = 0xff << 16; });  // flags
  with([](RingLayout&, std::uint32_t* entry) { entry[2] = 9000; });        // head
  with([](RingLayout&, std::uint32_t* entry) { entry[2] = 100; });         // head beyond its end
  with([](RingLayout&, std::uint32_t* entry) { entry[3] = 5; });           // pieces beyond its end
  with([](RingLayout&, std::uint32_t* entry) { entry[3] = 1U << 16; });    // a loan of nothing
  RingWriter writer = RingWriter::create(kProbe);
  writer.layout().magic = 0;
  expect_error(ErrorKind::kInvalidArgument, "not a ring",
               [&] { RingReader reader(writer.mapping()); });
}

TEST(LetterRingTest, AReaderThatHasReadWhatWasNotWrittenGetsNothing) {
  RingWriter writer = RingWriter::create(kProbe);
  for (const std::uint64_t read : {std::uint64_t{8}, ~std::uint64_t{0}}) {
    writer.layout().read = read;
    while (!writer.begin(1024).empty() && writer.free_bytes() != 0) writer.commit();
    EXPECT_TRUE(writer.begin(1024).empty());
  }
}

TEST(LetterRingTest, LoansAreGivenBackAndWaitersKnown) {
  RingWriter writer = RingWriter::create(kProbe);
  RingReader reader(writer.mapping());
  EXPECT_FALSE(reader.release(0));
  writer.layout().blocked = 1;
  EXPECT_FALSE(reader.writer_is_blocked(false)) << "in an empty ring nobody waits";
  const auto take = [&] {
    std::array<std::byte, 64> small;
    Bytes large;
    return !reader.take(small, large).empty();
  };
  const Bytes entry = entry_of(8000);
  for (int i = 0; i < 2; ++i) {
    const auto to = writer.begin(entry.size());
    std::memcpy(to.data(), entry.data(), entry.size());
    writer.commit();
  }
  EXPECT_TRUE(take());
  EXPECT_TRUE(reader.writer_is_blocked(false));
  EXPECT_TRUE(take());
  EXPECT_FALSE(take());
  EXPECT_TRUE(reader.writer_is_blocked(true));
  EXPECT_FALSE(reader.writer_is_blocked(true));
  EXPECT_TRUE(reader.release(255));
  EXPECT_EQ(writer.layout().released[0], 1u);
  EXPECT_EQ(writer.layout().released[3], std::uint64_t{1} << 63);
}

}  // namespace
}  // namespace convoy::shm
