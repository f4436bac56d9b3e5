// The client alone, against a peer that the test plays.
#include "store/socket_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>

#include "base/concat.h"
#include "raw_peer.h"

namespace convoy::test {
namespace {

using std::chrono::milliseconds;
using Keys = std::vector<std::string>;

class SocketStoreTest : public testing::Test {
 protected:
  SocketStoreTest() : SocketStoreTest(Socket::pair()) {}

  // Answers a request with `parts`.
  void answer(const StoreMessage& request, Keys parts) {
    peer_.send(encode({.id = request.id, .parts = std::move(parts)}));
  }

  RawPeer peer_;  // plays the server
  std::shared_ptr<Store> store_;

 private:
  explicit SocketStoreTest(std::pair<Socket, Socket> ends)
      : peer_(std::move(ends.first)), store_(make_socket_store(std::move(ends.second))) {}
};

template <class Function>
auto in_thread(Function function) {
  return std::async(std::launch::async, std::move(function));
}

TEST_F(SocketStoreTest, RequestsCarryTheTimeThatIsLeft) {
  auto got = in_thread([&] { return store_->get("k", Deadline::after(std::chrono::seconds(20))); });
  auto request = peer_.receive();
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->code, static_cast<int>(StoreOp::kGet));
  EXPECT_NE(request->id, kConnectionId);
  EXPECT_LE(request->timeout_us, 20'000'000u);
  EXPECT_GT(request->timeout_us, 1'000'000u);
  answer(*request, {"v"});
  EXPECT_EQ(got.get(), "v");

  auto waiting = in_thread([&] { store_->wait(Keys{"k"}, Deadline::never()); });
  request = peer_.receive();
  EXPECT_EQ(request->timeout_us, UINT64_MAX);
  answer(*request, {});
  waiting.get();
}

TEST_F(SocketStoreTest, RepliesFindTheirCallersInAnyOrder) {
  constexpr std::size_t kCallers = 10;
  std::vector<std::future<std::string>> callers;
  for (std::size_t i = 0; i < kCallers; ++i) {
    callers.push_back(in_thread([&, i] { return store_->get(std::to_string(i), soon()); }));
  }
  std::vector<StoreMessage> requests;
  while (requests.size() < kCallers) requests.push_back(peer_.receive().value());
  answer({.id = 4'000'000}, {"for nobody"});
  for (auto i = requests.rbegin(); i != requests.rend(); ++i) answer(*i, {"re " + i->parts[0]});
  for (std::size_t i = 0; i < kCallers; ++i) EXPECT_EQ(callers[i].get(), concat("re ", i));
}

// The server is stopped: nobody waits for longer than told (and the grace in which the server's own
// answer may come), whatever other threads of this process do. Once it goes on, so does the store_.
TEST_F(SocketStoreTest, StoppedServerIsATimeoutAndNoBreak) {
  const auto start = Deadline::Clock::now();
  auto large = in_thread([&] { store_->set("large", std::string(std::size_t{8} << 20, 'x')); });
  EXPECT_TRUE(wait_ready(peer_.socket.fd(), POLLIN, soon()));  // a part of it is out
  std::vector<std::future<void>> impatient;
  for (int i = 0; i < 4; ++i) {
    impatient.push_back(in_thread([&, i] {
      EXPECT_ERROR(kTimeout, concat("get '", i, "': the server did not answer"),
                   store_->get(std::to_string(i), Deadline::after(milliseconds(10 * i))));
    }));
  }
  for (auto& each : impatient) each.get();
  EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(20));

  auto request = peer_.receive();
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->parts.at(1).size(), std::size_t{8} << 20);  // not torn by those who gave up
  answer(*request, {});
  large.get();
  // What was given up before it was sent never is.
  auto next = in_thread([&] { return store_->get("next", soon()); });
  request = peer_.receive();
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->parts, Keys{"next"});
  answer(*request, {"v"});
  EXPECT_EQ(next.get(), "v");
}

// A server stops reading from a client that has a lot to fetch. A client that only has to send must
// fetch it all the same.
TEST_F(SocketStoreTest, ReadsWhileItSends) {
  const std::string large(std::size_t{4} << 20, 'x');
  auto set = in_thread([&] { store_->set("k", large); });
  EXPECT_TRUE(wait_ready(peer_.socket.fd(), POLLIN, soon()));
  // More than the socket holds, for a caller that has given up; only then the request is read.
  peer_.send(encode({.id = 77'777, .parts = {large}}));
  const auto request = peer_.receive();
  ASSERT_TRUE(request.has_value());
  answer(*request, {});
  set.get();
}

TEST_F(SocketStoreTest, EndOfTheServerReachesEveryCallerOnce) {
  std::vector<std::future<std::optional<Error>>> callers;
  for (int i = 0; i < 6; ++i) {
    callers.push_back(
        in_thread([&] { return error_of([&] { store_->get("k", Deadline::never()); }); }));
  }
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(peer_.receive().has_value());
  peer_.socket.close();
  for (auto& caller : callers) {
    const auto error = caller.get();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ErrorKind::kPeerLost);
  }
  EXPECT_ERROR(kPeerLost, "closed the connection", store_->try_get("k"));  // at once
  EXPECT_ERROR(kPeerLost, "closed the connection", store_->try_get("k"));
}

TEST_F(SocketStoreTest, LastWordsOfTheServerAreTheError) {
  peer_.send(encode(error_reply(kConnectionId, ErrorKind::kResource, "no room for you")));
  peer_.socket.close();
  EXPECT_ERROR(kResource, "no room for you", store_->set("k", std::string(1 << 20, 'x')));
  EXPECT_ERROR(kResource, "no room for you", store_->set("k", "v"));
}

TEST_F(SocketStoreTest, PeerThatIsNoStore) {
  peer_.send("HTTP/1.1 400 Bad Request\r\n\r\n");
  EXPECT_ERROR(kInvalidArgument, "does not speak the store's protocol: bad magic",
               store_->set("k", "v"));
}

TEST_F(SocketStoreTest, ReplyOfAWrongForm) {
  auto got = in_thread([&] { return error_of([&] { store_->get("k", soon()); }); });
  answer(peer_.receive().value(), {"two", "parts"});
  const auto error = got.get();
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->kind(), ErrorKind::kInternal) << error->what();
}

TEST(ConnectStore, NobodyThere) {
  const TempFolder folder("connect");
  EXPECT_ERROR(kPeerLost, folder.path(), connect_store(folder.path() + "/socket", soon()));
  EXPECT_ERROR(kInvalidArgument, "takes 1 to 107", connect_store(std::string(200, 'x'), soon()));
  EXPECT_ERROR(kInvalidArgument, "takes 1 to 107", connect_store("", soon()));
}

TEST(ConnectStore, ServerThatWentAway) {
  const TempFolder folder("connect");
  const std::string path = folder.path() + "/socket";
  {
    Listener listener(folder.path(), "socket");
    std::filesystem::rename(path, folder.path() + "/kept");
  }
  EXPECT_ERROR(kPeerLost, "/kept", connect_store(folder.path() + "/kept", soon()));
}

TEST(MakeSocketStore, NeedsAUnixStreamSocket) {
  const TempFolder folder("connect");
  write_file(folder.path() + "/file", "");
  UniqueFd file(::open((folder.path() + "/file").c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_ERROR(kInvalidArgument, "is not a Unix stream socket",
               make_socket_store(Socket(std::move(file))));
}

}  // namespace
}  // namespace convoy::test
