#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "autograd/walk.h"

// Where in a program things were made, as if calls were plain calls of functions: the order that
// deterministic passes follow.
namespace convoy::autograd::detail {

// What runs as one: a handler, or whoever made the context. Its path says where it was called:
// element 2k of its caller is the k-th call, and what the caller does afterwards has element
// 2k + 1; what it does first has element 1.
struct FramePlace {
  static constexpr std::size_t kMostDepth = 15;

  explicit FramePlace(std::vector<std::uint32_t> where) : path(std::move(where)) {}

  const std::vector<std::uint32_t> path;
  bool too_deep = false;
  std::atomic<std::uint32_t> calls{0};

  static constexpr std::uint32_t kFirst = 1;
  static constexpr std::uint32_t kReply = UINT32_MAX;
};

// From here on this thread made nodes of that place.
struct FrameMark {
  std::shared_ptr<const FramePlace> place;
  std::uint32_t element = 0;
  std::uint64_t thread = 0;
  std::uint64_t sequence_nr = 0;
};
// Now, on this thread.
FrameMark mark_here(std::shared_ptr<const FramePlace> place, std::uint32_t element);

// Gives the nodes of passes numbers in the order of the program. They stay while passes run: those
// that run at once may share nodes. Not thread-safe.
class FrameOrder {
 public:
  void add(FrameMark&& mark) { marks_.push_back(std::move(mark)); }
  // Numbers all nodes of the walk. kUnsupported: their order cannot be told.
  enum class Others { kNone, kRun };  // passes that have numbers of this order
  void number(const Walk& walk, Others others);
  // Of a send of the walk that was numbered last.
  std::uint64_t number_of(const SentMessage& sent) const;
  void clear();

 private:
  using Key = std::vector<std::uint32_t>;
  struct Label {
    std::uint64_t number = 0;
    std::uint64_t nodes = 0;  // numbers behind it that nodes may have
  };
  using Labels = std::map<Key, Label>;
  static Key key_of(const FramePlace& place, std::uint32_t element);
  // Of the marks from this one on, and of the sends; in order.
  std::vector<Key> keys_of(const Walk& walk, std::size_t first_mark) const;
  // False: there is no room between those that are known.
  bool label(const std::vector<Key>& keys);
  void label_anew(const Walk& walk);
  std::uint64_t number_at(std::uint64_t thread, std::uint64_t made);
  std::uint64_t number_of_node(const torch::autograd::Node& node);

  std::vector<FrameMark> marks_;
  Labels labels_;
  struct Piece {
    Labels::iterator label;
    std::uint64_t first = 0;  // sequence_nr
  };
  std::map<std::uint64_t, std::map<std::uint64_t, Piece>> threads_;  // by thread and sequence_nr
  std::size_t labelled_ = 0;                                         // marks
  // Nodes that were numbered. One may have gone, and another may have its address.
  struct Numbered {
    std::uint64_t made = 0;   // the number that it had
    std::uint64_t given = 0;  // that it got
    std::uint64_t generation = 0;
  };
  std::unordered_map<const torch::autograd::Node*, Numbered> numbered_;
  std::uint64_t generation_ = 0;  // of labels_
};

}  // namespace convoy::autograd::detail
