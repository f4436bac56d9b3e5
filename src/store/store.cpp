#include "convoy/store.h"

#include "base/error.h"
#include "store/protocol.h"

namespace convoy {

// Three keys: <key>/count is what the callers say, <key>/arrived counts them, <key>/open ends the
// wait, with "1" or with what is wrong; kLate before what is wrong: somebody gave up waiting.
constexpr std::string_view kLate = "late: ";

void Store::barrier(const std::string& key, int count, const Deadline& deadline) {
  if (count < 1) {
    fail(ErrorKind::kInvalidArgument, "store: barrier ", printable(key), " of ", count, " callers");
  }
  const std::string open_key = key + "/open";
  const std::string agreed = compare_set(key + "/count", "", std::to_string(count));
  if (agreed != std::to_string(count)) {
    const std::string text = concat("store: barrier ", printable(key), ": one caller says ", agreed,
                                    " callers, another one ", count);
    set(open_key, text);
    throw Error(ErrorKind::kInvalidArgument, text);
  }
  const std::int64_t arrived = add(key + "/arrived", 1);
  if (arrived > count) {
    fail(ErrorKind::kInvalidArgument, "store: caller number ", arrived, " at barrier ",
         printable(key), " of ", count, "; a barrier's key serves once");
  }
  std::string verdict;
  if (arrived == count) {
    verdict = compare_set(open_key, "", "1");
  } else {
    try {
      verdict = get(open_key, deadline);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      const std::string now = get(key + "/arrived", Deadline::after(std::chrono::seconds(0)));
      const std::string text = concat("store: barrier ", printable(key), ": ", now, " of ", count,
                                      " callers came by the deadline");
      // Who comes later must not pass alone.
      verdict = compare_set(open_key, "", concat(kLate, text));
    }
  }
  if (verdict.starts_with(kLate)) throw Error(ErrorKind::kTimeout, verdict.substr(kLate.size()));
  if (verdict != "1") throw Error(ErrorKind::kInvalidArgument, verdict);
}

}  // namespace convoy
