// What this machine can do: hand-written collectives with no types, no checks and no failure
// handling, each in several variants of which the best counts. A side of bench/coll.py:
//   bench_limit RANKS BYTES     (most bytes of a buffer)

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../side.h"
#include "operations.h"

namespace {

using limit::Rank;
using limit::Staging;
using limit::Stores;

class Limit final : public bench::Side {
 public:
  explicit Limit(Rank& rank) : rank_(rank) {}

  std::vector<std::string> prepare(const bench::Case& next) override {
    const std::size_t size = (next.bytes / limit::kGrain + 1) * limit::kGrain;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(limit::kGrain, size)));
    output_.reset(static_cast<std::byte*>(std::aligned_alloc(limit::kGrain, size)));
    std::memset(output_.get(), 0, size);
    rank_.mine = memory_.get();
    rank_.out = output_.get();
    rank_.shared->private_buffers[rank_.id] = rank_.mine;
    group_ = next.path == "group";
    bytes_ = next.bytes;
    buffer_ = group_ ? rank_.group[rank_.id] : rank_.mine;
    std::memset(buffer_, 0, size);
    variants_.clear();
    const bool vm = limit::vm_works(rank_);
    if (next.op == "barrier") {
      add("spin", [this] { rank_.barrier(); });
    } else if (next.type != "f32") {
      return {};
    } else if (next.op == "all_reduce") {
      group_ ? all_reduce_group() : all_reduce_private();
    } else if (next.op == "reduce_scatter") {
      reduce_scatter();
    } else if (next.op == "all_gather") {
      all_gather(vm);
    } else if (next.op == "broadcast") {
      broadcast(vm);
    }
    std::vector<std::string> names;
    for (const auto& [name, operation] : variants_) names.push_back(name);
    return names;
  }

  void call(std::size_t variant) override { variants_[variant].second(); }
  std::span<std::byte> input() override { return {buffer_, bytes_}; }
  void barrier() override { rank_.barrier(); }
  double largest(double value) override {
    rank_.shared->seconds[rank_.id] = value;
    rank_.barrier();
    for (int r = 0; r < rank_.ranks; ++r) value = std::max(value, rank_.shared->seconds[r]);
    rank_.barrier();
    return value;
  }

 private:
  void add(std::string name, std::function<void()> operation) {
    variants_.emplace_back(std::move(name), std::move(operation));
  }

  template <class Operation>
  void both_stores(Operation operation) {
    add("plain", [=] { operation(Stores::kPlain); });
    add("streaming", [=] { operation(Stores::kStreaming); });
  }

  // The chunk sizes that have won somewhere.
  template <class Operation>
  void each_staging(Operation operation) {
    for (const std::size_t chunk : {16 << 10, 64 << 10, 256 << 10}) {
      if (chunk > 16 << 10 && chunk * static_cast<std::size_t>(rank_.ranks) > 2 * bytes_) continue;
      const std::string size = std::to_string(chunk >> 10) + "K";
      add("staged " + size, [=] { operation(Staging{chunk, Stores::kPlain}); });
      if (bytes_ < 256 << 10) continue;
      add("staged streaming " + size, [=] { operation(Staging{chunk, Stores::kStreaming}); });
    }
  }

  void all_reduce_group() {
    if (bytes_ <= limit::kSmall) {
      return add("line", [this] { limit::all_reduce_small(rank_, buffer_, bytes_); });
    }
    if (rank_.ranks != 2) return;
    both_stores([this](Stores stores) { limit::all_reduce_group(rank_, bytes_, stores); });
  }

  void all_reduce_private() {
    if (bytes_ <= limit::kSmall) {
      return add("line", [this] { limit::all_reduce_small(rank_, buffer_, bytes_); });
    }
    if (rank_.ranks == 2 && bytes_ <= 1 << 20) {
      add("flat", [this] { limit::all_reduce_flat(rank_, bytes_, Stores::kPlain); });
    }
    each_staging([this](const Staging& s) { limit::staged(rank_, bytes_, s, {}); });
  }

  void reduce_scatter() {
    if (group_) {
      both_stores([this](Stores stores) { limit::reduce_scatter_group(rank_, bytes_, stores); });
      return;
    }
    each_staging([this](const Staging& s) {
      limit::staged(rank_, bytes_, s, {.reduce = true, .gather = false});
    });
  }

  void all_gather(bool vm) {
    if (group_) {
      both_stores([this](Stores stores) { limit::all_gather_group(rank_, bytes_, stores); });
      return;
    }
    each_staging([this](const Staging& s) {
      limit::staged(rank_, bytes_, s, {.reduce = false, .gather = true});
    });
    if (vm) add("process_vm", [this] { limit::all_gather_vm(rank_, bytes_); });
  }

  void broadcast(bool vm) {
    if (group_) {
      if (rank_.ranks != 2) return;
      both_stores([this](Stores stores) { limit::broadcast_group(rank_, bytes_, stores); });
      return;
    }
    each_staging([this](const Staging& s) { limit::broadcast_staged(rank_, bytes_, s); });
    if (vm && rank_.ranks == 2) {
      add("process_vm", [this] { limit::broadcast_vm(rank_, bytes_); });
    }
  }

  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  Rank& rank_;
  std::unique_ptr<std::byte, Free> memory_, output_;
  bool group_ = false;
  std::size_t bytes_ = 0;
  std::byte* buffer_ = nullptr;
  std::vector<std::pair<std::string, std::function<void()>>> variants_;
};

