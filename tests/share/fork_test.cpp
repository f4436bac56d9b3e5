// Every public entry point of sharing in a forked child, small and large: it works as documented,
// or is refused, and never harms the parent. The only tests that fork with torch loaded.
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <torch/types.h>
#include <unistd.h>

#include <functional>

#include "convoy/process_pool.h"
#include "convoy/published.h"
#include "convoy/queue.h"
#include "convoy/slots.h"
#include "convoy/spawn.h"
#include "support.h"

namespace convoy::share::test {
namespace {

using convoy::test::error_of;

// Of tensors: in the ring or a page, and beyond.
class ForkTest : public testing::TestWithParam<std::int64_t> {
 protected:
  // Children compute in one thread: those of the parent are not theirs.
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { expect_nothing_held(); }

  at::Tensor filled(double value) const { return at::full({GetParam()}, value); }
  bool is_filled(const at::Tensor& tensor, double value) const {
    return tensor.numel() == GetParam() && tensor.eq(value).all().item<bool>();
  }
};
INSTANTIATE_TEST_SUITE_P(Elements, ForkTest, testing::Values(8, 1 << 20),
                         [](const auto& test) { return test.param == 8 ? "small" : "large"; });

// The function's assertions count for the test; what it throws is a failure.
void in_child(const std::function<void()>& function) {
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    int code = 0;
    try {
      function();
      code = testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the forked child throws: %s\n", error.what());
      code = 2;
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child ended with " << status;
}

TEST_P(ForkTest, ChannelIsItsParents) {
  auto [a, b] = channel();
  a.send(filled(1));
  EXPECT_TRUE(is_filled(b.receive(soon()), 1));
  a.send(Message{filled(2), 2});  // waits while the child runs
  in_child([&] {
    const auto refused = [](const std::function<void()>& use) {
      expect_error(ErrorKind::kUnsupported, "forked child", use);
    };
    refused([&] { a.send(filled(3)); });
    refused([&] { a.send(Message{3}); });
    refused([&] { b.send(Message{3}); });
    refused([&] { (void)b.receive(soon()); });
    refused([&] { (void)b.receive_message(soon()); });
    refused([&] { (void)b.try_receive(); });
    refused([&] { (void)a.release(); });
    a.close();
    b.close();
    const Channel copy = std::exchange(a, {});  // and ends
  });
  const Message waiting = b.receive_message(soon());
  EXPECT_TRUE(is_filled(waiting.tensor(0), 2));
  EXPECT_EQ(waiting.integer(1), 2);
  EXPECT_FALSE(b.try_receive());
  b.send(Message{4});
  EXPECT_EQ(a.receive_message(soon()).integer(0), 4);
}

TEST_P(ForkTest, ListenerIsItsParentsAndAChildCanConnect) {
  const TempFolder folder("share");
  const auto listener = listen(folder.path() + "/s");
  const at::Tensor inherited = share_memory_(filled(1));
  std::optional<Channel> channel;
  in_child([&] {
    const Channel mine = connect(listener.path(), soon());
    mine.send(Message{inherited, filled(2)});
    auto [c, d] = share::channel();
    c.send(filled(3));
    EXPECT_TRUE(is_filled(d.receive(soon()), 3));
    // It ends before what it sent was received: its own memory lives on in the message, and the
    // parent's is the parent's.
    mine.send(Message{std::string("done")});
  });
  const Channel theirs = listener.accept(soon());
  const Message message = theirs.receive_message(soon());
  EXPECT_EQ(message.tensor(0).data_ptr(), inherited.data_ptr());
  EXPECT_TRUE(is_filled(message.tensor(1), 2));
  EXPECT_EQ(theirs.receive_message(soon()).text(0), "done");
  EXPECT_TRUE(std::filesystem::exists(listener.path()));
}

TEST_P(ForkTest, TensorsAndBytes) {
  const at::Tensor inherited = share_memory_(filled(1));
  const std::string bytes = to_bytes(inherited);
  at::Tensor late = empty({GetParam()});
  late.fill_(1);
  in_child([&] {
    EXPECT_TRUE(is_shared(inherited));
    EXPECT_TRUE(is_filled(from_bytes(bytes), 1));
    expect_error(ErrorKind::kPeerLost, "turned into a tensor before",
                 [&] { (void)from_bytes(bytes); });
    EXPECT_TRUE(is_filled(from_bytes(to_bytes(inherited)), 1));
    EXPECT_TRUE(is_filled(from_bytes(to_bytes(filled(2))), 2));
    const at::Tensor own = share_memory_(filled(3));
    inherited.fill_(4);
    EXPECT_TRUE(is_filled(own, 3));
    EXPECT_GE(usage().blocks, 1U);
    (void)trim();
  });
  EXPECT_TRUE(is_filled(inherited, 4));
  // What the parent shares now lies nowhere where the child was.
  const at::Tensor more = share_memory_(filled(5));
  EXPECT_TRUE(is_filled(inherited, 4));
  EXPECT_TRUE(is_filled(late, 1));
  EXPECT_TRUE(is_filled(more, 5));
}

TEST_P(ForkTest, Queue) {
  const Queue queue({.capacity = 8});
  queue.put(Message{filled(1), 1});
  in_child([&] {
    EXPECT_TRUE(is_filled(queue.get(soon()).tensor(0), 1));
    queue.put(Message{filled(2), 2});
    EXPECT_EQ(queue.put_many({Message{filled(3)}, Message{filled(4)}}, soon()), 2U);
    EXPECT_EQ(queue.size(), 3U);
    // What the child makes itself.
    const Queue own({.capacity = 2});
    own.put(filled(5));
    EXPECT_TRUE(is_filled(own.get(soon()).tensor(0), 5));
  });
  EXPECT_TRUE(is_filled(queue.get(soon()).tensor(0), 2));
  const auto rest = queue.get_many(8, soon());
  ASSERT_EQ(rest.size(), 2U);
  EXPECT_TRUE(is_filled(rest[1].tensor(0), 4));
  EXPECT_EQ(queue.lost().items, 0U) << queue.lost().latest;
  // A copy that the child lets go of is not the parent's.
  auto* const kept = new Queue(queue);
  in_child([&] { delete kept; });
  queue.put(filled(6));
  EXPECT_TRUE(is_filled(kept->get(soon()).tensor(0), 6));
  delete kept;
}

TEST_P(ForkTest, EventBarrierAndLock) {
  const auto event = Event::create();
  const auto lock = Lock::create();
  const Barrier barrier(2);
  EXPECT_EQ(lock.lock(soon()), Lock::Taken::kFree);
  in_child([&] {
    EXPECT_FALSE(lock.try_lock());
    expect_error(ErrorKind::kInvalidArgument, "", [&] { lock.unlock(); });
    expect_error(ErrorKind::kTimeout, "",
                 [&] { (void)barrier.wait(Deadline::after(std::chrono::milliseconds(1))); });
    const Barrier alone(1);
    EXPECT_EQ(alone.wait(soon()), 0U);
    event.set();
  });
  EXPECT_TRUE(event.is_set());
  lock.unlock();
  in_child([&] {
    EXPECT_EQ(lock.lock(soon()), Lock::Taken::kFree);  // and ends with it
  });
  EXPECT_EQ(lock.lock(soon()), Lock::Taken::kFromDead);
  lock.unlock();
  barrier.reset();
}

TEST_P(ForkTest, Published) {
  const share::PublishedTensors weights({{"w", filled(1)}}, {});
  const share::Snapshot before = weights.read();
  in_child([&] {
    expect_error(ErrorKind::kUnsupported, "read() one in the child", [&] { (void)before["w"]; });
    const share::Snapshot mine = weights.read();
    EXPECT_TRUE(is_filled(mine["w"], 1));
    expect_error(ErrorKind::kInvalidArgument, "there is one writer",
                 [&] { weights.publish({{"w", filled(9)}}); });
    expect_error(ErrorKind::kTimeout, "still the newest", [&] {
      (void)weights.read_newer(1, Deadline::after(std::chrono::milliseconds(1)));
    });
    const at::Tensor target = filled(0);
    EXPECT_EQ(weights.load_into({{"w", target}}), 1U);
    EXPECT_TRUE(is_filled(target, 1));
    const share::PublishedTensors own({{"w", filled(2)}}, {});
    own.publish({{"w", filled(3)}});
    EXPECT_TRUE(is_filled(own.read()["w"], 3));
  });
  EXPECT_TRUE(is_filled(before["w"], 1));
  for (int i = 2; i < 10; ++i) weights.publish({{"w", filled(i)}});
  EXPECT_TRUE(is_filled(before["w"], 1));
  EXPECT_TRUE(is_filled(weights.read()["w"], 9));
}

TEST_P(ForkTest, Slots) {
  const share::Slots slots(2, {{"x", {GetParam()}, at::kFloat}});
  share::Slot held = slots.fill(soon());
  held["x"].fill_(1);
  in_child([&] {
    expect_error(ErrorKind::kInvalidArgument, "forked", [&] { held.commit(); });
    share::Slot mine = slots.fill(soon());
    mine["x"].fill_(2);
    mine.commit();
    EXPECT_FALSE(slots.try_fill());  // the parent's is the parent's
    held.release();
    EXPECT_FALSE(slots.try_fill());
    EXPECT_EQ(slots.reclaim(), 0U);
    const share::Slots own(1, {{"x", {GetParam()}, at::kFloat}});
    own.fill(soon()).commit();
    EXPECT_TRUE(static_cast<bool>(own.next(soon())));
  });
  share::Slot theirs = slots.next(soon());
  EXPECT_TRUE(is_filled(theirs["x"], 2));
  theirs.release();
  held.commit();
  EXPECT_TRUE(is_filled(slots.next(soon())["x"], 1));
  EXPECT_EQ(slots.counts().abandoned, 0U);
}

void wait_for_word(int, const at::Tensor& tensor) {
  spawned()->parent.receive_message();
  tensor.add_(1);
}

double sum_of(const at::Tensor& tensor) { return tensor.sum().item<double>(); }

TEST_P(ForkTest, Processes) {
  const at::Tensor shared = share_memory_(filled(0));
  auto processes = std::make_unique<convoy::Processes>(convoy::spawn<wait_for_word>(1, shared));
  in_child([&] {
    const auto refused = [](const std::function<void()>& use) {
      expect_error(ErrorKind::kUnsupported, "forked", use);
    };
    refused([&] { (void)processes->join(soon()); });
    refused([&] { (void)processes->failures(); });
    refused([&] { processes->restart(0); });
    refused([&] { (void)processes->restart_failed(); });
    refused([&] { processes->terminate(std::chrono::milliseconds(0)); });
    refused([&] { (void)processes->channel(0); });
    processes.reset();  // kills nobody
    const at::Tensor own = filled(1);
    auto mine = convoy::spawn<wait_for_word>(1, own);
    mine.channel(0).send(Message{1});
    EXPECT_TRUE(mine.join(soon()));
    EXPECT_TRUE(is_filled(own, 2));
  });
  processes->channel(0).send(Message{1});
  EXPECT_TRUE(processes->join(soon()));
  EXPECT_TRUE(is_filled(shared, 1));
  processes.reset();
}

TEST_P(ForkTest, ProcessPool) {
  convoy::ProcessPool pool(1);
  const std::vector<at::Tensor> items = {filled(1), filled(2)};
  const auto expected =
      std::vector<double>{static_cast<double>(GetParam()), 2.0 * static_cast<double>(GetParam())};
  EXPECT_EQ(pool.map<sum_of>(items), expected);
  in_child([&] {
    expect_error(ErrorKind::kUnsupported, "forked", [&] { (void)pool.map<sum_of>(items); });
    convoy::ProcessPool own(1);
    EXPECT_EQ(own.map<sum_of>(items), expected);
  });
  EXPECT_EQ(pool.map<sum_of>(items), expected);
  EXPECT_EQ(pool.replaced(), 0U);
}

}  // namespace
}  // namespace convoy::share::test
