#include "group/rendezvous_url.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace convoy {
namespace {

using test::expect_error;
using Scheme = RendezvousUrl::Scheme;

TEST(RendezvousUrlTest, Environment) {
  EXPECT_EQ(parse_rendezvous_url("env://").scheme, Scheme::kEnvironment);
  const auto url = parse_rendezvous_url("env://?rank=2&world_size=4");
  EXPECT_EQ(url.given.rank, 2);
  EXPECT_EQ(url.given.size, 4);
}

TEST(RendezvousUrlTest, File) {
  const auto url = parse_rendezvous_url("file:///tmp/a b?rank=0&world_size=1");
  EXPECT_EQ(url.scheme, Scheme::kFile);
  EXPECT_EQ(url.path, "/tmp/a b");
  EXPECT_EQ(url.given.rank, 0);
}

TEST(RendezvousUrlTest, Tcp) {
  auto url = parse_rendezvous_url("tcp://node-1.example:29500");
  EXPECT_EQ(url.scheme, Scheme::kTcp);
  EXPECT_EQ(url.endpoint, (Endpoint{"node-1.example", 29500}));
  EXPECT_FALSE(url.given.rank || url.given.size);
  EXPECT_EQ(to_string(url.endpoint), "node-1.example:29500");
  url = parse_rendezvous_url("tcp://[fe80::1]:1?world_size=3");
  EXPECT_EQ(url.endpoint, (Endpoint{"fe80::1", 1}));
  EXPECT_EQ(url.given.size, 3);
  EXPECT_EQ(to_string(url.endpoint), "[fe80::1]:1");
}

TEST(RendezvousUrlTest, SaysWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "known: env://, file://, tcp://"},
      {"env", "known: env://, file://, tcp://"},
      {"http://a:1", "known: env://, file://, tcp://"},
      {"env://host", "nothing may stand behind env://"},
      {"file://", "the path is missing"},
      {"file://?rank=0&world_size=1", "the path is missing"},
      {"file://folder/file", "must be absolute"},
      {"file:///folder/", "not a folder"},
      {"tcp://", "the host is missing"},
      {"tcp://:29500", "the host is missing"},
      {"tcp://host", "the port is missing"},
      {"tcp://host?rank=0", "the port is missing"},
      {"tcp://[::1]", "the port is missing"},
      {"tcp://[::1", "']' is missing"},
      {"tcp://::1:29500", "in brackets"},
      {"tcp://host:0", "from 1 to 65535"},
      {"tcp://host:65536", "from 1 to 65535"},
      {"tcp://host:12x", "from 1 to 65535"},
      {"tcp://host:", "from 1 to 65535"},
      {"tcp://host:1?rank=one", "rank is not a number: 'one'"},
      {"tcp://host:1?rank=", "rank is not a number"},
      {"tcp://host:1?rank", "rank is not a number"},
      {"tcp://host:1?size=2", "Known: rank, world_size"},
      {"tcp://host:1?rank=0&rank=1", "rank is given twice"},
  };
  for (const auto& [text, part] : cases) {
    SCOPED_TRACE(text);
    const std::string method = text;  // clang 14: no structured bindings in lambdas
    expect_error(ErrorKind::kInvalidArgument, part, [&] { parse_rendezvous_url(method); });
  }
}

}  // namespace
}  // namespace convoy
