#include "coll/report.h"

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

std::string describe_called(const Called& called) {
  const std::string text = called.signature.to_string();
  return called.shapes.empty() ? text : concat(text, " on ", called.shapes);
}

// What to do if nothing but the tags differs.
std::string advice_for(const Called& first, const Called& other) {
  Signature same = other.signature;
  same.tag = first.signature.tag;
  if (!(same == first.signature)) return "every rank must make the same calls in the same order";
  if (first.shapes.empty() != other.shapes.empty()) return kEqualSetting;
  if (first.shapes != other.shapes) return kEqualShapes;
  return "what they gave as tags, or their types, differs";
}

}  // namespace

void fail_signatures(const Speaker& speaker, const Called& first, int rank, const Called& other) {
  fail(ErrorKind::kInvalidArgument, operation_prefix(speaker), "ranks disagree: rank 0 called ",
       describe_called(first), ", rank ", rank, " called ", describe_called(other),
       "; no data was touched; ", advice_for(first, other));
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
