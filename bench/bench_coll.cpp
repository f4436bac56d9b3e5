// Times our collectives. Started on every rank by `convoy run`; rank 0 prints one JSON object a
// line: {"op", "dtype", "path", "ranks", "bytes", "us"}.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "base/error.h"
#include "coll/group.h"
#include "os/machine.h"

namespace {

using namespace convoy;
using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<std::string> ops = {"all_reduce"};
  std::vector<std::string> types = {"f32"};
  std::vector<std::string> paths = {"group", "private"};
  std::vector<std::size_t> sizes = {8, 65536, 1 << 20, 25 << 20, 100 << 20};
  int ranks = 0;  // only checked
  int samples = 9;
  double seconds = 0.05;  // per sample, about
  int threads = 1;
};

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  if (!text)
    fail(ErrorKind::kInvalidArgument, name, " is not set: run this under `convoy run -n 2`");
  return std::atoi(text);
}

coll::DataType type_of(const std::string& name) {
  for (int i = 0; i < coll::kDataTypes; ++i) {
    const auto type = static_cast<coll::DataType>(i);
    if (coll::to_string(type) == name) return type;
  }
  fail(ErrorKind::kInvalidArgument, "unknown type '", name, "'");
}

// A buffer in group memory or in private memory (huge pages, as a tuned job has them).
class Buffer {
 public:
  Buffer(coll::Group& group, bool shared, std::size_t bytes) {
    if (shared) {
      block_ = group.allocate(bytes);
      data_ = block_.data();
    } else {
      const std::size_t huge = std::size_t{2} << 20;
      const std::size_t size = bytes < huge ? 4096 : huge;
      memory_.reset(static_cast<std::byte*>(
          std::aligned_alloc(size, (bytes + size - 1) / size * size + size)));
      data_ = memory_.get();
    }
    std::memset(data_, 0, bytes);
  }
  std::byte* data() const { return data_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  shm::Block block_;
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* data_ = nullptr;
};

double run_once(coll::Group& group, const std::string& op, std::byte* data, std::size_t bytes,
                coll::DataType type, int iterations) {
  const std::size_t count = bytes / coll::size_of(type);
  group.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < iterations; ++i) {
    if (op == "all_reduce") {
      group.all_reduce(data, data, count, type);
    } else if (op == "broadcast") {
      group.broadcast(data, data, count, type, 0);
    } else if (op == "barrier") {
      group.barrier();
    } else {
      fail(ErrorKind::kInvalidArgument, "unknown operation '", op, "'");
    }
  }
  double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / iterations;
  group.all_reduce(&us, &us, 1, coll::DataType::kF64, {.op = coll::ReduceOp::kMax});
  return us;
}

double measure(coll::Group& group, const Options& options, const std::string& op, std::byte* data,
               std::size_t bytes, coll::DataType type) {
  const double first = std::min(run_once(group, op, data, bytes, type, 1),
                                run_once(group, op, data, bytes, type, 2));
  const int iterations =
      static_cast<int>(std::clamp(options.seconds * 1e6 / std::max(first, 0.05), 1.0, 200000.0));
  std::vector<double> samples;
  for (int i = 0; i < options.samples; ++i) {
    samples.push_back(run_once(group, op, data, bytes, type, iterations));
  }
  std::nth_element(samples.begin(), samples.begin() + options.samples / 2, samples.end());
  return samples[static_cast<std::size_t>(options.samples / 2)];
}

void run(const Options& options) {
  const int rank = environment_number("RANK");
  const int size = environment_number("WORLD_SIZE");
  if (options.ranks != 0 && options.ranks != size) {
    fail(ErrorKind::kInvalidArgument, "--ranks ", options.ranks, " but WORLD_SIZE is ", size);
  }
  const auto group = coll::Group::create(
      launcher_store(), rank, size,
      {.name = "bench", .timeout = std::chrono::seconds(60), .threads = options.threads});
  for (const auto& op : options.ops) {
    for (const auto& path : options.paths) {
      for (const auto& name : options.types) {
        for (const std::size_t bytes : options.sizes) {
          const Buffer buffer(*group, path == "group", std::max<std::size_t>(bytes, 64));
          const double us = measure(*group, options, op, buffer.data(), bytes, type_of(name));
          if (rank != 0) continue;
          std::cout << R"({"op": ")" << op << R"(", "dtype": ")" << name << R"(", "path": ")"
                    << path << R"(", "ranks": )" << size << R"(, "bytes": )" << bytes
                    << R"(, "us": )" << us << "}" << std::endl;
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times the collectives of convoy; run it under `convoy run -n N`.");
  Options options;
  app.add_option("--ops", options.ops, "all_reduce, broadcast, barrier")->delimiter(',');
  app.add_option("--dtypes", options.types, "f32, bf16, ...")->delimiter(',');
  app.add_option("--paths", options.paths, "group, private")->delimiter(',');
  app.add_option("--sizes", options.sizes, "bytes")->delimiter(',');
  app.add_option("--ranks", options.ranks, "expected number of ranks");
  app.add_option("--samples", options.samples, "samples a case; the median counts");
  app.add_option("--seconds", options.seconds, "about how long a sample takes");
  app.add_option("--threads", options.threads, "threads a rank");
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
  } catch (const convoy::Error& error) {
    std::cerr << "bench_coll: " << error.what() << "\n";
    return 1;
  }
}
