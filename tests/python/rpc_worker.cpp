// A C++ worker beside Python ones: rpc_worker STORE RANK SIZE. The other side is rpc_test.py.
#include <convoy/rpc.h>
#include <torch/types.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

struct Job {
  int seed = 0;
  std::string name;
  std::vector<at::Tensor> tensors;
  CONVOY_FIELDS(seed, name, tensors)
};

at::Tensor my_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(my_add);

using Mixed = std::tuple<bool, std::int8_t, std::uint64_t, float, std::string, std::vector<double>>;
std::map<std::string, Mixed> turn(const std::map<std::string, Mixed>& values,
                                  const std::optional<std::string>& also) {
  auto turned = values;
  if (also) turned[*also] = {true, -1, UINT64_MAX, 0.5F, "also", {1, 2}};
  return turned;
}
CONVOY_RPC(turn);

Job next_job(Job job) {
  ++job.seed;
  job.name += '+';
  for (auto& tensor : job.tensors) tensor = tensor * 2;
  return job;
}
CONVOY_RPC(next_job);

void complain(const std::string& text) { throw std::invalid_argument(text); }
CONVOY_RPC(complain);

class Counter {
 public:
  explicit Counter(std::int64_t start) : value_(start) {}
  Counter(const Counter&) = delete;
  std::int64_t add(std::int64_t more) { return value_ += more; }

 private:
  std::int64_t value_;
};
CONVOY_RPC(&Counter::add);
std::shared_ptr<Counter> make_counter(std::int64_t start) {
  return std::make_shared<Counter>(start);
}
CONVOY_RPC(make_counter);

// A function of the Python workers, as C++ knows it.
at::Tensor scale(const at::Tensor&, double) { throw std::logic_error("it is Python's"); }
// Calls it at the caller, and adds one.
at::Tensor scale_there(const at::Tensor& x, double by) {
  const auto call = convoy::rpc::current();
  return call.session().rpc_sync<scale>(call.caller(), x, by) + 1;
}
CONVOY_RPC(scale_there);

at::Tensor weights() { return torch::full({3}, 2.0, torch::requires_grad()); }
CONVOY_RPC(weights);
at::Tensor forward(const convoy::RRef<at::Tensor>& weight, const at::Tensor& x) {
  return weight.local_value() * x;
}
CONVOY_RPC(forward);

// References to tensors of Python workers, and to one of ours that is read there.
at::Tensor fetch_plus_one(const convoy::RRef<at::Tensor>& tensor) { return tensor.to_here() + 1; }
CONVOY_RPC(fetch_plus_one);
at::Tensor read_plus_one(const convoy::RRef<at::Tensor>&) {
  throw std::logic_error("it is Python's");
}
at::Tensor read_there(const convoy::RRef<at::Tensor>& tensor) {
  const auto call = convoy::rpc::current();
  return call.session().rpc_sync<read_plus_one>(call.caller(), tensor);
}
CONVOY_RPC(read_there);

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "rpc_worker STORE RANK SIZE\n";
    return 2;
  }
  try {
    const convoy::rpc::Session session({.name = "cpp",
                                        .method = std::string("file://") + argv[1],
                                        .rank = std::atoi(argv[2]),
                                        .size = std::atoi(argv[3])});
    session.shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "rpc_worker: " << error.what() << '\n';
    return 1;
  }
}
