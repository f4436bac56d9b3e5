#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "coll/control.h"

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

// What a rank called, and on what (Call::describe_shapes).
struct Called {
  // NOLINTNEXTLINE(google-explicit-constructor): a signature alone says enough for most
  Called(const Signature& what, std::string on = {}) : signature(what), shapes(std::move(on)) {}

  Signature signature;
  std::string shapes;
};
// kInvalidArgument: rank 0 and another called different things.
[[noreturn]] void fail_signatures(const Speaker& speaker, const Called& first, int rank,
                                  const Called& other);
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
