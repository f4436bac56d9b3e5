#include "base/wire.h"

#include <gtest/gtest.h>

#include <array>

#include "base/id.h"
#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;

enum class Colour : std::uint8_t { kRed = 1, kBlue = 2 };

void put_all(WireWriter& out) {
  out.put("CVX1");
  out.put(Colour::kBlue);
  out.put(std::int16_t{-2});
  out.put(1.5);
  out.put(std::array<std::uint32_t, 2>{7, 8});
  out.put_sized<std::uint32_t>("name");
  out.put_padded("padded");
  out.put_zeros(3);
}

void expect_all(WireReader in) {
  in.take_magic("CVX1");
  EXPECT_EQ(in.take<Colour>(), Colour::kBlue);
  EXPECT_EQ(in.take<std::int16_t>(), -2);
  EXPECT_EQ(in.take<double>(), 1.5);
  EXPECT_EQ((in.take<std::array<std::uint32_t, 2>>()), (std::array<std::uint32_t, 2>{7, 8}));
  EXPECT_EQ(in.take_sized<std::uint32_t>(), "name");
  EXPECT_EQ(in.take_padded(6), "padded");
  in.take_zeros(3);
  in.end();
}

TEST(WireTest, FieldsFollowEachOtherLittleEndian) {
  std::string bytes;
  WireWriter out(bytes);
  out.put(std::uint16_t{0x0102});
  out.put(Colour::kRed);
  out.put(std::uint32_t{3});
  EXPECT_EQ(bytes, std::string("\x02\x01\x01\x03\0\0\0", 7));
}

TEST(WireTest, AppendsToAStringOrFillsMemory) {
  std::string appended;
  WireWriter to_string(appended);
  put_all(to_string);
  expect_all({appended, "test"});

  std::array<std::byte, 64> room{};
  WireWriter to_memory{std::span<std::byte>(room)};
  put_all(to_memory);
  ASSERT_EQ(to_memory.written(), appended.size());
  EXPECT_EQ(std::memcmp(room.data(), appended.data(), appended.size()), 0);
  expect_all({std::span<const std::byte>(room).first(to_memory.written()), "test"});
}

TEST(WireTest, MoreThanFitsIsNotWritten) {
  std::array<std::byte, 6> room{};
  WireWriter out{std::span(room).first(5)};
  out.put(std::uint32_t{1});
  expect_error(ErrorKind::kInternal, "2 bytes where 1 fit",
               [&] { out.put(std::uint16_t{0xffff}); });
  expect_error(ErrorKind::kInternal, "2 bytes where 1 fit", [&] { out.put_zeros(2); });
  out.put(std::string_view());
  EXPECT_EQ(out.written(), 4u);
  EXPECT_EQ(room[4], std::byte{0});
  std::string text;
  expect_error(ErrorKind::kInternal, "256 bytes",
               [&] { WireWriter(text).put_sized<std::uint8_t>(std::string(256, 'x')); });
}

TEST(WireTest, EveryCutIsRefused) {
  std::string bytes;
  WireWriter out(bytes);
  put_all(out);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    expect_error(ErrorKind::kInvalidArgument, "malformed thing: it is cut off",
                 [&] { expect_all({std::string_view(bytes).substr(0, length), "thing"}); });
  }
  bytes += 'x';
  expect_error(ErrorKind::kInvalidArgument, "malformed thing: there is more behind it",
               [&] { expect_all({bytes, "thing"}); });
}

TEST(WireTest, NonsenseIsRefused) {
  const auto reader = [](std::string_view bytes) { return WireReader(bytes, "thing"); };
  expect_error(ErrorKind::kInvalidArgument, "of another version",
               [&] { reader("CVX2").take_magic("CVX1"); });
  expect_error(ErrorKind::kInvalidArgument, "must be zero",
               [&] { reader(std::string_view("\0\1", 2)).take_zeros(2); });
  expect_error(ErrorKind::kInvalidArgument, "must be zero",
               [&] { reader("1234567x").take_padded(7); });
  // Lengths and counts beyond what is there, up to the greatest.
  for (const std::uint64_t much : {std::uint64_t{9}, ~std::uint64_t{0}}) {
    std::string bytes;
    WireWriter(bytes).put(much);
    bytes += "12345678";
    expect_error(ErrorKind::kInvalidArgument, "cut off",
                 [&] { reader(bytes).take_sized<std::uint64_t>(); });
    expect_error(ErrorKind::kInvalidArgument, "cut off",
                 [&] { reader(bytes).take_count<std::uint64_t>(); });
    expect_error(ErrorKind::kInvalidArgument, "cut off", [&] { reader(bytes).take_padded(17); });
  }
  std::string bytes;
  WireWriter(bytes).put(std::uint32_t{2});
  bytes += "12345678";
  EXPECT_EQ(reader(bytes).take_count<std::uint32_t>(4), 2u);
  expect_error(ErrorKind::kInvalidArgument, "cut off",
               [&] { reader(bytes).take_count<std::uint32_t>(5); });
}

// What must not be a field: pointers travel no better than bools and padding.
struct Padded {
  std::uint8_t a;
  std::uint32_t b;
};
static_assert(WireField<Id> && WireField<float> && WireField<Colour>);
static_assert(!WireField<bool> && !WireField<Padded> && !WireField<const char*> &&
              !WireField<std::string_view> && !WireField<std::span<const std::byte>> &&
              !WireField<char[4]>);

}  // namespace
}  // namespace convoy
