// A program of somebody else's that links libconvoy: torch comes with it, nothing else is named.
#include <convoy/c10d_store.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdio>

int main() {
  const auto ours = convoy::make_local_store();
  const auto torchs = convoy::to_c10d(ours);
  torchs->set("key", std::string("value"));
  if (ours->get("key") != "value") return 1;
  if (torchs->add("count", 41) + 1 != 42) return 2;
  if (convoy::from_c10d(torchs) != ours) return 3;
  std::puts("libconvoy and torch work from outside");
  return 0;
}
