// The launcher's store, without torch: ranks leave messages for each other.
//
//   convoy run -n 2 hello
//
// The store is a key-value store that `convoy run` serves to its ranks, without an open port.
#include <convoy/store.h>

#include <cstdlib>
#include <iostream>

int main() {
  const auto store = convoy::launcher_store();  // what `convoy run` serves to its ranks
  if (!store) {
    std::cerr << "start me with: convoy run -n 2 hello\n";
    return 2;
  }
  const std::string rank = std::getenv("RANK");
  const auto deadline = convoy::Deadline::after(std::chrono::seconds(10));
  store->set("here/" + rank, "rank " + rank);
  store->barrier("all here", std::atoi(std::getenv("WORLD_SIZE")), deadline);
  for (const auto& key : store->keys("here/")) std::cout << store->get(key) + " is here\n";
}
