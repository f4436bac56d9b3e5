#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "ddp/graph.h"

// What a reducer knows of one parameter, by how long it is true.
namespace convoy {

// Until the model, its optimizers or the buckets change.
struct ParameterPlace {
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  std::string name;
  at::ScalarType type = at::kFloat;  // of the parameter itself, whatever it computes with
  bool sparse = false, delayed = false;
  bool taken = false, dropped = false;  // by a consumer; and then `.grad` is undefined
  bool active = false;                  // required a gradient when last looked at
  NodePtr accumulator;                  // which the tensor itself does not keep alive
  std::uintptr_t hook = 0;
  std::size_t bucket = kNone, slot = 0;
};

// What its hook has shown of the graph, in all rounds so far.
struct GraphUse {
  int expected = 1;  // how often its hook ran in the round where it ran most
  bool learnt_unused = false;
  bool hidden = false;  // came although no output had reached it: behind a nested backward
};

// What its gradient holds, from round to round: a gradient that is reduced already must not be
// reduced again. Invariants: what is `reduced` is not `used`; `summed` is there only between the
// backward that set it aside and the end of its round; `seen` is the gradient when it was reduced
// or, while `summed` is there, after the last addition.
struct GradientHistory {
  bool used = false;        // a gradient of this rank's was added since the last round
  bool computed = false;    // by a backward: not by the user
  bool reduced = false;     // the gradient is what the last round left
  bool mixed = false;       // it was, when a backward that we cannot tell apart added to it
  bool left_local = false;  // this rank's own, though its bucket is not deferred any more
  at::Tensor summed;        // taken out of the gradient, so that it is not summed again
  // Another tensor, or another version, is the user's doing. It is held, so that no other tensor
  // comes to lie where it was.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> seen{
      at::Tensor().getIntrusivePtr()};
  std::int64_t seen_version = 0;

  bool is_seen(const at::Tensor& gradient) const {
    return gradient.defined() && seen._unsafe_get_target() == gradient.unsafeGetTensorImpl();
  }
  bool is_untouched(const at::Tensor& gradient) const {
    return is_seen(gradient) && gradient._version() == seen_version;
  }
  void note(const at::Tensor& gradient) {
    seen = gradient.getIntrusivePtr();
    seen_version = gradient._version();
  }

  // Before a backward, or a round, adds to it. `sums_once`: reducing it again would change it, so
  // what is reduced is set aside. Whoever zeroes or drops a gradient means all of it, also what was
  // set aside.
  void set_aside(at::Tensor& gradient, bool sums_once);
  // After an addition outside of the reducer's backwards. One change since is nothing but this one.
  void look_for_mixing(const at::Tensor& gradient, bool sums_once);
  // A backward has added to it.
  void added(const at::Tensor& gradient);
  // A round opens. True if the user has changed the reduced gradient in place.
  bool open(const at::Tensor& gradient);
  struct End {
    bool good = false;      // the round was
    bool has_all = false;   // some rank has used it
    bool deferred = false;  // it is still this rank's own
    bool touched = false;   // as open() said
  };
  // The round is over: what was set aside is added again.
  void close(at::Tensor& gradient, const End& end);
};

// One round.
struct GradientInRound {
  bool touched = false;  // the user has changed the reduced gradient in place
  int fired = 0;
  std::size_t arrival = 0;  // place among all gradients that came
  bool ready = false;       // in its slot
  bool presumed_unused = false;
  at::Tensor kept;     // what the gradient was, if this rank has nothing to add
  at::Tensor graph;    // the gradient with its history, under create_graph
  at::Tensor rows;     // sparse metadata: of all ranks' gradients, sorted; said before the round
  bool stays = false;  // is reduced where it was made: its slot is not used

  // All but `rows`.
  void open(bool was_touched) {
    GradientInRound fresh;
    fresh.touched = was_touched;
    fresh.rows = std::move(rows);
    *this = std::move(fresh);
  }
};

struct ParameterState : ParameterPlace, GraphUse, GradientHistory {
  GradientInRound round;

  // True if its gradient is still missing at the end of a backward.
  bool is_missing() const { return active && !used && round.fired == 0 && !learnt_unused; }
};

}  // namespace convoy
