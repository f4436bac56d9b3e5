#include "ddp/hook_state.h"

#include <ATen/Functions.h>
#include <torch/serialize/archive.h>

#include "base/error.h"

namespace convoy {
namespace {

std::string key_of(const std::string& name, std::int64_t index) { return concat(name, "_", index); }

at::Tensor read_tensor(torch::serialize::InputArchive& archive, const std::string& key) {
  at::Tensor tensor;
  if (!archive.try_read(key, tensor)) {
    fail(ErrorKind::kInvalidArgument, "there is no ", in_quotes(key),
         " in the archive: it was saved by something else");
  }
  return tensor;
}

}  // namespace

void write_state(torch::serialize::OutputArchive& archive, const std::string& name,
                 const ByParameter& tensors) {
  const at::Tensor indices = at::empty({static_cast<std::int64_t>(tensors.size())}, at::kLong);
  std::int64_t k = 0;
  for (const auto& [index, tensor] : tensors) {
    indices[k++] = static_cast<std::int64_t>(index);
    archive.write(key_of(name, static_cast<std::int64_t>(index)), tensor);
  }
  archive.write(name, indices);
}

ByParameter read_state(torch::serialize::InputArchive& archive, const std::string& name) {
  ByParameter tensors;
  const at::Tensor indices = read_tensor(archive, name);
  for (std::int64_t k = 0; k < indices.numel(); ++k) {
    const auto index = indices[k].item<std::int64_t>();
    tensors[static_cast<std::size_t>(index)] = read_tensor(archive, key_of(name, index));
  }
  return tensors;
}

void check_state(const at::Tensor& state, std::int64_t elements, std::size_t parameter,
                 const char* hook) {
  if (state.numel() == elements) return;
  fail(ErrorKind::kInvalidArgument, hook, ": its state for parameter ", parameter, " has ",
       state.numel(), " elements, not ", elements,
       "; it belongs to another model, or to another number of ranks");
}

void write_number(torch::serialize::OutputArchive& archive, const std::string& name,
                  std::uint64_t number) {
  archive.write(name, at::full({1}, static_cast<std::int64_t>(number), at::kLong));
}

std::uint64_t read_number(torch::serialize::InputArchive& archive, const std::string& name) {
  return static_cast<std::uint64_t>(read_tensor(archive, name).item<std::int64_t>());
}

std::uint64_t BackwardCount::of(const GradBucket& bucket) {
  if (!anchored_) {
    anchored_ = true;
    base_ = last_;
    first_ = bucket.backward();
  }
  last_ = base_ + bucket.backward() - first_ + 1;
  return last_;
}

void BackwardCount::go_on_after(std::uint64_t last) {
  last_ = last;
  anchored_ = false;
}

}  // namespace convoy
