// docs/internals/wire.md shows the bytes that are sent.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "agent/letters.h"
#include "convoy/detail/rpc_values.h"
#include "rref/link.h"
#include "rref/records.h"

namespace convoy::rpc::test {
namespace {

constexpr int kOneSecond = 1'000'000'000;

std::filesystem::path page() {
  return std::filesystem::path(__FILE__).parent_path() / ".." / ".." / "docs" / "internals" /
         "wire.md";
}

// Blocks of the page: name to bytes in hexadecimal. A line has bytes, and after two spaces or more
// what they are.
std::map<std::string, std::string> shown() {
  std::map<std::string, std::string> blocks;
  std::ifstream file(page());
  EXPECT_TRUE(file) << page();
  std::string* block = nullptr;
  for (std::string line; std::getline(file, line);) {
    const std::string mark = "```wire ";
    if (line.starts_with(mark)) {
      block = &blocks[line.substr(mark.size())];
      EXPECT_TRUE(block->empty()) << line << " twice";
    } else if (line.starts_with("```")) {
      block = nullptr;
    } else if (block) {
      for (const char letter : line.substr(0, line.find("  "))) {
        if (letter != ' ' && letter != '|') *block += letter;
      }
    }
  }
  return blocks;
}

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) / 16];
    text += kDigits[static_cast<unsigned char>(byte) % 16];
  }
  return text;
}

template <class Head>
std::string head_bytes(const Head& head) {
  return {reinterpret_cast<const char*>(&head), sizeof head};
}

template <class... T>
std::string value_bytes(const T&... values) {
  std::string bytes;
  detail::with_body(
      nullptr, detail::TensorMode::kStay, false,
      [&](const detail::Body& body) {
        bytes.resize(body.bytes);
        body.write(body.values, reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
      },
      values...);
  return bytes;
}

// A letter with the last two of nine records.
std::string reference_letter(const rref::RRefId& id) {
  using rref::Record;
  using rref::RecordType;
  rref::Link link(0x11, 0x21, {});
  std::string letter;
  const auto send = [&](std::string&& bytes) { letter = std::move(bytes); };
  for (int i = 0; i < 7; ++i) {
    link.put({.type = RecordType::kConfirm, .number = 1}, rref::Link::When::kNow, {});
  }
  link.collect({}, send);
  rref::ReferenceLetter heard{.head = {.taken = 7, .first = 1, .count = 5}, .records = {}};
  heard.records.resize(5);
  EXPECT_EQ(link.hear(std::move(heard), {}).size(), 5u);
  link.put({.type = RecordType::kRequest, .id = id, .number = 3}, rref::Link::When::kNow, {});
  link.put({.type = RecordType::kClose, .number = 4}, rref::Link::When::kNow, {});
  link.collect({}, send);
  return letter;
}

std::map<std::string, std::string> sent() {
  const rref::RRefId id{.owner = 2, .creator = 1, .incarnation = 0x11, .number = 7};
  agent::Hello hello;
  hello.worker = 2;
  hello.name = "worker2";
  hello.asks = true;
  for (std::size_t i = 0; i < hello.session.bytes.size(); ++i) {
    hello.session.bytes[i] = static_cast<std::uint8_t>(i);
  }
  const std::vector<agent::TableEntry> table = {{"my_add", "int()", 0x1122334455667788}};
  const std::uint64_t time = std::uint64_t{5} * kOneSecond;
  std::map<std::string, std::string> blocks = {
      {"hello", encode_hello(hello)},
      {"table", encode_table(table)},
      {"call", head_bytes(agent::CallHead{
                   .function = 3, .number = 17, .remaining = time, .slot = 9, .behind = 2})},
      {"reply", head_bytes(agent::ReplyHead{.slot = 9, .number = 17})},
      {"error", agent::encode_error(
                    {static_cast<std::uint32_t>(ErrorKind::kRemote), "std::runtime_error", "no"})},
      {"cancel", head_bytes(agent::CancelHead{.number = 17, .floor = 15})},
      {"gather", head_bytes(agent::GatherHead{.group = 0x0102030405060708, .number = 1})},
      {"references", reference_letter(id)},
      {"reference", head_bytes(rref::Passed{
                        .id = id, .owner_incarnation = 0x21, .passage = 4 | rref::Passed::kReply})},
      {"values",
       value_bytes(true, std::int32_t{-2}, 1.5, std::string("hi"), std::vector<std::int16_t>{1, 2},
                   std::map<std::string, bool>{{"a", false}}, std::optional<std::uint8_t>(7),
                   std::optional<std::uint8_t>(),
                   std::variant<bool, std::uint8_t>(std::uint8_t{5}))},
      {"tensor", value_bytes(torch::tensor({1.0F, 2.0F}))},
      {"tensor_column",
       value_bytes(torch::arange(1, 5, torch::kInt16).view({2, 2}).select(1, 0), at::Tensor())},
      {"tensor_piece", value_bytes(torch::zeros({1'000'000}, torch::kUInt8))}};
  for (auto& [name, bytes] : blocks) bytes = hex(bytes);
  return blocks;
}

TEST(WireTest, ThePageShowsTheBytes) { EXPECT_EQ(shown(), sent()); }

// The order of kinds and errors is on the wire.
TEST(WireTest, NumbersStay) {
  using agent::LetterType;
  EXPECT_EQ(static_cast<int>(LetterType::kHello), 1);
  EXPECT_EQ(static_cast<int>(LetterType::kCall), 2);
  EXPECT_EQ(static_cast<int>(LetterType::kReply), 3);
  EXPECT_EQ(static_cast<int>(LetterType::kError), 4);
  EXPECT_EQ(static_cast<int>(LetterType::kCancel), 5);
  EXPECT_EQ(static_cast<int>(LetterType::kGoodbye), 6);
  EXPECT_EQ(static_cast<int>(LetterType::kGather), 7);
  EXPECT_EQ(static_cast<int>(LetterType::kGatherAsk), 8);
  EXPECT_EQ(agent::kFirstOtherLetter, 64);
  EXPECT_EQ(rref::kReferenceLetter, 64);
  EXPECT_EQ(static_cast<int>(ErrorKind::kInvalidArgument), 0);
  EXPECT_EQ(static_cast<int>(ErrorKind::kRemote), 5);
  EXPECT_EQ(static_cast<int>(ErrorKind::kCancelled), 7);
}

}  // namespace
}  // namespace convoy::rpc::test
