// Values of C++ types in messages, and the registry of functions.
#include "convoy/values.h"

#include <gmock/gmock.h>
#include <torch/types.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "convoy/functions.h"
#include "convoy/process_pool.h"
#include "convoy/queue.h"
#include "support.h"

namespace outside {

// A type that its users cannot change.
struct Point {
  double x = 0;
  double y = 0;
};
inline auto fields(Point& point) { return std::tie(point.x, point.y); }

}  // namespace outside

namespace convoy::share::test {
namespace {

using convoy::test::error_of;

enum class Color : std::uint8_t { kRed = 1, kBlue = 200 };

struct Job {
  int seed = 0;
  std::optional<std::string> name;
  std::vector<outside::Point> path;
  at::Tensor start;
  CONVOY_FIELDS(seed, name, path, start)
};

template <class T>
T through_message(const T& value) {
  Message message;
  put(message, value);
  ValueReader reader(message);
  T back = reader.take<T>();
  EXPECT_TRUE(reader.at_end());
  return back;
}

TEST(ValuesTest, EveryKindOfType) {
  EXPECT_EQ(through_message(std::int8_t{-7}), -7);
  EXPECT_EQ(through_message(std::uint64_t{1} << 62), std::uint64_t{1} << 62);
  EXPECT_EQ(through_message(1.5F), 1.5F);
  EXPECT_EQ(through_message(Color::kBlue), Color::kBlue);
  EXPECT_EQ(through_message(std::string("text")), "text");
  EXPECT_EQ(through_message(std::vector<bool>{true, false}), (std::vector<bool>{true, false}));
  EXPECT_EQ(through_message(std::array<int, 3>{1, 2, 3}), (std::array<int, 3>{1, 2, 3}));
  EXPECT_EQ(through_message(std::pair<int, std::string>(1, "one")),
            (std::pair<int, std::string>(1, "one")));
  using Names = std::map<std::string, std::vector<int>>;
  EXPECT_EQ(through_message(Names{{"a", {1}}, {"b", {}}}), (Names{{"a", {1}}, {"b", {}}}));
  using Numbers = std::unordered_map<int, double>;
  EXPECT_EQ(through_message(Numbers{{1, 0.5}, {2, 0.25}}), (Numbers{{1, 0.5}, {2, 0.25}}));
  EXPECT_EQ(through_message(std::optional<int>()), std::nullopt);
}

TEST(ValuesTest, Variants) {
  using Choice = std::variant<std::monostate, int, std::string, std::vector<int>>;
  for (const Choice& choice :
       {Choice(), Choice(5), Choice("text"), Choice(std::vector<int>{1, 2})}) {
    EXPECT_EQ(through_message(choice), choice);
  }
  for (const std::int64_t index : {-1, 4}) {
    const Message message{index, std::int64_t{5}};
    EXPECT_EQ(error_of([&] { ValueReader(message).take<Choice>(); }).value().kind(),
              ErrorKind::kInvalidArgument);
  }
}

TEST(ValuesTest, TypesThatNameTheirFields) {
  const Job job{7, "first", {{1, 2}, {3, 4}}, torch::arange(3)};
  const Job back = through_message(job);
  EXPECT_EQ(back.seed, 7);
  EXPECT_EQ(back.name, "first");
  ASSERT_EQ(back.path.size(), 2U);
  EXPECT_EQ(back.path[1].y, 4);
  EXPECT_TRUE(back.start.is_same(job.start));
}

TEST(ValuesTest, WhatDoesNotFitIsAnError) {
  const auto kind_of = [](const Message& message, const auto& example) {
    using Value = std::remove_cvref_t<decltype(example)>;
    return error_of([&] { ValueReader(message).take<Value>(); }).value().kind();
  };
  const auto wrong = ErrorKind::kInvalidArgument;
  EXPECT_EQ(kind_of(Message{std::int64_t{300}}, std::int8_t{}), wrong);
  EXPECT_EQ(kind_of(Message{std::int64_t{-1}}, 1U), wrong);
  EXPECT_EQ(kind_of(Message{"text"}, 1), wrong);
  EXPECT_EQ(kind_of(Message{1.5}, std::string()), wrong);
  EXPECT_EQ(kind_of(Message{}, 1), wrong);
  EXPECT_EQ(kind_of(Message{std::int64_t{1} << 40}, std::vector<int>()), wrong);
  EXPECT_EQ(error_of([] { ValueReader(Message{true}).take<Queue>(); }).value().kind(), wrong);
  Message message;
  EXPECT_EQ(error_of([&] { put(message, ~std::uint64_t{0}); }).value().kind(), wrong);
}

int first_twin() { return 1; }
int second_twin() { return 2; }
double half(int number) { return number / 2.0; }

Message no_runner(int, ValueReader&) { return {}; }

const FunctionInfo* find(const std::vector<FunctionInfo>& all, const std::string& name) {
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const FunctionInfo& each) { return each.name.ends_with(name); });
  return found == all.end() ? nullptr : &*found;
}

TEST(FunctionsTest, KnownByNameAndSignatureAndNotExported) {
  static_cast<void>(convoy::detail::Task<half>::kEntry);  // as map<half>() does
  const auto all = registered_functions();
  const FunctionInfo* const known = find(all, "(anonymous namespace)::half");
  ASSERT_NE(known, nullptr);
  EXPECT_EQ(known->signature, "double (int)");
  EXPECT_NE(known->signature_hash, 0U);
  EXPECT_FALSE(known->exported);
  // But for the library's own: what runs operators by name, references, backward passes.
  for (const auto& each : all) {
    const bool own =
        each.name.starts_with("convoy::") && each.name.find("::detail::") != std::string::npos;
    EXPECT_TRUE(own || !each.exported) << each.name;
  }
}

// Two files of a program may each have a static function of the same name.
TEST(FunctionsTest, EqualNamesAreTwoFunctions) {
  const auto add = [](const void* identity) {
    return convoy::detail::register_function(
               identity, typeid(convoy::detail::FunctionIdentity<first_twin>), typeid(int()),
               convoy::detail::FunctionUse::kItem, &no_runner)
        .name;
  };
  static const char other = 0;
  const std::string first = add(&convoy::detail::FunctionIdentity<first_twin>::kHere);
  const std::string second = add(&other);
  EXPECT_EQ(second, first + "#2");
  EXPECT_EQ(add(&convoy::detail::FunctionIdentity<first_twin>::kHere), first);
  EXPECT_EQ(add(&other), second);
}

TEST(FunctionsTest, AnotherSignatureIsAnErrorWithBoth) {
  using convoy::detail::FunctionUse;
  using convoy::detail::run_request;
  const auto& entry = *convoy::detail::Task<second_twin>::kEntry;
  const Message right = convoy::detail::function_request(entry);
  EXPECT_EQ(run_request(FunctionUse::kItem, 0, right).integer(0), 2);

  const Message changed{entry.name, std::int64_t{1}, "int (double)"};
  const Error error = error_of([&] { run_request(FunctionUse::kItem, 0, changed); }).value();
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_THAT(error.what(), testing::HasSubstr("int ()"));
  EXPECT_THAT(error.what(), testing::HasSubstr("int (double)"));

  // Registered for a pool is not registered for a process of its own.
  EXPECT_THAT(error_of([&] { run_request(FunctionUse::kProcess, 0, right); }).value().what(),
              testing::HasSubstr("has no function"));
}

}  // namespace
}  // namespace convoy::share::test
