// Values whose types are known at run time only: what comes may be anything.
#include <torch/types.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "convoy/detail/rpc_signature.h"
#include "convoy/detail/rpc_values.h"
#include "convoy/error.h"
#include "convoy/rpc_dynamic.h"
#include "rpc/dynamic.h"
#include "support/expect_error.h"

namespace convoy::rpc::dynamic {
namespace {

struct Task {
  std::int32_t seed = 0;
  std::vector<std::string> names;
  at::Tensor start;
  CONVOY_FIELDS(seed, names, start)
};

// One of every kind.
using AllTypes = std::tuple<bool, std::int8_t, std::uint64_t, float, double, std::string,
                            std::vector<std::byte>, at::Tensor, std::vector<std::int64_t>,
                            std::optional<std::string>, std::map<std::string, std::vector<double>>,
                            std::variant<std::int64_t, std::string, std::monostate>, Task>;

AllTypes everything() {
  return {true,
          std::int8_t{-7},
          UINT64_MAX,
          1.5F,
          -2.25,
          "text",
          {std::byte{1}, std::byte{255}},
          torch::arange(3),
          {1, -2},
          "some",
          {{"a", {0.5}}, {"b", {}}},
          "held",
          Task{5, {"x", ""}, torch::ones({2})}};
}

template <class T>
ValueType type_of() {
  detail::Describer text;
  text.add<T>();
  return ValueType::parse(text.text());
}

// As a call has it. The tensors are small: they are in it.
std::vector<std::byte> bytes_of(const AllTypes& value) {
  std::vector<std::byte> bytes;
  detail::with_body(
      nullptr, detail::TensorMode::kStay, false,
      [&](const detail::Body& body) {
        bytes.resize(body.bytes);
        body.write(body.values, bytes.data(), body.bytes);
      },
      value);
  return bytes;
}

Value value_of(const std::vector<std::byte>& bytes, const ValueType& type) {
  std::vector<transport::Part> parts;
  std::span<transport::Part> span(parts);
  detail::ValueSource source(bytes.data(), bytes.size(), &span);
  Value value = take_value(source, type);
  source.finish();
  return value;
}

std::optional<ErrorKind> kind_of(const std::vector<std::byte>& bytes, const ValueType& type) {
  const auto error = convoy::test::error_of([&] { static_cast<void>(value_of(bytes, type)); });
  return error ? std::optional(error->kind()) : std::nullopt;
}

TEST(RpcDynamicTest, WhatCppHasWritten) {
  const Value value = value_of(bytes_of(everything()), type_of<AllTypes>());
  const Value::List& all = value.list();
  ASSERT_EQ(all.size(), 13U);
  EXPECT_EQ(std::get<bool>(all[0].held), true);
  EXPECT_EQ(std::get<std::int64_t>(all[1].held), -7);
  EXPECT_EQ(std::get<std::uint64_t>(all[2].held), UINT64_MAX);
  EXPECT_EQ(std::get<double>(all[3].held), 1.5);
  EXPECT_EQ(std::get<double>(all[4].held), -2.25);
  EXPECT_EQ(std::get<std::string>(all[5].held), "text");
  EXPECT_EQ(std::get<detail::Bytes>(all[6].held).size(), 2U);
  EXPECT_TRUE(std::get<at::Tensor>(all[7].held).equal(torch::arange(3)));
  EXPECT_EQ(std::get<std::int64_t>(all[8].list().at(1).held), -2);
  EXPECT_EQ(std::get<std::string>(all[9].list().at(0).held), "some");
  EXPECT_EQ(std::get<std::string>(all[10].list().at(2).held), "b");
  EXPECT_EQ(std::get<std::int64_t>(all[11].list().at(0).held), 1);
  EXPECT_EQ(std::get<std::string>(all[11].list().at(1).held), "held");
  EXPECT_EQ(std::get<std::int64_t>(all[12].list().at(0).held), 5);
}

TEST(RpcDynamicHostileTest, CutOffAnywhere) {
  const auto type = type_of<AllTypes>();
  const auto whole = bytes_of(everything());
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_EQ(kind_of({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(n)}, type),
              ErrorKind::kInvalidArgument)
        << n;
  }
  auto longer = whole;
  longer.push_back({});
  EXPECT_EQ(kind_of(longer, type), ErrorKind::kInvalidArgument);
}

TEST(RpcDynamicHostileTest, ChangedBytes) {
  const auto type = type_of<AllTypes>();
  const auto whole = bytes_of(everything());
  std::mt19937 random(11);
  for (int i = 0; i < 20'000; ++i) {
    auto bytes = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      constexpr std::array<unsigned, 6> kBytes = {0, 1, 0x7f, 0x80, 0xff, 8};
      bytes[random() % bytes.size()] =
          static_cast<std::byte>(random() % 2 == 0 ? kBytes[random() % 6] : random() % 256);
    }
    try {
      static_cast<void>(value_of(bytes, type));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
    } catch (const c10::Error&) {  // parts of a sparse tensor that do not fit together
    }
  }
}

