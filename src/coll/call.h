#pragma once

#include <memory>
#include <vector>

#include "base/call_scope.h"
#include "coll/control.h"
#include "coll/kernels.h"
#include "coll/view.h"
#include "convoy/deadline.h"

namespace convoy::coll {

// The memory of a call that is not one buffer in and one out.
struct CallLists {
  // In the order of ranks where there is something for each (or from each) of them. Of a coalesced
  // all_gather, `output` has as many stretches as `input` for each rank in turn, and `begin` counts
  // within one rank's.
  std::vector<Stretch> input;
  std::vector<Stretch> output;
  // Elements to and from each rank; empty unless the operation's counts differ by rank.
  std::vector<std::uint64_t> send;
  std::vector<std::uint64_t> receive;
  // Of the tensors behind the pieces, where they are given: of all, if they are part of the tag; or
  // of what goes to and comes from each rank.
  ShapeList shapes;
  ShapeList send_shapes;
  ShapeList receive_shapes;
};

// One collective operation as a rank asked for it.
struct Call {
  Signature signature;
  const std::byte* input = nullptr;  // where it is one buffer
  std::byte* output = nullptr;       // may be `input`
  std::size_t input_bytes = 0;       // 0 where this rank sends nothing
  std::size_t output_bytes = 0;
  Shape shape;                             // of the one buffer; part of the tag
  Purpose purpose;                         // its tag is part of the tag, too
  std::shared_ptr<const CallLists> lists;  // otherwise
  std::chrono::nanoseconds timeout{0};     // 0: the group's
  Deadline deadline = Deadline::never();   // of who runs it, by the timeout

  // All that this rank sends, and all that it gets.
  View input_view() const {
    if (lists && !lists->input.empty()) return View(lists->input);
    return {const_cast<std::byte*>(input), input_bytes};
  }
  View output_view() const {
    if (lists && !lists->output.empty()) return View(lists->output);
    return {output, output_bytes};
  }
  std::size_t bytes() const { return std::max(input_bytes, output_bytes); }
  std::size_t element() const { return size_of(signature.type); }
  Reduction reduction(int ranks) const;
  // "a tensor of shape [2, 3]"; empty if no shape is given.
  std::string describe_shapes() const;
};

}  // namespace convoy::coll