// The operations must be right before they may be fast.
void check(Rank& rank) {
  constexpr std::size_t kBytes = 3 << 20;
  const auto expect_sum = [&](std::byte* buffer, const char* what, const auto& operation) {
    auto* values = reinterpret_cast<float*>(buffer);
    for (std::size_t i = 0; i < kBytes / 4; ++i) {
      values[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(rank.id));
    }
    operation();
    const auto n = static_cast<std::size_t>(rank.ranks);
    for (std::size_t i = 0; i < kBytes / 4; ++i) {
      const std::size_t sum = n * (i % 1000) + n * (n - 1) / 2;
      const auto expected = static_cast<float>(sum);
      if (values[i] == expected) continue;
      std::fprintf(stderr, "bench_limit: %s is wrong at %zu on rank %d\n", what, i, rank.id);
      std::exit(1);
    }
    rank.barrier();
  };
  const std::unique_ptr<std::byte, decltype(&std::free)> mine(
      static_cast<std::byte*>(std::aligned_alloc(limit::kGrain, kBytes)), &std::free);
  rank.mine = mine.get();
  for (const Stores stores : {Stores::kPlain, Stores::kStreaming}) {
    expect_sum(rank.mine, "staged all_reduce",
               [&] { limit::staged(rank, kBytes, {64 << 10, stores}, {}); });
    if (rank.ranks != 2) continue;
    expect_sum(rank.mine, "flat all_reduce", [&] { limit::all_reduce_flat(rank, kBytes, stores); });
    expect_sum(rank.group[rank.id], "group all_reduce",
               [&] { limit::all_reduce_group(rank, kBytes, stores); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc == 3 ? std::atoi(argv[1]) : 0;
  const std::size_t bytes = argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (ranks < 2 || ranks > limit::kMaxRanks) {
    std::fprintf(stderr, "usage: bench_limit RANKS BYTES (2 to %d ranks)\n", limit::kMaxRanks);
    return 2;
  }
  const auto most = std::max<std::size_t>(bytes + limit::kGrain, 4 << 20);
  const bool good = limit::run_ranks(ranks, most, [](Rank& rank) {
    check(rank);
    Limit side(rank);
    if (bench::serve(rank.id, side) != 0) std::exit(1);
  });
  return good ? 0 : 1;
}
