#include "coll/report.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace convoy::coll {

std::string operation_prefix(const Speaker& speaker) {
  return concat(to_string(speaker.op), " #", speaker.number, ", group \"", speaker.group,
                "\", rank ", speaker.rank, " of ", speaker.size, ": ");
}

namespace {

constexpr const char* kEqualShapes =
    "shapes must be equal on all ranks; where equal counts are enough, make the group with "
    "compare_shapes = false (or set CONVOY_COMPARE_SHAPES=0)";
constexpr const char* kEqualSetting =
    "compare_shapes (CONVOY_COMPARE_SHAPES) must be the same on all ranks";

std::string purpose_of(const Called& called) {
  return called.number == 0 ? called.what : concat(called.what, " ", called.number);
}

std::string describe_called(const Called& called) {
  std::string text = called.signature.to_string();
  if (!called.shapes.empty()) text += concat(" on ", called.shapes);
  if (!called.what.empty()) text += concat(" (in ", purpose_of(called), ")");
  return text;
}

// What to do if nothing but the tags differs.
std::string advice_for(const Called& first, const Called& other) {
  Signature same = other.signature;
  same.tag = first.signature.tag;
  if (first.what != other.what) {
    const Called& one = first.what.empty() ? other : first;
    const Called& two = first.what.empty() ? first : other;
    return concat("all ranks must come to ", purpose_of(one),
                  two.what.empty() ? "" : concat(" and to ", purpose_of(two)),
                  " in the same order: was it called on some of them only, or did one leave out a "
                  "batch, or have fewer? (convoy::join takes different numbers of batches)");
  }
  if (!(same == first.signature)) return "every rank must make the same calls in the same order";
  if (first.shapes.empty() != other.shapes.empty()) return kEqualSetting;
  if (first.shapes != other.shapes) return kEqualShapes;
  return "tags or types differ between ranks";
}

}  // namespace

std::string describe_call(const Call& call) {
  const Purpose& purpose = call.purpose;
  return concat(call.describe_shapes(), "\n", purpose.what ? purpose.what : "", "\n",
                purpose.number, "\n", purpose.owner);
}

Called Called::parse(const Signature& which, std::string_view text) {
  const auto next = [&text] {
    const auto end = text.find('\n');
    const auto part = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    return part;
  };
  const auto number_in = [](std::string_view part) {
    std::uint64_t value = 0;
    std::from_chars(part.data(), part.data() + part.size(), value);
    return value;
  };
  Called called(which, std::string(next()));
  called.what = next();
  called.number = number_in(next());
  called.owner = number_in(next());
  return called;
}

void fail_signatures(const Speaker& speaker, std::vector<Called> calls) {
  const Called& first = calls.front();
  const auto other = std::find_if(calls.begin(), calls.end(), [&](const Called& call) {
    return !(call.signature == first.signature);
  });
  CONVOY_CHECK(other != calls.end(), "nobody disagrees");
  const std::string text =
      concat(operation_prefix(speaker), "ranks disagree: rank 0 called ", describe_called(first),
             ", rank ", other - calls.begin(), " called ", describe_called(*other),
             "; no data was touched; ", advice_for(first, *other));
  throw Disagreement(text, std::move(calls));
}

void fail_shapes(const Speaker& speaker, const ShapePair& shapes) {
  const bool both = !shapes.sent.empty() && !shapes.expected.empty();
  const auto name = [](const std::string& shape) {
    return shape.empty() ? std::string("no shape") : concat("a tensor of shape ", shape);
  };
  fail(ErrorKind::kInvalidArgument, operation_prefix(speaker), "ranks disagree: rank ",
       shapes.source, " sends ", name(shapes.sent), " to rank ", shapes.target, ", which expects ",
       name(shapes.expected), "; no data was touched; ", both ? kEqualShapes : kEqualSetting);
}

void fail_counts(const Speaker& speaker, DataType type, const CountPair& counts) {
  fail(ErrorKind::kInvalidArgument, operation_prefix(speaker), "ranks disagree: rank ",
       counts.source, " sends ", counts.sent, " x ", to_string(type), " to rank ", counts.target,
       ", which expects ", counts.expected, "; no data was touched");
}

}  // namespace convoy::coll
