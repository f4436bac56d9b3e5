#include "fault/scenarios.h"

#include <array>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/concat.h"
#include "base/error.h"
#include "coll/group.h"
#include "os/file.h"
#include "os/socket.h"
#include "share/depot.h"
#include "share/link.h"
#include "share/queue_memory.h"
#include "share/version_board.h"
#include "store/server.h"
#include "transport/shm/fabric.h"

namespace convoy::fault {
namespace {

using coll::DataType;
using Floats = std::vector<float>;

// --- Groups -----------------------------------------------------------------------------------

constexpr std::size_t kSmall = 5;
constexpr std::size_t kLarge = 300'000;

float value_of(int rank, std::size_t i) {
  return static_cast<float>(rank + 1) * static_cast<float>(i % 1000);
}

void fill(float* data, std::size_t count, int rank) {
  for (std::size_t i = 0; i < count; ++i) data[i] = value_of(rank, i);
}

void check_sum(const float* data, std::size_t count, const char* what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (data[i] != value_of(0, i) + value_of(1, i)) wrong(concat(what, ": element ", i));
  }
}

void check_values(const float* data, std::size_t count, int rank, const char* what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (data[i] != value_of(rank, i)) wrong(concat(what, ": element ", i));
  }
}

void sum_up(coll::Group& group, std::size_t count, const char* what) {
  Floats data(count);
  fill(data.data(), count, group.rank());
  group.all_reduce(data.data(), data.data(), count, DataType::kF32);
  check_sum(data.data(), count, what);
}

void exchange_messages(coll::Group& group, std::size_t count, const char* what) {
  const int other = 1 - group.rank();
  Floats mine(count);
  Floats theirs(count);
  fill(mine.data(), count, group.rank());
  auto sent = group.send_async(mine.data(), count, DataType::kF32, other);
  group.recv(theirs.data(), count, DataType::kF32, other);
  sent.wait();
  check_values(theirs.data(), count, other, what);
}

void run_group(const Turn& turn) {
  coll::GroupOptions options;
  options.timeout = turn.deadline.remaining();
  const auto group = coll::Group::create(turn.store, turn.rank, 2, options);
  sum_up(*group, kSmall, "a small all-reduce");
  sum_up(*group, kLarge, "a large all-reduce");
  {
    const auto block = group->allocate(kLarge * sizeof(float));
    auto* const data = reinterpret_cast<float*>(block.data());
    fill(data, kLarge, turn.rank);
    group->all_reduce(data, data, kLarge, DataType::kF32);
    check_sum(data, kLarge, "an all-reduce in group memory");
    group->barrier();
  }
  Floats all(2 * kLarge);
  fill(all.data() + static_cast<std::size_t>(turn.rank) * kLarge, kLarge, turn.rank);
  group->all_gather(all.data() + static_cast<std::size_t>(turn.rank) * kLarge, all.data(), kLarge,
                    DataType::kF32);
  for (int rank = 0; rank < 2; ++rank) {
    check_values(all.data() + static_cast<std::size_t>(rank) * kLarge, kLarge, rank,
                 "a large all-gather");
  }
  Floats later(kLarge);
  fill(later.data(), kLarge, turn.rank);
  group->start(group->calls().all_reduce(later.data(), later.data(), kLarge, DataType::kF32))
      .wait();
  check_sum(later.data(), kLarge, "an asynchronous all-reduce");
  exchange_messages(*group, kSmall, "a small message");
  exchange_messages(*group, kLarge, "a large message");
  group->barrier();
}

std::string held_by_groups() {
  shm::Fabric* const fabric = shm::Fabric::existing();
  if (!fabric) return "";
  fabric->trim();
  const auto stats = fabric->stats();
  if (stats.used_bytes == 0) return "";
  return concat(stats.used_bytes, " bytes of group memory, ", stats.quarantined_blocks,
                " blocks of it in quarantine\n");
}

// --- The store --------------------------------------------------------------------------------

