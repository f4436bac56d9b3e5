#include "ddp/reduce_bucket.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>

#include "base/error.h"
#include "coll/report.h"
#include "convoy/backend.h"
#include "convoy/hooks.h"

namespace convoy {

bool averages(const ProcessGroup& group) {
  const std::string name = group.backend_name();
  return name == "convoy" || name == "mpi";
}

namespace {

at::Tensor real_numbers(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

}  // namespace

HookResult reduce_pieces(const ProcessGroup& group, const std::vector<at::Tensor>& pieces,
                         const at::Tensor& buffer, const GradReduce& reduce) {
  if (pieces.empty()) return buffer;
  const ReduceOptions options{.op = reduce.kind() == GradReduce::Kind::kMean ? ReduceOp::kAvg
                                                                             : ReduceOp::kSum};
  std::vector<at::Tensor> numbers;
  numbers.reserve(pieces.size());
  for (const at::Tensor& piece : pieces) numbers.push_back(real_numbers(piece));
  if (numbers.size() == 1) return {group.all_reduce_async(numbers[0], options), buffer};
  return {group.all_reduce_coalesced_async(numbers, options), buffer};
}

HookResult reduce_bucket(const ProcessGroup& group, const at::Tensor& buffer,
                         const GradReduce& reduce, double weight) {
  if (buffer.numel() == 0) return buffer;
  const at::Tensor flat = real_numbers(buffer);
  switch (reduce.kind()) {
    case GradReduce::Kind::kMean:
      if (averages(group)) return {group.all_reduce_async(flat, {.op = ReduceOp::kAvg}), buffer};
      flat.div_(group.size());
      break;
    case GradReduce::Kind::kWeighted:
      if (weight == 0) {
        flat.zero_();  // the mean of no samples is NaN, and so is zero times that
      } else {
        flat.mul_(weight);
      }
      break;
    case GradReduce::Kind::kSum: break;
  }
  return {group.all_reduce_async(flat), buffer};
}

void reduce_sparse_gradient(const ProcessGroup& group, at::Tensor& gradient,
                            const GradReduce& reduce, double weight) {
  switch (reduce.kind()) {
    case GradReduce::Kind::kMean: gradient = gradient / group.size(); break;
    case GradReduce::Kind::kWeighted:
      gradient = weight == 0 ? at::zeros_like(gradient) : gradient * weight;
      break;
    case GradReduce::Kind::kSum: gradient = gradient.clone(); break;
  }
  group.all_reduce(gradient);
}

ProcessGroup own_group(const ProcessGroup& group, const std::string& purpose) {
  if (!averages(group) || !group.store()) return group;
  std::vector<int> all(static_cast<std::size_t>(group.size()));
  std::iota(all.begin(), all.end(), 0);
  return group.split(all, {.name = group.name() + "/" + purpose}).value();
}

bool launches_late(const ProcessGroup& group, BucketLaunch wish) {
  if (wish != BucketLaunch::kAuto) return wish == BucketLaunch::kLate;
  const char* const variable = std::getenv("CONVOY_DDP_LAUNCH");
  const std::string_view when = variable == nullptr ? "" : variable;
  if (when == "early") return false;
  if (when == "late") return true;
  if (!when.empty()) {
    fail(ErrorKind::kInvalidArgument, "CONVOY_DDP_LAUNCH is ", in_quotes(when),
         "; it can be early or late");
  }
  if (group.backend_name() != "convoy") return false;
  return group.local_size() * at::get_num_threads() >= ::sysconf(_SC_NPROCESSORS_ONLN);
}

void abort_because(const ProcessGroup& group, const std::string& why) noexcept {
  try {
    if (auto* const ours = dynamic_cast<ConvoyBackend*>(group.backend().get())) {
      ours->abort_because(why);
    } else {
      group.abort();
    }
  } catch (...) {  // then it is no more
  }
}

void give_up(const ProcessGroup& group, const std::string& what) noexcept {
  std::string cause = "something that is not a std::exception";
  try {
    throw;
  } catch (const AgreedError&) {
    return;
  } catch (const coll::Disagreement&) {
    return;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kPeerLost || e.kind() == ErrorKind::kTimeout) return;
    cause = e.what();
  } catch (const std::exception& e) {
    cause = first_line(e);
  } catch (...) {  // this rank's own trouble
  }
  abort_because(group, concat(what, " failed there: ", cause));
}

std::string first_line(const std::exception& error) {
  const auto* const torchs = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torchs ? torchs->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

void rethrow_with(const std::string& head) {
  try {
    throw;
  } catch (const Error& e) {
    throw Error(e.kind(), head + e.what());
  } catch (const c10::DistError& e) {
    throw Error(ErrorKind::kPeerLost, head + e.what_without_backtrace());
  } catch (const c10::Error& e) {
    throw Error(ErrorKind::kInternal, head + e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kResource, head + "there is no memory left");
  } catch (const std::exception& e) {
    throw Error(ErrorKind::kInternal, head + e.what());
  }
}

namespace hooks {

HookResult all_reduce(const GradBucket& bucket) {
  return reduce_bucket(bucket.group(), bucket.buffer(), GradReduce::kMean, 1);
}

HookResult noop(const GradBucket& bucket) { return bucket.buffer(); }

}  // namespace hooks
}  // namespace convoy
