#include "launch/json.h"

#include <gtest/gtest.h>

namespace convoy::launch {
namespace {

TEST(Json, ReadsValues) {
  const auto json = Json::parse(R"( {"a": [1, -2.5e1, true, false, null], "b": {"c": "d"}} )");
  ASSERT_TRUE(json);
  ASSERT_TRUE(json->member("a"));
  const auto& items = std::get<Json::Array>(json->member("a")->value);
  ASSERT_EQ(items.size(), 5U);
  EXPECT_EQ(std::get<double>(items[1].value), -25.0);
  EXPECT_EQ(std::get<bool>(items[2].value), true);
  EXPECT_EQ(*json->member("b")->member("c")->text(), "d");
  EXPECT_EQ(json->member("x"), nullptr);
  EXPECT_EQ(items[0].member("x"), nullptr);
}

TEST(Json, ReadsEscapes) {
  const auto json = Json::parse(R"("a\"\\\/\n\tä😀\ud800x")");
  ASSERT_TRUE(json && json->text());
  EXPECT_EQ(*json->text(), "a\"\\/\n\t\xC3\xA4\xF0\x9F\x98\x80\xEF\xBF\xBDx");
}

TEST(Json, RefusesWhatIsNotJson) {
  for (const char* text : {"", "{", "[1,]", "{\"a\"}", "{\"a\":}", "\"open", "\"\\q\"", "tru",
                           "1 2", "\"\\u12\"", "{\"a\":1,}", "nul"}) {
    EXPECT_FALSE(Json::parse(text)) << text;
  }
}

TEST(Json, RefusesDeepNesting) {
  EXPECT_TRUE(Json::parse(std::string(60, '[') + std::string(60, ']')));
  EXPECT_FALSE(Json::parse(std::string(100000, '[')));
}

TEST(Json, QuotesAnything) {
  for (const std::string text :
       {"plain", "quo\"te\\", "line\nbreak\ttab\x01", "\xC3\xA4\xF0\x9F\x98\x80"}) {
    const auto back = Json::parse(quote_json(text));
    ASSERT_TRUE(back && back->text()) << quote_json(text);
    EXPECT_EQ(*back->text(), text);
  }
  EXPECT_EQ(quote_json("a\xFF"), "\"a\\ufffd\"");
}

}  // namespace
}  // namespace convoy::launch
