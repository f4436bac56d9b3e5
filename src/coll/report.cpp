#include "coll/report.h"

#include "base/error.h"

namespace convoy::coll {

std::string operation_prefix(const Speaker& speaker) {
  return concat(to_string(speaker.op), " #", speaker.number, ", group \"", speaker.group,
                "\", rank ", speaker.rank, " of ", speaker.size, ": ");
}

void fail_signatures(const Speaker& speaker, const Signature& first, int rank,
                     const Signature& other) {
  fail(ErrorKind::kInvalidArgument, operation_prefix(speaker), "ranks disagree: rank 0 called ",
       first.to_string(), ", rank ", rank, " called ", other.to_string(),
       "; no data was touched; every rank must make the same calls in the same order");
}

void fail_counts(const Speaker& speaker, DataType type, const CountPair& counts) {
  fail(ErrorKind::kInvalidArgument, operation_prefix(speaker), "ranks disagree: rank ",
       counts.source, " sends ", counts.sent, " x ", to_string(type), " to rank ", counts.target,
       ", which expects ", counts.expected, "; no data was touched");
}

}  // namespace convoy::coll
