// A C++ rank in a group of Python ranks: mixed_rank STORE RANK SIZE, where STORE is the file of
// file:// or the word convoy for the store of `convoy run`. The other side is mixed_test.py.
#include <convoy/backend.h>
#include <convoy/c10d_store.h>
#include <convoy/error.h>
#include <torch/types.h>

#include <cstdlib>
#include <iostream>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

void check(bool truth, const char* what) {
  if (truth) return;
  std::cerr << "mixed_rank: wrong: " << what << '\n';
  std::_Exit(1);
}

// Where init_process_group's default group lies in a store, for CPU tensors.
StorePtr default_group_of(const StorePtr& store) {
  StorePtr inner = store;
  for (const char* prefix : {"default_pg", "0/", "cpu/"}) {
    inner = c10::make_intrusive<c10d::PrefixStore>(prefix, inner);
  }
  return inner;
}

int run(const std::string& where, int rank, int size) {
  StorePtr store;
  if (where == "convoy") {
    store = convoy::to_c10d(convoy::launcher_store());
  } else {
    store = c10::make_intrusive<c10d::FileStore>(where, size);
  }
  auto options = c10::make_intrusive<convoy::ConvoyBackend::Options>(std::chrono::seconds(30));
  options->group_name = "0";
  convoy::ConvoyBackend group(default_group_of(store), rank, size, options);

  std::vector x{torch::full({1000}, rank + 1.0)};
  group.allreduce(x)->wait();
  check(torch::equal(x[0], torch::full({1000}, size * (size + 1) / 2.0)), "all_reduce");
  std::vector mine{torch::tensor({7, 8, 9})};
  group.broadcast(mine, {.rootRank = rank})->wait();
  auto all = torch::empty({size});
  auto own = torch::full({1}, static_cast<float>(rank));
  group._allgather_base(all, own)->wait();
  check(torch::equal(all, torch::arange(static_cast<float>(size))), "all_gather");
  std::vector letter{torch::full({5}, 0.5)};
  group.send(letter, 0, 3)->wait();

  std::string text;
  try {
    std::vector other{torch::ones({5})};
    group.allreduce(other)->wait();
  } catch (const convoy::Error& error) {
    text = error.what();
  }
  check(text.find("rank 0 called all_reduce(4 x f32, sum)") != std::string::npos, "mismatch");
  group.barrier()->wait();
  return 0;  // Python's next operation learns that this rank is gone
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "mixed_rank STORE RANK SIZE\n";
    return 2;
  }
  try {
    return run(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
  } catch (const std::exception& error) {
    std::cerr << "mixed_rank: " << error.what() << '\n';
    return 1;
  }
}
