#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coll/call.h"
#include "coll/control.h"
#include "convoy/error.h"

namespace convoy::coll {

// What the errors of every medium have in common.

// Who speaks of which operation.
struct Speaker {
  OpKind op;
  std::uint64_t number;
  const std::string& group;
  int rank;
  int size;
};
// "all_reduce #41, group "world", rank 1 of 4: ".
std::string operation_prefix(const Speaker& speaker);

// What a rank called, on what (Call::describe_shapes), and for which purpose of the library's own.
struct Called {
  Called(const Signature& which, std::string on) : signature(which), shapes(std::move(on)) {}
  // Of what describe_call() gave.
  static Called parse(const Signature& which, std::string_view text);

  Signature signature;
  std::string shapes;
  std::string what = {};  // as of Purpose
  std::uint64_t number = 0;
  std::uint64_t owner = 0;
};
// What other ranks are told of a call beside its signature.
std::string describe_call(const Call& call);

// Ranks called different things: kInvalidArgument on all of them, in the same operation, which is
// over. By rank.
class Disagreement : public Error {
 public:
  Disagreement(const std::string& text, std::vector<Called> by_rank)
      : Error(ErrorKind::kInvalidArgument, text),
        calls_(std::make_shared<const std::vector<Called>>(std::move(by_rank))) {}
  const std::vector<Called>& calls() const { return *calls_; }

 private:
  std::shared_ptr<const std::vector<Called>> calls_;  // exceptions are copied
};
// Throws a Disagreement; not all of them have the same signature.
[[noreturn]] void fail_signatures(const Speaker& speaker, std::vector<Called> calls);
// kInvalidArgument: what rank `source` sends is not what rank `target` expects of it.
struct CountPair {
  int source;
  int target;
  std::uint64_t sent;
  std::uint64_t expected;
};
[[noreturn]] void fail_counts(const Speaker& speaker, DataType type, const CountPair& counts);
// The same of shapes; empty: not given.
struct ShapePair {
  int source;
  int target;
  std::string sent;
  std::string expected;
};
[[noreturn]] void fail_shapes(const Speaker& speaker, const ShapePair& shapes);

}  // namespace convoy::coll