// A server in this process and a client in each rank.
void run_store(const Turn& turn) {
  std::optional<TempFolder> folder;
  std::optional<StoreServer> server;
  if (turn.rank == 0) {
    folder.emplace("errno");
    server.emplace();
    turn.store->set("path", server->listen(folder->path(), "s"));
  }
  {
    const auto store = connect_store(turn.store->get("path", turn.deadline), turn.deadline);
    const std::string mine(20'000, static_cast<char>('a' + turn.rank));
    store->set(concat("value/", turn.rank), mine);
    const std::string theirs = store->get(concat("value/", 1 - turn.rank), turn.deadline);
    if (theirs != std::string(20'000, static_cast<char>('b' - turn.rank))) wrong("a value");
    store->add("sum", turn.rank + 1);
    store->barrier("all", 2, turn.deadline);
    if (store->get("sum", turn.deadline) != "3") wrong("a sum");
  }
  turn.store->set(concat("done/", turn.rank), "");
  if (turn.rank == 0) turn.store->get("done/1", turn.deadline);
}

// --- Sharing ----------------------------------------------------------------------------------

// The two ends of a connection.
Socket meet(const Turn& turn) {
  if (turn.rank == 1) {
    return Socket::connect(turn.store->get("socket", turn.deadline), turn.deadline);
  }
  const TempFolder folder("errno");
  const Listener listener(folder.path(), "s");
  turn.store->set("socket", listener.path());
  return listener.accept(turn.deadline);
}

struct Letter {
  std::uint32_t region = 0;
  std::uint32_t generation = 0;
  std::uint64_t entry = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::array<char, 200> path{};  // of memory with a name
};

std::span<const std::byte> bytes_of(const Letter& letter) {
  return std::as_bytes(std::span(&letter, 1));
}

void fill_bytes(std::byte* data, std::size_t count, unsigned salt) {
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::byte>(salt + 31 * i);
}

void check_bytes(const std::byte* data, std::size_t count, unsigned salt, const char* what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (data[i] != static_cast<std::byte>(salt + 31 * i)) wrong(concat(what, ": byte ", i));
  }
}

constexpr std::array<std::size_t, 3> kBlocks = {100, 100'000, 6'000'000};

// The lease must be kept until the other side has it.
share::Lease send_block(share::Link& link, std::size_t bytes, unsigned salt, bool named,
                        const Deadline& deadline) {
  auto& depot = share::Depot::instance();
  share::Lease lease = named ? depot.allocate_named(bytes) : depot.allocate(bytes);
  fill_bytes(lease.data(), bytes, salt);
  const auto& ref = lease.ref();
  Letter letter{.region = 0,
                .generation = ref.generation,
                .entry = ref.entry,
                .offset = ref.offset,
                .bytes = bytes};
  if (named) {
    ref.book->path().copy(letter.path.data(), letter.path.size() - 1);
  } else {
    letter.region = link.introduce(ref.book, deadline);
  }
  link.send(bytes_of(letter), deadline);
  return lease;
}

share::Lease receive_block(share::Link& link, unsigned salt, const Deadline& deadline) {
  const auto bytes = link.receive(deadline);
  Letter letter;
  if (bytes.size() != sizeof letter) wrong("the length of a letter");
  std::memcpy(&letter, bytes.data(), sizeof letter);
  auto& depot = share::Depot::instance();
  const auto region =
      letter.path[0] != '\0' ? depot.open_named(letter.path.data()) : link.region(letter.region);
  share::Lease lease = depot.open({.book = region,
                                   .entry = letter.entry,
                                   .generation = letter.generation,
                                   .memory = region,
                                   .offset = letter.offset,
                                   .bytes = letter.bytes});
  link.finish();
  check_bytes(lease.data(), letter.bytes, salt, "a shared block");
  return lease;
}

void share_blocks(const Turn& turn, bool named) {
  share::Link link(meet(turn));
  std::vector<share::Lease> held;
  for (unsigned i = 0; i < kBlocks.size(); ++i) {
    if (turn.rank == 0) {
      held.push_back(send_block(link, kBlocks[i], i, named, turn.deadline));
    } else {
      held.push_back(receive_block(link, i, turn.deadline));
    }
  }
  // Until the other side has all; it does not change while it is held.
  if (turn.rank == 0) {
    link.receive(turn.deadline);
  } else {
    for (unsigned i = 0; i < kBlocks.size(); ++i) {
      check_bytes(held[i].data(), kBlocks[i], i, "a held block");
    }
    link.send(std::as_bytes(std::span("done", 4)), turn.deadline);
    // It says no more: the end of the connection, which is not to be awaited for longer.
    try {
      link.receive(turn.deadline);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kPeerLost) throw;
    }
  }
}

void run_share(const Turn& turn) { share_blocks(turn, false); }
void run_share_files(const Turn& turn) { share_blocks(turn, true); }

std::string held_by_sharing() {
  share::Depot* const depot = share::Depot::existing();
  if (!depot) return "";
  const auto stats = depot->stats();
  if (stats.blocks == 0 && stats.foreign == 0) return "";
  return concat(stats.blocks, " blocks of the pool, ", stats.foreign, " of others\n");
}

// --- Queues and published versions ------------------------------------------------------------

// Rank 0 makes the memory, rank 1 gets it.
template <class Make>
Segment pass_memory(const Turn& turn, Socket& socket, Make make) {
  std::uint64_t size = 0;
  const auto bytes = std::as_writable_bytes(std::span(&size, 1));
  if (turn.rank == 0) {
    Segment segment = make();
    size = segment.size();
    const int descriptor = segment.fd();
    socket.send(bytes, turn.deadline, std::span(&descriptor, 1));
    return segment;
  }
  std::vector<UniqueFd> descriptors;
  socket.receive(bytes, turn.deadline, &descriptors);
  if (descriptors.size() != 1) fail(ErrorKind::kResource, "the descriptor did not come");
  return Segment::adopt(std::move(descriptors[0]), size);
}

// Leaves at its end.
class Member {
 public:
  explicit Member(share::QueueMemory& queue) : queue_(queue) {}
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  ~Member() {
    try {
      queue_.leave();
    } catch (const Error&) {  // what is left of it is found by others
    }
  }

 private:
  share::QueueMemory& queue_;
};

constexpr unsigned kItems = 50;

std::string item_of(unsigned i) {
  return std::string(1 + i % 900, static_cast<char>('a' + i % 26));
}

void use_queue(const Turn& turn, share::QueueMemory& queue) {
  const Member member(queue);
  for (unsigned i = 0; i < kItems;) {
    if (turn.rank == 0) {
      const std::string item = item_of(i);
      const std::string_view view = item;
      share::QueueMemory::Hands hands(queue, 1);
      if (queue.put({&view, 1}, queue.epoch(), hands, {}, turn.deadline).items == 0) {
        fail(ErrorKind::kTimeout, "no room");
      }
      ++i;
      continue;
    }
    const auto items = queue.take(4, turn.deadline);
    if (items.empty()) fail(ErrorKind::kTimeout, "nothing came");
    for (const auto& item : items) {
      if (item.bytes != item_of(i)) wrong(concat("item ", i));
      ++i;
      queue.finish(item);
    }
  }
  turn.store->set(concat("done/", turn.rank), "");
  turn.store->get(concat("done/", 1 - turn.rank), turn.deadline);
}

void run_queue(const Turn& turn) {
  Socket socket = meet(turn);
  const auto no_settle = [](std::string_view, std::atomic<std::uint32_t>&) {};
  if (turn.rank == 0) {
    share::QueueMemory queue({.capacity = 8, .item_bytes = 1000}, no_settle);
    pass_memory(turn, socket, [&] {
      return Segment::adopt(duplicate(queue.segment().fd()), queue.segment().size());
    });
    use_queue(turn, queue);
  } else {
    share::QueueMemory queue(pass_memory(turn, socket, [] { return Segment(); }), no_settle);
    use_queue(turn, queue);
  }
}

constexpr std::size_t kBoardBytes = 50'000;
constexpr std::uint64_t kVersions = 40;

void publish_versions(const Turn& turn, const share::VersionBoard& board) {
  for (std::uint64_t version = 1; version <= kVersions; ++version) {
    const std::size_t buffer = board.begin(turn.deadline);
    fill_bytes(board.data(buffer), kBoardBytes, static_cast<unsigned>(version));
    board.publish(buffer);
  }
}

void read_versions(const Turn& turn, const share::VersionBoard& board) {
  const std::size_t slot = board.enter();
  std::uint64_t seen = 0;
  try {
    while (seen < kVersions) {
      if (!board.wait_newer(seen, turn.deadline)) fail(ErrorKind::kTimeout, "no newer version");
      const auto pinned = board.pin(slot);
      if (!pinned || pinned->version <= seen) wrong("the version that is said to be there");
      check_bytes(board.data(pinned->buffer), kBoardBytes, static_cast<unsigned>(pinned->version),
                  "a published version");
      seen = pinned->version;
      board.unpin(slot, pinned->buffer);
    }
  } catch (...) {
    board.leave(slot);
    throw;
  }
  board.leave(slot);
}

void run_published(const Turn& turn) {
  Socket socket = meet(turn);
  constexpr std::size_t kBuffers = 3;
  std::optional<share::VersionBoard> board;
  const Segment memory = pass_memory(turn, socket, [&] {
    Segment made =
        Segment::create(share::VersionBoard::bytes_for(kBuffers, kBoardBytes, 6), "board");
    board = share::VersionBoard::create(made.bytes(), kBuffers, kBoardBytes, "layout");
    return made;
  });
  if (turn.rank == 0) {
    publish_versions(turn, *board);
  } else {
    read_versions(turn, share::VersionBoard::open(memory.bytes()));
  }
  turn.store->set(concat("done/", turn.rank), "");
  turn.store->get(concat("done/", 1 - turn.rank), turn.deadline);
}

}  // namespace

std::vector<Scenario> core_scenarios() {
  std::vector<Scenario> all = {{"Group", &run_group, &held_by_groups},
                               {"Store", &run_store},
                               {"Share", &run_share, &held_by_sharing}};
  for (int victim = 0; victim < 2; ++victim) {
    all.push_back({"Group", &run_group, &held_by_groups, true, victim});
    all.push_back({"Share", &run_share, &held_by_sharing, true, victim});
    all.push_back({"ShareFiles", &run_share_files, &held_by_sharing, true, victim});
    all.push_back({"Queue", &run_queue, nullptr, true, victim});
    all.push_back({"Published", &run_published, nullptr, true, victim});
  }
  return all;
}

void expect_no_findings(const Scenario& scenario, Extent extent) {
  const Findings findings = examine(scenario, extent);
  EXPECT_GT(findings.failed_calls, 0) << "no call was ever failed: is the library in front?";
  std::string text;
  for (const auto& finding : findings.texts) text += finding + "\n";
  EXPECT_TRUE(findings.texts.empty())
      << findings.texts.size() << " findings in " << findings.runs << " runs:\n"
      << text;
  std::printf("%d runs, %d with a failed call, %d with an error\n", findings.runs,
              findings.failed_calls, findings.errors);
}

}  // namespace convoy::fault
