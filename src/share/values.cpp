#include "convoy/values.h"

#include <limits>

#include "base/error.h"

namespace convoy::share {

std::int64_t detail::checked_integer(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    fail(ErrorKind::kInvalidArgument, "the number ", value, " does not fit a message's 63 bits");
  }
  return static_cast<std::int64_t>(value);
}

const Value& ValueReader::one() {
  if (next_ >= message_.size()) {
    fail(ErrorKind::kInvalidArgument, "value ", next_, " of a message of ", message_.size(),
         " values");
  }
  return message_[next_++];
}

// As many values at least must follow: a count that is none is noticed before memory is taken.
std::size_t ValueReader::count() {
  const std::int64_t n = message_.integer(next_++);
  if (n < 0 || static_cast<std::uint64_t>(n) > message_.size() - next_) wrong_kind();
  return static_cast<std::size_t>(n);
}

void ValueReader::wrong_kind() const {
  fail(ErrorKind::kInvalidArgument, "value ", next_ - 1,
       " of a message is not of the kind that is wanted here");
}

}  // namespace convoy::share