TEST(RpcDynamicHostileTest, EachKindThatLies) {
  const auto expect_refused = [](const char* type, const std::vector<unsigned>& numbers) {
    std::vector<std::byte> bytes;
    for (const unsigned number : numbers) bytes.push_back(static_cast<std::byte>(number));
    EXPECT_EQ(kind_of(bytes, ValueType::parse(type)), ErrorKind::kInvalidArgument) << type;
  };
  const std::vector<unsigned> huge(8, 0x7f), negative(8, 0xff);
  expect_refused("bool", {2});
  expect_refused("std::monostate", {1});
  expect_refused("long", {1, 2, 3});
  expect_refused("std::optional<bool>", {2, 1});
  expect_refused("std::optional<bool>", {1});
  for (const auto& count : {huge, negative}) {
    expect_refused("std::string", count);
    expect_refused("std::vector<std::byte, std::allocator<std::byte> >", count);
    expect_refused("std::vector<bool>", count);
    expect_refused("std::vector<std::string>", count);
    expect_refused("std::map<std::string, at::Tensor>", count);
    expect_refused("std::variant<bool, std::string>", count);
  }
  expect_refused("std::variant<bool, bool>", {2, 0, 0, 0, 0, 0, 0, 0, 1});
  expect_refused("at::Tensor", {1, 2, 3, 4});
  expect_refused("convoy::RRef<at::Tensor>", std::vector<unsigned>(64, 1));  // of nobody's
  expect_refused("object Model", {0});
  expect_refused("(bool, bool)", {1});
  expect_refused("Pair{bool, bool}", {1, 0, 0});
}

class OddMap final : public Held {
 public:
  OddMap() : Held(ValueType::parse("std::map<std::string, bool>")) {}
  Value get() const override {
    Value::List list;
    list.push_back({std::string("key")});
    return {std::move(list)};
  }
};

TEST(RpcDynamicTest, AMapHasAValueForEachKey) {
  convoy::test::expect_error(ErrorKind::kInvalidArgument, "std::map<std::string, bool>",
                             [] { OddMap().pass({}, [](void*, const detail::Body&) {}, nullptr); });
}

// --- Types --------------------------------------------------------------------------------------

TEST(RpcDynamicTest, TypesAsTheyAreWritten) {
  for (const char* const text :
       {"bool", "unsigned long", "std::vector<long, std::allocator<long> >",
        "std::vector<std::string>", "std::optional<std::map<std::string, at::Tensor>>",
        "std::variant<long, std::string>", "(long, (bool, std::string))",
        "ns::Job{int, std::string}", "convoy::RRef<at::Tensor>", "object Model"}) {
    EXPECT_EQ(ValueType::parse(text).text(), text);
  }
  EXPECT_EQ(type_of<AllTypes>().parts.size(), 13U);
}

TEST(RpcDynamicHostileTest, TypesThatAreNone) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "std::vector<";
  for (const std::string& text :
       {std::string(), std::string("std::vector"), std::string("std::vector<"),
        std::string("std::vector<bool"), std::string("std::vector<bool, "), std::string("(bool"),
        std::string("std::map<bool>"), std::string("std::optional<>"), std::string("Job"),
        std::string("Job{bool"), std::string("bool bool>"), std::string("bool)"),
        std::string("std::variant<"), std::string("<"), std::string("\0\xff", 2),
        // Items without bytes: as many as anybody likes in a message of eight.
        std::string("std::vector<()>"), std::string("std::vector<Empty{}>"),
        std::string("std::vector<((), Empty{})>"), std::string("std::map<(), ()>"), deep}) {
    const auto error = convoy::test::error_of([&] { static_cast<void>(ValueType::parse(text)); });
    ASSERT_TRUE(error) << text.substr(0, 50);
    EXPECT_EQ(error->kind(), ErrorKind::kUnsupported) << error->what();
  }
}

TEST(RpcDynamicHostileTest, ChangedSignatures) {
  const std::string whole = type_of<AllTypes>().text() + " (" + type_of<AllTypes>().text() + ")";
  std::mt19937 random(3);
  const std::string letters = "<>(){},: abz_\n\xff";
  for (int i = 0; i < 5'000; ++i) {
    std::string text = whole;
    for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
      const std::size_t at = random() % text.size();
      if (random() % 3 == 0) {
        text.erase(at, 1 + random() % 5);
      } else {
        text[at] = letters[random() % letters.size()];
      }
      if (text.empty()) text = "(";
    }
    try {
      static_cast<void>(Signature::parse(text));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what();
    }
  }
}

}  // namespace
}  // namespace convoy::rpc::dynamic
