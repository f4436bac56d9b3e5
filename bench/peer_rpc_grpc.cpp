// The cases of calls.h over gRPC and a Unix socket: one round, as a line of JSON.
//
// Tensors are messages (calls.proto). The server adds two floats by hand and knows no torch, which
// spares it the microsecond that an operator costs. One call at a time is a synchronous one; 64 go
// through a completion queue.
#include <grpcpp/grpcpp.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "calls.grpc.pb.h"
#include "calls.h"
#include "convoy/deadline.h"
#include "os/process.h"
#include "workers.h"

namespace bench {
namespace {

using grpc_calls::Calls;
using grpc_calls::Count;
using grpc_calls::Pair;
using grpc_calls::Tensor;

constexpr int kFloat32 = 6;
constexpr std::size_t kFloats = 2;

void add(const Pair& pair, Tensor& sum) {
  std::array<float, kFloats> a{}, b{};
  std::memcpy(a.data(), pair.a().data().data(), std::min(sizeof a, pair.a().data().size()));
  std::memcpy(b.data(), pair.b().data().data(), std::min(sizeof b, pair.b().data().size()));
  for (std::size_t i = 0; i < kFloats; ++i) a[i] += b[i];
  sum.set_dtype(pair.a().dtype());
  *sum.mutable_sizes() = pair.a().sizes();
  sum.set_data(a.data(), sizeof a);
}

// gRPC runs these on threads of its own.
class Server final : public Calls::CallbackService {
 public:
  grpc::ServerUnaryReactor* Add(grpc::CallbackServerContext* context, const Pair* pair,
                                Tensor* sum) override {
    add(*pair, *sum);
    return done(context);
  }
  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context, const Tensor* in,
                                 Tensor* out) override {
    const_cast<Tensor*>(in)->Swap(out);  // no copy
    return done(context);
  }
  grpc::ServerUnaryReactor* Measure(grpc::CallbackServerContext* context, const Tensor* in,
                                    Count* out) override {
    out->set_bytes(static_cast<std::int64_t>(in->data().size()));
    return done(context);
  }

 private:
  static grpc::ServerUnaryReactor* done(grpc::CallbackServerContext* context) {
    auto* const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

void serve(const std::string& address) {
  Server service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (!server) std::exit(1);
  server->Wait();
}

class GrpcClient {
 public:
  explicit GrpcClient(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    stub_ = Calls::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    for (Tensor* const each : {pair_.mutable_a(), pair_.mutable_b()}) {
      const std::array<float, kFloats> ones{1, 1};
      each->set_dtype(kFloat32);
      each->add_sizes(kFloats);
      each->set_data(ones.data(), sizeof ones);
    }
  }

  void call() {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    Tensor sum;
    check(stub_->Add(&context, pair_, &sum));
  }
  void start() {
    auto* const call = new Call;
    call->reader = stub_->AsyncAdd(&call->context, pair_, &queue_);
    call->reader->Finish(&call->sum, &call->status, call);
  }
  void finish() {
    void* tag = nullptr;
    bool ok = false;
    if (!queue_.Next(&tag, &ok) || !ok) std::abort();
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    check(call->status);
  }
  void prepare_echo(std::size_t bytes) { large_.assign(bytes, 'x'); }
  void echo() {
    grpc::ClientContext context;
    Tensor out;
    check(stub_->Echo(&context, large(), &out));
    if (out.data().size() != large_.size()) std::abort();
  }
  void prepare_transfer() { prepare_echo(kTransferBytes); }
  void transfer() {
    grpc::ClientContext context;
    Count count;
    check(stub_->Measure(&context, large(), &count));
    if (static_cast<std::size_t>(count.bytes()) != large_.size()) std::abort();
  }

 private:
  struct Call {
    grpc::ClientContext context;
    Tensor sum;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<Tensor>> reader;
  };

  static void check(const grpc::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "bench_rpc_grpc: %s\n", status.error_message().c_str());
    std::exit(1);
  }
  // A message has bytes of its own: one copy of the tensor.
  Tensor large() const {
    Tensor in;
    in.add_sizes(static_cast<std::int64_t>(large_.size()));
    in.set_data(large_);
    return in;
  }

  std::unique_ptr<Calls::Stub> stub_;
  grpc::CompletionQueue queue_;
  Pair pair_;
  std::string large_;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  const std::string word = argc > 1 ? argv[1] : "";
  if (word == "serve") {
    serve(argv[2]);
    return 0;
  }
  const RunFolder folder("rpc");
  const std::string address = "unix:" + folder.path() + "/socket";
  auto child = convoy::ChildProcess::spawn({.arguments = {"/proc/self/exe", "serve", address}});
  {
    GrpcClient client(address);
    measure_calls(client, CallBudget::from(word));
  }
  child.kill(SIGKILL);
  child.wait(convoy::Deadline::after(std::chrono::minutes(1)));
  return 0;
}
