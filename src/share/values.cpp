#include "convoy/values.h"

#include <utility>

#include "base/error.h"

namespace convoy::share {

void detail::MessageSink::add_unsigned(std::uint64_t value) {
  if (!std::in_range<std::int64_t>(value)) {
    fail(ErrorKind::kInvalidArgument, "the number ", value, " does not fit a message's 63 bits");
  }
  to_.add(static_cast<std::int64_t>(value));
}

std::uint64_t ValueReader::take_unsigned() {
  const std::int64_t value = message_.integer(next_++);
  if (value < 0) wrong_kind();
  return static_cast<std::uint64_t>(value);
}

const Value& ValueReader::one() {
  if (next_ >= message_.size()) {
    fail(ErrorKind::kInvalidArgument, "value ", next_, " does not exist: the message has ",
         message_.size(), " values");
  }
  return message_[next_++];
}

// As many values at least must follow: a count that is none is noticed before memory is taken.
std::size_t ValueReader::take_count() {
  const std::int64_t n = message_.integer(next_++);
  if (n < 0 || static_cast<std::uint64_t>(n) > message_.size() - next_) wrong_kind();
  return static_cast<std::size_t>(n);
}

void ValueReader::wrong_kind() const {
  fail(ErrorKind::kInvalidArgument, "value ", next_ - 1,
       " of a message is not of the kind that is wanted here");
}

}  // namespace convoy::share
