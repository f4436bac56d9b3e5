#include "ddp/verdict.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "base/error.h"
#include "base/wire.h"
#include "ddp/agreement.h"
#include "ddp/bucket.h"

namespace convoy {
namespace {

constexpr std::size_t kHead = 1 + 3 * 8 + sizeof(Stamps);

}  // namespace

Verdict::Verdict(const ProcessGroup& group, std::size_t parameters)
    : bytes_(allocate_for(
          group,
          static_cast<std::int64_t>(kHead * static_cast<std::size_t>(group.size()) + parameters),
          at::kByte)),
      seen_(static_cast<std::size_t>(group.size())),
      stamps_(seen_.size()),
      used_(parameters) {}

bool Verdict::reach(const ProcessGroup& group, const Ballot& mine) {
  const auto bytes = wire_bytes(bytes_);
  const auto rank = static_cast<std::size_t>(group.rank());
  WireWriter out(bytes);
  out.put_zeros(kHead * rank);
  out.put(mine.outcome);
  out.put(mine.backward);
  out.put(mine.forwards);
  out.put(mine.layout);
  out.put(mine.stamps);
  out.put_zeros(kHead * (seen_.size() - rank - 1));
  for (std::size_t i = 0; i < used_.size(); ++i) out.put(std::uint8_t{mine.used[i]});

  group.all_reduce(bytes_, {.op = ReduceOp::kMax});

  WireReader in(bytes, "verdict");
  for (std::size_t r = 0; r < seen_.size(); ++r) {
    seen_[r] = {in.take<Ending>(), in.take<std::uint64_t>(), in.take<std::uint64_t>(),
                in.take<std::uint64_t>()};
    stamps_[r] = in.take<Stamps>();
  }
  for (auto used : used_) used = in.take<std::uint8_t>() != 0;
  return std::all_of(seen_.begin(), seen_.end(), [&](const Seen& other) {
    return other.outcome == Ending::kGood && other.backward == mine.backward &&
           (other.forwards == kAnyForwards || other.forwards == forwards()) &&
           other.layout == mine.layout;
  });
}

std::uint64_t Verdict::forwards() const {
  for (const Seen& seen : seen_) {
    if (seen.forwards != kAnyForwards) return seen.forwards;
  }
  return kAnyForwards;
}

Ending Verdict::worst() const {
  Ending worst = Ending::kGood;
  for (const Seen& seen : seen_) worst = std::max(worst, seen.outcome);
  return worst;
}

std::uint64_t Verdict::last_backward() const {
  std::uint64_t last = 0;
  for (const Seen& seen : seen_) last = std::max(last, seen.backward);
  return last;
}

std::string Verdict::explain(const ProcessGroup& group, const std::string& text) const {
  const auto texts = gather_texts(group, text);
  const Ending worst_seen = worst();
  const auto is_cause = [&](Ending outcome) {
    if (worst_seen >= Ending::kFailed) return outcome >= Ending::kFailed;
    return outcome == worst_seen && outcome != Ending::kGood;
  };
  std::vector<std::string> causes(seen_.size());
  for (std::size_t r = 0; r < seen_.size(); ++r) {
    if (is_cause(seen_[r].outcome)) causes[r] = texts[r];
  }
  std::string result = by_cause(causes);
  const auto counting = std::find_if(
      seen_.begin(), seen_.end(), [](const Seen& seen) { return seen.forwards != kAnyForwards; });
  for (std::size_t r = 1; r < seen_.size() && result.empty(); ++r) {
    if (seen_[r].backward != seen_[0].backward) {
      result = concat("ranks are out of step: rank 0 is in backward ", seen_[0].backward, ", rank ",
                      r, " in backward ", seen_[r].backward);
    } else if (seen_[r].forwards != kAnyForwards && seen_[r].forwards != forwards()) {
      result = concat("ranks are out of step: before this backward rank ", counting - seen_.begin(),
                      " ran forward ", forwards(), " times, rank ", r, " ", seen_[r].forwards,
                      " times. Did a backward fail on one of them before it came to the model, or ",
                      "was it left out? Extra forwards go under NoGradGuard, or in eval mode");
    } else if (seen_[r].layout != seen_[0].layout) {
      result = concat("rank ", r, " trains other parameters than rank 0, or reduces them in ",
                      "another way, or this is another model's backward: freeze, thaw, set_reduce ",
                      "and run models on all ranks alike");
    }
  }
  return result;
}

}  // namespace convoy
