// A program of somebody else's that links libconvoy: torch comes with it, nothing else is named.
#include <convoy/version.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const auto sum = torch::arange(10).sum().item<int>();
  if (sum != 45) return 1;
  std::printf("convoy %s beside torch %s\n", convoy::version(), TORCH_VERSION);
  return 0;
}
