#pragma once

#include <torch/csrc/distributed/rpc/message.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace convoy::python {

// What goes wrong with messages of torch.distributed.rpc, for tests: as in torch's own
// FaultyTensorPipeAgent, by its names of messages. Thread-safe.
class TorchRpcFaults final {
 public:
  // Each message of these types fails `times` times before it is sent; requests of those are served
  // so many seconds late. kInvalidArgument for an unknown name.
  TorchRpcFaults(const std::vector<std::string>& failing, int times,
                 const std::map<std::string, double>& late);

  // Counts.
  bool fails(const torch::distributed::rpc::Message& message);
  std::chrono::duration<double> delay_of(const torch::distributed::rpc::Message& message) const;

 private:
  using MessageType = torch::distributed::rpc::MessageType;

  const int times_;
  std::set<MessageType> failing_;
  std::map<MessageType, std::chrono::duration<double>> late_;
  std::mutex mutex_;
  std::map<std::string, int> failed_;  // by payload; guarded by mutex_
};

}  // namespace convoy::python
