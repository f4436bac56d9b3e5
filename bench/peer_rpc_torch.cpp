// The cases of calls.h over PyTorch's own RPC (TensorPipe) from C++: one round, as a line of JSON.
//
// The quickest way that PyTorch has without Python: a TensorPipeAgent whose requests are calls of
// builtin operators (ScriptCall), executed by RequestCallbackNoPython. Options are PyTorch's
// defaults: 16 threads, all transports and channels. `call` is aten::add, an echo is aten::detach
// (which copies nothing), the 1 GB goes to aten::numel.
#include <fcntl.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <cstdlib>
#include <optional>

#include "calls.h"
#include "convoy/deadline.h"
#include "os/process.h"
#include "workers.h"

namespace bench {
namespace {

namespace rpc = torch::distributed::rpc;
using Operator = std::shared_ptr<torch::jit::Operator>;

Operator find_operator(const char* name, const char* overload) {
  for (const auto& found : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (found->schema().overload_name() == overload) return found;
  }
  std::fprintf(stderr, "bench_rpc_torch: no operator %s\n", name);
  std::exit(1);
}

std::shared_ptr<rpc::TensorPipeAgent> make_agent(const std::string& folder, int rank) {
  torch::distributed::autograd::DistAutogradContainer::init(rank);
  const auto store = c10::make_intrusive<c10d::FileStore>(folder + "/store", 2);
  rpc::TensorPipeRpcBackendOptions options(rpc::kDefaultNumWorkerThreads, std::nullopt,
                                           std::nullopt, 300, "env://");
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      store, "worker" + std::to_string(rank), static_cast<rpc::worker_id_t>(rank), 2, options,
      std::unordered_map<std::string, rpc::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<rpc::RequestCallbackNoPython>());
  rpc::RpcAgent::setCurrentRpcAgent(agent);
  // As PyTorch's own tests without Python have it.
  agent->setTypeResolver(std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName&) {
    return c10::StrongTypePtr(nullptr, c10::TensorType::create(at::Tensor()));
  }));
  agent->start();
  return agent;
}

class TorchClient {
 public:
  explicit TorchClient(const std::string& folder)
      : agent_(make_agent(folder, 0)), server_(agent_->getWorkerInfo("worker1")) {}

  void call() { result_of(*begin(add_, {a_, b_, 1})).toTensor(); }
  void start() { started_.push_back(begin(add_, {a_, b_, 1})); }
  void finish() {
    result_of(*started_.front()).toTensor();
    started_.pop_front();
  }
  void prepare_echo(std::size_t bytes) {
    large_ = torch::ones({static_cast<std::int64_t>(bytes)}, torch::kUInt8);
  }
  void echo() {
    const at::Tensor back = result_of(*begin(detach_, {large_})).toTensor();
    if (back.nbytes() != large_.nbytes()) std::abort();
  }
  void prepare_transfer() { prepare_echo(kTransferBytes); }
  void transfer() {
    if (result_of(*begin(numel_, {large_})).toInt() != large_.numel()) std::abort();
  }

 private:
  using Started = c10::intrusive_ptr<c10::ivalue::Future>;

  Started begin(const Operator& op, std::vector<at::IValue>&& stack) {
    return agent_->send(server_, rpc::ScriptCall(op, std::move(stack)).toMessage());
  }
  static at::IValue result_of(c10::ivalue::Future& started) {
    started.waitAndThrow();
    return rpc::ScriptResp::fromMessage(*started.value().toCustomClass<rpc::Message>())->value();
  }

  const std::shared_ptr<rpc::TensorPipeAgent> agent_;
  const rpc::WorkerInfo& server_;
  const Operator add_ = find_operator("aten::add", "Tensor");
  const Operator detach_ = find_operator("aten::detach", "");
  const Operator numel_ = find_operator("aten::numel", "");
  const at::Tensor a_ = torch::ones({2}), b_ = torch::ones({2});
  at::Tensor large_;
  std::deque<Started> started_;
};

// Until the client has gone: the line ends.
void serve(const std::string& folder, int line) {
  const auto agent = make_agent(folder, 1);
  char end = 0;
  static_cast<void>(!::read(line, &end, 1));
}

int run(int argc, char** argv) {
  ::setenv("TP_SOCKET_IFNAME", "lo", 1);
  const std::string word = argc > 1 ? argv[1] : "";
  if (word == "serve") {
    serve(argv[2], std::stoi(argv[3]));
    std::_Exit(0);
  }
  std::optional<RunFolder> folder("rpc");
  int line[2];
  if (::pipe2(line, O_CLOEXEC) != 0) return 1;
  auto child = convoy::ChildProcess::spawn(
      {.arguments = {"/proc/self/exe", "serve", folder->path(), std::to_string(line[0])},
       .inherited = {line[0]}});
  TorchClient client(folder->path());
  measure_calls(client, CallBudget::from(word));
  ::close(line[1]);
  child.wait(convoy::Deadline::after(std::chrono::minutes(1)));
  folder.reset();
  std::fflush(stdout);
  std::_Exit(0);  // PyTorch's agent wants both sides to leave together
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  try {
    return bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_rpc_torch: %s\n", error.what());
    return 1;
  }
}
