#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "convoy/group.h"
#include "ddp/timeline.h"

namespace convoy {

// How a backward ended on one rank. The worse, the greater.
enum class Ending : std::uint8_t {
  kGood = 1,
  kIncomplete,  // parameters without gradients
  kNotFinite,   // gradients that are no numbers
  kDiffers,     // ranks do not have the same model
  kRefused,     // what was asked for makes no sense
  kDisturbed,   // an operation failed, as it does when another rank gives up
  kFailed,      // by itself
  kMistaken,    // the same, and it was a mistake of the program's
};

// The last operation of every backward: ranks tell each other how it went and which parameters they
// used, so that all of them go on or all of them throw. One all-reduce (maximum of bytes): for each
// rank
//   0  outcome
//   1  number of the backward, little-endian
//   9  forwards before it
//  17  hash of what ranks must agree on
//  25  its stamps: see timeline.h
// which only that rank fills in, then one byte for each parameter: 1 if it was used.
class Verdict {
 public:
  Verdict(const ProcessGroup& group, std::size_t parameters);

  // Of a rank that has no inputs, in a Join.
  static constexpr std::uint64_t kAnyForwards = ~std::uint64_t{0};

  struct Ballot {
    Ending outcome = Ending::kGood;
    std::uint64_t backward = 0;
    // A rank whose backward fails before it comes by a sink is not heard of. If it goes on, it has
    // one forward more than the others in the backward that it pairs with theirs.
    std::uint64_t forwards = 0;
    std::uint64_t layout = 0;
    std::vector<bool> used = {};
    Stamps stamps = {};
  };
  // Collective. True if all ranks are fine and speak of the same backward.
  bool reach(const ProcessGroup& group, const Ballot& mine);
  // After false, collective: what was wrong, with the texts of the ranks that have one.
  std::string explain(const ProcessGroup& group, const std::string& text) const;

  Ending worst() const;
  // The greatest number of a backward that a rank was in.
  std::uint64_t last_backward() const;
  // By rank.
  const std::vector<Stamps>& stamps() const { return stamps_; }
  // Parameters that some rank has used.
  const std::vector<bool>& used() const { return used_; }
  // For a rank that is alone.
  void set_used(std::vector<bool> used) { used_ = std::move(used); }

 private:
  at::Tensor bytes_;  // in group memory, reused
  struct Seen {
    Ending outcome;
    std::uint64_t backward, forwards, layout;
  };
  // Of the first rank that counts forwards.
  std::uint64_t forwards() const;
  std::vector<Seen> seen_;
  std::vector<Stamps> stamps_;
  std::vector<bool> used_;
};

}  // namespace convoy
