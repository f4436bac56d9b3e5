#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

namespace convoy::python {

// Answers a call of an operator of PyTorch's ("aten::add") with little data, which takes
// microseconds, needs no interpreter and waits for nobody: it may run on any thread. nullptr: the
// message is something else. Torch's own way compares the texts of all overloads in every call.
c10::intrusive_ptr<torch::distributed::rpc::Message> answer_small_operator(
    torch::distributed::rpc::RpcAgent& agent, const torch::distributed::rpc::Message& request);

}  // namespace convoy::python
