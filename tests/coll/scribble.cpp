#include "scribble.h"

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "base/concat.h"
#include "coll/control.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3;
// Of every call, and of making the group. A call that waits for what was overwritten ends then.
constexpr auto kPatience = 2s;
constexpr std::size_t kBig = std::size_t{64} << 10;  // elements

enum class What { kRandom, kZeros, kOnes, kSmall, kFlip };

// Where one seed writes.
enum class Area { kGroup, kSlots, kHeads, kChannels, kData, kAnywhere, kCount };

struct Part {
  std::size_t begin;
  std::size_t bytes;
};

Part find(Area area, const Layout& layout, std::byte* base, std::size_t all, std::size_t rank) {
  const auto offset = [&](const void* place) {
    return static_cast<std::size_t>(static_cast<const std::byte*>(place) - base);
  };
  const auto& head = layout.rank(base, static_cast<int>(rank));
  const std::size_t channels = offset(&layout.channel(base, 0, 0));
  switch (area) {
    case Area::kGroup: return {0, offset(&layout.group(base).cause) + 16};
    case Area::kSlots: return {offset(&head.slots), sizeof head.slots};
    case Area::kHeads:
      return {offset(&head.step), sizeof head - offset(&head.step) + offset(&head)};
    case Area::kChannels: return {channels, kRanks * kRanks * sizeof(Channel)};
    case Area::kData: return {layout.cleared_bytes(), all - layout.cleared_bytes()};
    default: return {0, all};
  }
}

void overwrite(std::span<std::byte> memory, What what, std::mt19937& random) {
  for (std::size_t i = 0; i < memory.size(); ++i) {
    auto& byte = reinterpret_cast<volatile std::uint8_t&>(memory[i]);
    switch (what) {
      case What::kRandom: byte = static_cast<std::uint8_t>(random()); break;
      case What::kZeros: byte = 0; break;
      case What::kOnes: byte = 0xff; break;
      case What::kSmall: byte = i % 8 == 0 ? static_cast<std::uint8_t>(random() % 40) : 0; break;
      case What::kFlip: byte = static_cast<std::uint8_t>(byte ^ (1U << random() % 8)); break;
    }
  }
}

// Until it is told to stop: a few words, now and then. So most operations get somewhere.
void keep_writing(std::span<std::byte> control, int seed, const std::atomic<bool>& stop) {
  std::mt19937 random(static_cast<unsigned>(seed * 31 + 1));
  const Layout layout(kRanks);
  const auto area = static_cast<Area>(seed % static_cast<int>(Area::kCount));
  while (!stop.load()) {
    const Part part = find(area, layout, control.data(), control.size(), random() % kRanks);
    constexpr std::array<std::size_t, 4> kLengths = {1, 8, 64, 2048};
    const std::size_t unit = random() % 4 == 0 ? 1 : 8;
    const std::size_t begin = part.begin + random() % part.bytes / unit * unit;
    const std::size_t bytes = std::min(kLengths[random() % 4], part.begin + part.bytes - begin);
    overwrite(control.subspan(begin, bytes), static_cast<What>(random() % 5), random);
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 3000);
    while (std::chrono::steady_clock::now() < until && !stop.load()) std::this_thread::yield();
  }
}

struct Memory {
  explicit Memory(Group& group)
      : block(group.allocate(4 * kBig)), data(kBig), more(kRanks * kBig) {}

  float* shared() { return reinterpret_cast<float*>(block.data()); }

  shm::Block block;
  std::vector<float> data;
  std::vector<float> more;
};

void one_operation(Group& group, Memory& memory, std::size_t which, int step) {
  const int rank = group.rank();
  float* const data = memory.data.data();
  const auto all_to_all_v = [&](std::size_t count) {
    std::vector<Piece> in, out;
    for (std::size_t r = 0; r < kRanks; ++r) {
      in.push_back({memory.data.data() + r * count, count, {}});
      out.push_back({memory.more.data() + r * count, count, {}});
    }
    group.run(group.calls().all_to_all_v(in, out, DataType::kF32));
  };
  const int next = (rank + 1) % kRanks;
  const int before = (rank + kRanks - 1) % kRanks;
  const auto exchange = [&](float* from, std::size_t count) {
    const std::array<Message, 2> both = {
        Message{Message::Kind::kSend, from, count, DataType::kF32, next, 7},
        Message{Message::Kind::kReceive, memory.more.data(), count, DataType::kF32, before, 7}};
    group.batch(both);
  };
  switch (which) {
    case 0: return group.barrier();
    case 1: return group.all_reduce(data, data, 4, DataType::kF32);
    case 2: return group.all_reduce(data, data, 900, DataType::kF32);
    case 3: return group.all_reduce(memory.shared(), memory.shared(), kBig, DataType::kF32);
    case 4: return group.all_reduce(data, data, kBig, DataType::kF32);
    case 5: return group.broadcast(data, data, kBig, DataType::kF32, step % kRanks);
    case 6: return group.broadcast(memory.shared(), memory.shared(), kBig, DataType::kF32, 1);
    case 7: return group.all_gather(data, memory.more.data(), kBig, DataType::kF32);
    case 8: return all_to_all_v(100);
    case 9: return all_to_all_v(kBig / kRanks);
    case 10: return exchange(data, 4);
    case 11: return exchange(data, 500);
    case 12: return exchange(data, kBig);
    case 13: return exchange(memory.shared(), kBig);
    case 14: group.start(group.calls().all_reduce(data, data, kBig, DataType::kF32)).wait(); return;
    default: {
      auto sent = group.send_async(data, kBig, DataType::kF32, next);
      auto received = group.recv_async(memory.more.data(), kBig, DataType::kF32, before);
      received.wait();
      sent.wait();
    }
  }
}

void run_rank(const Rank& r, int seed, int rank) {
  const auto store = with_prefix(r.store(), concat("seed/", seed));
  const auto group =
      Group::create(store, rank, kRanks, {.name = "scribbled", .timeout = kPatience});
  Memory memory(*group);
  const auto mesh = mesh_of(*group->medium());
  std::atomic<bool> stop = false;
  std::optional<std::jthread> writer;
  store->barrier("all", kRanks, r.deadline());
  if (rank == 2) writer.emplace([&] { keep_writing(mesh->control(), seed, stop); });
  std::mt19937 order(static_cast<unsigned>(seed));  // the same on all ranks
  for (int step = 0, failed = 0; step < 400 && failed < 3; ++step) {
    const std::size_t which = order() % 16;
    try {
      one_operation(*group, memory, which, step);
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      if (group->broken()) ++failed;
    }
  }
  stop = true;
}

}  // namespace

void scribble(int first, int seeds) {
  RankGroup(kRanks * seeds, RankMode::kThreads, {.limit = 120s}).run([&](Rank& r) {
    run_rank(r, first + r.id() / kRanks, r.id() % kRanks);
  });
}

}  // namespace convoy::coll::test
