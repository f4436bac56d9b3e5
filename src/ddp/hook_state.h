#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "convoy/reducer.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace convoy {

// What hooks keep by the number of a parameter, and how it is saved.
using ByParameter = std::map<std::size_t, at::Tensor>;

void write_state(torch::serialize::OutputArchive& archive, const std::string& name,
                 const ByParameter& tensors);
// kInvalidArgument if the archive has nothing of this name.
ByParameter read_state(torch::serialize::InputArchive& archive, const std::string& name);
// A state that was loaded may be another model's: kInvalidArgument unless it has so many elements.
void check_state(const at::Tensor& state, std::int64_t elements, std::size_t parameter,
                 const char* hook);

void write_number(torch::serialize::OutputArchive& archive, const std::string& name,
                  std::uint64_t number);
std::uint64_t read_number(torch::serialize::InputArchive& archive, const std::string& name);

// The number of a bucket's backward in the life of a hook, which goes on where a saved one stopped:
// 1, 2, 3, ... A hook that counts its own calls would be out of step with other ranks' after a
// backward that failed.
class BackwardCount {
 public:
  std::uint64_t of(const GradBucket& bucket);
  std::uint64_t last() const { return last_; }
  // The next bucket's backward is the one after `last`.
  void go_on_after(std::uint64_t last);

 private:
  bool anchored_ = false;
  std::uint64_t base_ = 0;   // last_ when it was anchored
  std::uint64_t first_ = 0;  // the reducer's number then
  std::uint64_t last_ = 0;
};

}  // namespace convoy
