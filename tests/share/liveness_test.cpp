// A live process is never taken for a dead one: with no descriptors left, in another pid namespace,
// and when its main thread has ended. Without torch, so that processes can be forked.
#include <sys/syscall.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <thread>
#include <vector>

#include "os/file.h"
#include "os/process.h"
#include "share/depot.h"
#include "share/forked.h"
#include "share/link.h"
#include "share/queue_memory.h"
#include "share/slot_ring.h"
#include "share/sync_memory.h"
#include "share/version_board.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "transport/shm/fabric.h"

namespace convoy::share::test {
namespace {

using convoy::test::at_once;
using convoy::test::error_of;
using convoy::test::expect_error;
using convoy::test::soon;

constexpr std::size_t kBytes = std::size_t{1} << 16;

bool all_are(const std::byte* data, std::size_t bytes, int value) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (data[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

// A block on its way over a link.
struct BlockOnWire {
  std::uint64_t entry = 0;
  std::uint64_t generation = 0;
  std::uint64_t region = 0;
};

void send_block(Link& link, const Lease& lease) {
  const BlockRef& ref = lease.ref();
  const BlockOnWire wire{ref.entry, ref.generation, link.introduce(ref.book, soon())};
  link.send(std::as_bytes(std::span(&wire, 1)), soon());
}

Lease receive_block(Link& link) {
  const auto bytes = link.receive(soon());
  BlockOnWire wire;
  std::memcpy(&wire, bytes.data(), sizeof wire);
  const auto region = link.region(static_cast<std::uint32_t>(wire.region));
  Lease lease = Depot::instance().open({.book = region,
                                        .entry = wire.entry,
                                        .generation = static_cast<std::uint32_t>(wire.generation),
                                        .memory = region,
                                        .offset = wire.entry,
                                        .bytes = kBytes});
  link.finish();
  return lease;
}

// Takes all memory that there is without a new descriptor, and writes to it.
std::vector<Lease> overwrite_all_free_memory() {
  std::vector<Lease> taken;
  const NoDescriptors none;
  for (;;) {
    try {
      taken.push_back(Depot::instance().allocate(kBytes));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
      return taken;
    }
    std::memset(taken.back().data(), 7, kBytes);
  }
}

// In the main thread of a child: goes on in another thread, and ends the main one.
template <class Rest>
[[noreturn]] void go_on_without_main_thread(const Rest& rest) {
  std::thread([rest] { ::_exit(rest() ? 0 : 1); }).detach();
  ::syscall(SYS_exit, 0);  // of this thread alone
  std::abort();
}

void wait_for_zombie(pid_t pid) {
  for (const auto limit = soon(); !limit.expired(); std::this_thread::yield()) {
    const auto text = read_file(concat("/proc/", pid, "/stat")).value_or("");
    if (text.find(") Z ") != std::string::npos) return;
  }
  FAIL() << "pid " << pid << " has no zombie as its main thread";
}

// A peer that holds a tensor's block while this process needs memory.
void keep_block_of_live_peer(bool without_main_thread) {
  Forked other([&](Side& side) {
    auto link = std::make_shared<Link>(side.socket());
    auto lease = std::make_shared<Lease>(receive_block(*link));
    const auto rest = [&side, link, lease] {
      side.tell();
      return side.await() && all_are(lease->data(), kBytes, 1);
    };
    if (without_main_thread) go_on_without_main_thread(rest);
    return rest();
  });
  {
    Link link(other.side().socket());
    Lease lease = Depot::instance().allocate(kBytes);
    std::memset(lease.data(), 1, kBytes);
    send_block(link, lease);
    ASSERT_TRUE(other.side().await());
    if (without_main_thread) wait_for_zombie(other.pid());
    lease.reset();
    if (without_main_thread) Depot::instance().stats();  // with descriptors, too
    const auto taken = overwrite_all_free_memory();
    EXPECT_FALSE(taken.empty());
    other.side().tell();
    EXPECT_TRUE(other.join()) << "the peer's memory was overwritten";
  }
  // It has ended: now its memory comes back.
  EXPECT_EQ(Depot::instance().stats().blocks, 0U);
}

TEST(LivenessTest, BlockOfLivePeerStaysWithoutDescriptors) { keep_block_of_live_peer(false); }
TEST(LivenessTest, BlockOfPeerWithoutMainThreadStays) { keep_block_of_live_peer(true); }

// More than can use it at a time. Nobody clears up after them but who comes next.
constexpr int kManyProcesses = kMostHolders + 44;

TEST(LivenessTest, MemoryOfADeadOwnerServesAnyNumberOfProcesses) {
  Forked owner([](Side& side) {
    Link link(side.socket());
    Lease lease = Depot::instance().allocate(kBytes);
    std::memset(lease.data(), 1, kBytes);
    send_block(link, lease);
    return side.await();
  });
  Link link(owner.side().socket());
  const Lease lease = receive_block(link);
  owner.side().tell();
  ASSERT_TRUE(owner.join());
  const Book& book = lease.ref().book->book();
  for (int i = 0; i < kManyProcesses; ++i) {
    Forked user([&](Side&) {
      for (int slot = 0; slot < kMostHolders; ++slot) {
        if (book.slot(slot) == own_process_word()) return all_are(lease.data(), kBytes, 1);
      }
      return false;
    });
    ASSERT_TRUE(user.join()) << "process " << i;
  }
}

TEST(LivenessTest, AFileServesAnyNumberOfProcesses) {
  const TempFolder folder("share");
  Forked maker([&](Side&) {
    ::setenv("CONVOY_SHARE_FOLDER", folder.path().c_str(), 1);
    const Lease lease = Depot::instance().allocate_named(kBytes);
    std::memset(lease.data(), 1, kBytes);
    const BlockRef& ref = lease.ref();
    for (int i = 0; i < kManyProcesses; ++i) {
      Forked user([&](Side&) {
        const auto region = Depot::instance().open_named(ref.book->path());
        const Lease mine = Depot::instance().open({.book = region,
                                                   .entry = ref.entry,
                                                   .generation = ref.generation,
                                                   .memory = region,
                                                   .offset = ref.entry,
                                                   .bytes = kBytes});
        if (all_are(mine.data(), kBytes, 1)) ::_exit(0);  // with all that it holds
        return false;
      });
      if (!user.join()) return false;
    }
    return true;
  });
  EXPECT_TRUE(maker.join());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

struct SlotMemory {
  SlotMemory()
      : memory(SlotRing::bytes_for(1, 64, 6)),
        ring(SlotRing::create(memory.span(), 1, 64, "layout")) {}
  CommonMemory memory;
  SlotRing ring;
};

TEST(LivenessTest, SlotOfLiveFillerStaysWithoutDescriptors) {
  const SlotMemory slots;
  (void)own_process_word();  // known from here on: reading it takes a descriptor
  Forked other([&](Side& side) {
    const bool got = slots.ring.try_fill().has_value();
    side.tell();
    return side.await() && got;
  });
  ASSERT_TRUE(other.side().await());
  {
    const NoDescriptors none;
    EXPECT_EQ(slots.ring.reclaim(), 0U);
    EXPECT_FALSE(slots.ring.try_fill());
  }
  other.side().tell();
  EXPECT_TRUE(other.join());
  EXPECT_EQ(slots.ring.reclaim(), 1U);
}

TEST(LivenessTest, SlotOfFillerWithoutMainThreadStays) {
  const SlotMemory slots;
  Forked other([&](Side& side) -> bool {
    EXPECT_TRUE(slots.ring.try_fill());
    go_on_without_main_thread([&side] {
      side.tell();
      return side.await();
    });
  });
  ASSERT_TRUE(other.side().await());
  wait_for_zombie(other.pid());
  EXPECT_EQ(slots.ring.reclaim(), 0U);
  other.side().tell();
  EXPECT_TRUE(other.join());
  EXPECT_EQ(slots.ring.reclaim(), 1U);
}

TEST(LivenessTest, SnapshotOfLiveReaderStaysWithoutDescriptors) {
  const CommonMemory memory(VersionBoard::bytes_for(2, 64, 6));
  const auto board = VersionBoard::create(memory.span(), 2, 64, "layout");
  const auto publish = [&](int value) {
    const std::size_t buffer = board.begin(at_once());
    std::memset(board.data(buffer), value, 64);
    return board.publish(buffer);
  };
  publish(1);
  Forked other([&](Side& side) {
    const std::size_t slot = board.enter();
    const auto pinned = board.pin(slot);
    side.tell();
    return side.await() && all_are(board.data(pinned->buffer), 64, 1);
  });
  ASSERT_TRUE(other.side().await());
  publish(2);
  {
    const NoDescriptors none;
    expect_error(ErrorKind::kResource, "held by readers", [&] { publish(3); });
  }
  other.side().tell();
  EXPECT_TRUE(other.join()) << "the reader's version was overwritten";
  EXPECT_EQ(publish(4), 3U);
}

// A slot that a live process reads from must not be given to another item.
TEST(LivenessTest, ItemOfLiveTakerStaysWithoutDescriptors) {
  const QueueMemory::Settle settle = [](std::string_view, std::atomic<std::uint32_t>&) {};
  QueueMemory queue({.capacity = 4, .item_bytes = 64}, settle);
  {
    QueueMemory::Hands hands(queue, 1);
    const std::string_view item = "item";
    ASSERT_EQ(queue.put({&item, 1}, queue.epoch(), hands, {}, at_once()).items, 1U);
  }
  Forked other([&](Side& side) {
    const auto items = queue.take(1, at_once());
    side.tell();
    const bool good = items.size() == 1 && side.await();
    if (good) queue.finish(items[0]);
    return good && queue.leave({}, {});
  });
  ASSERT_TRUE(other.side().await());
  {
    const NoDescriptors none;
    queue.look_for_dead();
    EXPECT_EQ(queue.lost().items, 0U) << queue.lost().latest;
  }
  other.side().tell();
  EXPECT_TRUE(other.join());
  EXPECT_TRUE(queue.leave({}, {}));
}

TEST(LivenessTest, BarrierDoesNotBreakWithoutDescriptors) {
  const CommonMemory memory(sizeof(BarrierMemory));
  auto* const barrier = new (memory.span().data()) BarrierMemory;
  barrier->init(2);
  barrier->join();
  Forked other([&](Side& side) {
    barrier->join();
    side.tell();
    return side.await();
  });
  ASSERT_TRUE(other.side().await());
  {
    const NoDescriptors none;
    expect_error(ErrorKind::kTimeout, "1 of 2",
                 [&] { (void)barrier->wait(Deadline::after(std::chrono::milliseconds(150))); });
  }
  other.end();
  expect_error(ErrorKind::kPeerLost, "had it and has ended", [&] { (void)barrier->wait(soon()); });
}

// Files of strategy kFile: those of a live process are not removed.
TEST(LivenessTest, FileOfLiveUserStaysWithoutDescriptors) {
  const TempFolder folder("share");
  ::setenv("CONVOY_SHARE_FOLDER", folder.path().c_str(), 1);
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  Forked other([&](Side& side) {
    // A depot of its own.
    std::array<char, 256> path{};
    if (::read(pipe[0], path.data(), path.size()) <= 0) return false;
    const auto region = Depot::instance().open_named(path.data());
    const std::uint64_t first = region->book().head().first;
    const Lease lease = Depot::instance().open({region, first, 1, region, first, kBytes});
    side.tell();
    return side.await() && std::filesystem::exists(path.data());
  });
  {
    Lease lease = Depot::instance().allocate_named(kBytes);
    const std::string path = lease.ref().book->path();
    ASSERT_GT(::write(pipe[1], path.c_str(), path.size() + 1), 0);
    ASSERT_TRUE(other.side().await());
    const NoDescriptors none;
    lease.reset();
  }
  other.side().tell();
  EXPECT_TRUE(other.join()) << "the file was removed while a process used it";
  ::close(pipe[0]);
  ::close(pipe[1]);
  ::unsetenv("CONVOY_SHARE_FOLDER");
}

// What a process is called must not depend on what it could open when it was asked first.
TEST(LivenessTest, ProcessHasNoWrongNameWithoutDescriptors) {
  Forked other([](Side&) {
    std::optional<Error> error;
    {
      const NoDescriptors none;
      error = error_of([] { (void)own_process_word(); });
    }
    // It may have been asked for when this process was forked.
    return (!error || error->kind() == ErrorKind::kResource) &&
           own_process_word() == process_word(::getpid(), process_start_time(::getpid()));
  });
  EXPECT_TRUE(other.join());
}

class NamespaceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Forked::can_have_pid_namespace()) GTEST_SKIP() << "no pid namespaces for this user";
  }
  // What another process throws in its own namespace.
  static bool refuses(const std::function<void()>& function) {
    const auto error = error_of(function);
    if (!error) return false;
    return error->kind() == ErrorKind::kUnsupported &&
           std::string(error->what()).find("pid namespace") != std::string::npos;
  }
  static bool refused_there(const std::function<void()>& function) {
    bool all = true;
    for (const auto where : {Forked::Where::kNewPidNamespace, Forked::Where::kOwnProc}) {
      Forked other([&](Side&) { return refuses(function); }, where);
      all = other.join() && all;
    }
    return all;
  }
};

TEST_F(NamespaceTest, SlotsAreRefused) {
  const SlotMemory slots;
  EXPECT_TRUE(refused_there([&] { SlotRing::open(slots.memory.span()); }));
  EXPECT_TRUE(refused_there([&] { (void)slots.ring.try_fill(); }));
}

TEST_F(NamespaceTest, NobodyIsJudgedFromAnotherNamespace) {
  const SlotMemory slots;
  ASSERT_TRUE(slots.ring.try_fill());
  for (const auto where : {Forked::Where::kNewPidNamespace, Forked::Where::kOwnProc}) {
    Forked other([&](Side&) { return slots.ring.reclaim() == 0; }, where);
    EXPECT_TRUE(other.join());
  }
}

TEST_F(NamespaceTest, PublishedIsRefused) {
  const CommonMemory memory(VersionBoard::bytes_for(2, 64, 6));
  const auto board = VersionBoard::create(memory.span(), 2, 64, "layout");
  EXPECT_TRUE(refused_there([&] { VersionBoard::open(memory.span()); }));
  EXPECT_TRUE(refused_there([&] { (void)board.enter(); }));
  EXPECT_TRUE(refused_there([&] { (void)board.begin(at_once()); }));
}

TEST_F(NamespaceTest, QueueIsRefused) {
  const QueueMemory::Settle settle = [](std::string_view, std::atomic<std::uint32_t>&) {};
  QueueMemory queue({.capacity = 4, .item_bytes = 64}, settle);
  EXPECT_TRUE(refused_there([&] {
    const QueueMemory same(Segment::adopt(duplicate(queue.segment().fd()), queue.segment().size()),
                           settle);
  }));
  EXPECT_TRUE(refused_there([&] { (void)queue.take(1, at_once()); }));
  EXPECT_TRUE(queue.leave({}, {}));
}

TEST_F(NamespaceTest, BarrierIsRefused) {
  const CommonMemory memory(sizeof(BarrierMemory));
  auto* const barrier = new (memory.span().data()) BarrierMemory;
  barrier->init(2);
  barrier->join();
  EXPECT_TRUE(refused_there([&] { barrier->join(); }));
}

TEST_F(NamespaceTest, MemoryIsRefused) {
  const auto region = Region::create_pool(std::size_t{1} << 20);
  EXPECT_TRUE(refused_there(
      [&] { (void)Region::adopt(duplicate(region->fd()), region->bytes(), Region::Kind::kPool); }));
}

// In a process of its own: the fabric stays as long as its process does.
TEST(FabricDomainTest, GroupsAreRefused) {
  Forked other([](Side&) {
    auto info = shm::ProcessInfo::decode(shm::Fabric::instance().self().encode());
    EXPECT_EQ(info.domain, process_domain());
    info.id = Id::random();
    info.domain += std::uint64_t{1} << 32;
    expect_error(ErrorKind::kUnsupported, "another pid namespace",
                 [&] { (void)shm::Fabric::instance().connect(info, soon()); });
    return true;
  });
  EXPECT_TRUE(other.join());
}

// Both ends say so, whoever speaks first.
TEST_F(NamespaceTest, LinkIsRefused) {
  Forked other(
      [&](Side& side) {
        Link link(side.socket());
        const std::byte one{1};
        const auto error = error_of([&] {
          link.send({&one, 1}, soon());
          (void)link.receive(soon());
        });
        side.tell();
        return error && std::string(error->what()).find("pid namespace") != std::string::npos &&
               side.await();
      },
      Forked::Where::kNewPidNamespace);
  Link link(other.side().socket());
  expect_error(ErrorKind::kUnsupported, "pid namespace", [&] {
    const std::byte one{1};
    link.send({&one, 1}, soon());
    for (;;) (void)link.receive(soon());
  });
  ASSERT_TRUE(other.side().await());
  other.side().tell();
  EXPECT_TRUE(other.join());
}

}  // namespace
}  // namespace convoy::share::test
