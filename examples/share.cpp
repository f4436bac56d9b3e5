// Tensors that several processes have at the same place in memory:
//
//   share
//
// Two processes fill one row each of a tensor of this one, and pass a tensor of their own back.
// Nothing is copied. docs/guide/sharing.md explains it.
#include <convoy/convoy.h>
#include <torch/types.h>

#include <iostream>

using namespace std::chrono_literals;

// Runs in a process of its own.
void fill(int index, const torch::Tensor& table) {
  table[index].fill_(index + 1);                   // visible to the parent
  auto mine = convoy::share::empty({1000, 1000});  // allocated in shared memory
  mine.fill_(10 * index);
  convoy::spawned()->parent.send({mine, "filled row", index});
}

int main(int argc, char** argv) {
  convoy::start(argc, argv);  // first: a spawned process runs fill() here, and ends
  const auto table = torch::zeros({2, 3});
  auto processes = convoy::spawn<fill>(2, table);  // moves the table into shared memory, once
  for (int i = 0; i < 2; ++i) {
    const auto message = processes.channel(i).receive_message(convoy::Deadline::after(60s));
    std::cout << message.text(1) << " " << message.integer(2) << ", sent "
              << message.tensor(0).numel() << " numbers" << std::endl;
  }
  processes.join(60s);
  std::cout << table << std::endl;
  return table.sum().item<float>() == 9 ? 0 : 1;
}
