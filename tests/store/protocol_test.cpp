#include "store/protocol.h"

#include <gtest/gtest.h>

#include <random>

#include "base/concat.h"
#include "store_variants.h"

namespace convoy::test {
namespace {

constexpr FrameLimits kLimits{.body_bytes = 1000, .parts = 8};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

StoreMessage message(std::uint32_t id, std::vector<std::string> parts) {
  return {.code = 3, .id = id, .number = -5, .timeout_us = 77, .parts = std::move(parts)};
}

// All messages that come out of `stream`, fed in pieces of `piece` bytes.
std::vector<StoreMessage> decode(std::string_view stream, std::size_t piece,
                                 const FrameLimits& limits = kLimits) {
  StoreDecoder decoder(limits);
  std::vector<StoreMessage> result;
  for (std::size_t at = 0; at < stream.size(); at += piece) {
    decoder.feed(bytes_of(stream.substr(at, piece)));
    while (auto next = decoder.next()) result.push_back(std::move(*next));
  }
  EXPECT_EQ(decoder.buffered(), 0u);
  return result;
}

// A header with the given fields, and nothing after it.
std::string header(std::uint32_t body_bytes, std::uint8_t code = 1, std::uint32_t id = 9) {
  std::string text = encode({.code = code, .id = id});
  text.replace(4, 4, reinterpret_cast<const char*>(&body_bytes), 4);
  return text;
}

TEST(StoreProtocol, BytesOnTheWire) {
  const StoreMessage sent{.code = 8,
                          .id = 0x01020304,
                          .number = -2,
                          .timeout_us = 0x1122334455667788,
                          .parts = {"ab", ""}};
  const std::string expected(
      "CVS1"
      "\x0a\0\0\0"                        // body: 4 + 2 + 4
      "\x04\x03\x02\x01"                  // id
      "\x08\0\0\0"                        // code, three zeros
      "\xfe\xff\xff\xff\xff\xff\xff\xff"  // number
      "\x88\x77\x66\x55\x44\x33\x22\x11"  // timeout
      "\x02\0\0\0"
      "ab"
      "\0\0\0\0",
      42);
  EXPECT_EQ(encode(sent), expected);
  EXPECT_EQ(decode(expected, expected.size()), std::vector{sent});
}

TEST(StoreProtocol, MessagesSurviveAnyPieces) {
  const std::vector<StoreMessage> sent = {
      message(1, {}), message(2, {""}), message(3, {"key", std::string("\0\xff", 2)}),
      message(4, std::vector<std::string>(8, "part")), message(5, {std::string(900, 'x')})};
  std::string stream;
  for (const auto& each : sent) stream += encode(each);
  for (const std::size_t piece : {1, 2, 3, 31, 32, 33, 100, 5000}) {
    EXPECT_EQ(decode(stream, piece), sent) << piece;
  }
}

TEST(StoreProtocol, EncodeBeforeLeavesOutTheTail) {
  const StoreMessage whole = message(1, {"a", "the tail"});
  const std::string text = encode_before(message(1, {"a"}), 8);
  EXPECT_EQ(text + "the tail", encode(whole));
}

TEST(StoreProtocol, MessageThatTheFormatCannotHold) {
  EXPECT_ERROR(kResource, "at most 4294967295", encode_before({}, std::size_t{1} << 32));
  EXPECT_ERROR(kResource, "at most 4294967295", encode_before({}, UINT32_MAX - 3));
  EXPECT_EQ(encode_before({}, UINT32_MAX - 4).size(), kStoreHeaderBytes + 4);
}

TEST(StoreProtocol, StrangersAreRecognisedAtOnce) {
  for (const std::string text : {"G", "GET / HTTP/1.1\r\n", "CVS0", "CVX", "\xff"}) {
    EXPECT_ERROR(kInvalidArgument, "bad magic", decode(text, 1));
  }
  std::string reserved = header(0);
  reserved[13] = 1;
  EXPECT_ERROR(kInvalidArgument, "reserved", decode(reserved, 7));
  reserved = header(0);
  reserved[15] = '\x80';
  EXPECT_ERROR(kInvalidArgument, "reserved", decode(reserved, 100));
}

TEST(StoreProtocol, PartsMustFillTheBody) {
  EXPECT_ERROR(kInvalidArgument, "cut off", decode(header(3) + "abc", 100));
  EXPECT_ERROR(kInvalidArgument, "longer than its message",
               decode(header(5) + std::string("\2\0\0\0x", 5), 100));
  EXPECT_ERROR(kInvalidArgument, "longer than its message",
               decode(header(4) + "\xff\xff\xff\xff", 1));
}

TEST(StoreProtocol, TruncatedMessageStaysInside) {
  const std::string whole = encode(message(1, {"key", "value"}));
  StoreDecoder decoder(kLimits);
  for (const char c : whole.substr(0, whole.size() - 1)) {
    decoder.feed(bytes_of({&c, 1}));
    EXPECT_EQ(decoder.next(), std::nullopt);
  }
  EXPECT_EQ(decoder.buffered(), whole.size() - 1);
}

TEST(StoreProtocol, OversizedMessagesAreSkippedAndNamed) {
  const StoreMessage before = message(1, {"a"});
  const StoreMessage after = message(4, {"b"});
  StoreMessage long_one = message(2, {std::string(997, 'x')});  // 1001 bytes of body
  StoreMessage many_parts = message(3, std::vector<std::string>(9));
  const std::string stream = encode(before) + encode(long_one) + encode(many_parts) + encode(after);
  for (auto* marked : {&long_one, &many_parts}) {
    marked->parts.clear();
    marked->oversized = true;
  }
  for (const std::size_t piece : {1, 7, 64, 5000}) {
    EXPECT_EQ(decode(stream, piece), (std::vector{before, long_one, many_parts, after})) << piece;
  }
}

TEST(StoreProtocol, OversizedMessageTakesNoMemory) {
  StoreDecoder decoder(kLimits);
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  constexpr int kPieces = 100;
  decoder.feed(bytes_of(header(kPieces * kPiece)));
  const std::string piece(kPiece, 'x');
  for (int i = 0; i < kPieces; ++i) {
    ASSERT_EQ(decoder.next(), std::nullopt);
    ASSERT_EQ(decoder.buffered(), 0u);
    decoder.feed(bytes_of(piece));
  }
  const auto skipped = decoder.next();
  ASSERT_TRUE(skipped.has_value());
  EXPECT_TRUE(skipped->oversized);
  EXPECT_EQ(skipped->id, 9u);
  decoder.feed(bytes_of(encode(message(2, {}))));
  EXPECT_EQ(decoder.next(), message(2, {}));
}

TEST(StoreProtocol, SkipIncompleteGivesItsMemoryBack) {
  const std::string whole = encode(message(1, {std::string(900, 'x')}));
  StoreDecoder decoder(kLimits);
  decoder.skip_incomplete();  // nothing there
  decoder.feed(bytes_of(whole.substr(0, 20)));
  decoder.skip_incomplete();  // no header yet
  EXPECT_EQ(decoder.buffered(), 20u);
  decoder.feed(bytes_of(whole.substr(20, 500)));
  EXPECT_EQ(decoder.next(), std::nullopt);
  decoder.skip_incomplete();
  EXPECT_EQ(decoder.buffered(), 0u);
  decoder.skip_incomplete();  // again: no effect
  decoder.feed(bytes_of(whole.substr(520) + encode(message(2, {"next"}))));
  const auto skipped = decoder.next();
  ASSERT_TRUE(skipped.has_value());
  EXPECT_TRUE(skipped->oversized);
  EXPECT_EQ(skipped->id, 1u);
  EXPECT_EQ(decoder.next(), message(2, {"next"}));
}

TEST(StoreProtocol, RandomMessagesInRandomPieces) {
  std::mt19937 random(20240607);
  const auto upto = [&](std::size_t most) { return random() % (most + 1); };
  StoreDecoder decoder({.body_bytes = std::size_t{1} << 20, .parts = 50});
  std::vector<StoreMessage> sent;
  std::string stream;
  for (std::uint32_t i = 0; i < 400; ++i) {
    StoreMessage next = message(i, {});
    next.number = static_cast<std::int64_t>((std::uint64_t{random()} << 32) | random());
    for (std::size_t p = upto(5); p > 0; --p) {
      next.parts.emplace_back(upto(10) == 0 ? upto(200'000) : upto(30),
                              static_cast<char>(random()));
    }
    stream += encode(next);
    sent.push_back(std::move(next));
  }
  std::size_t received = 0;
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t piece = 1 + upto(upto(3) == 0 ? 300'000 : 300);
    decoder.feed(bytes_of(std::string_view(stream).substr(at, piece)));
    at += piece;
    while (const auto next = decoder.next()) {
      ASSERT_LT(received, sent.size());
      ASSERT_TRUE(*next == sent[received++]);
    }
  }
  EXPECT_EQ(received, sent.size());
}

TEST(StoreProtocol, ErrorsTravelInReplies) {
  for (const auto kind : {ErrorKind::kInvalidArgument, ErrorKind::kTimeout, ErrorKind::kInternal}) {
    const auto error = error_of([&] { checked_reply(error_reply(7, kind, "the text")); });
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), kind);
    EXPECT_STREQ(error->what(), "the text");
  }
  EXPECT_EQ(checked_reply({.id = 3, .parts = {"fine"}}).parts[0], "fine");
  EXPECT_ERROR(kInternal, "without a text", checked_reply({.code = 200}));
}

TEST(StoreProtocol, PrintableTextIsOneShortLine) {
  EXPECT_EQ(printable(""), "''");
  EXPECT_EQ(printable("a b~"), "'a b~'");
  EXPECT_EQ(printable(std::string_view("\0\n\x7f\xff", 4)), "'\\x00\\x0a\\x7f\\xff'");
  EXPECT_EQ(printable(std::string(120, 'x')).size(), 122u);
  EXPECT_EQ(printable(std::string(4000, 'x')),
            concat("'", std::string(120, 'x'), "'... (4000 bytes)"));
}

}  // namespace
}  // namespace convoy::test
