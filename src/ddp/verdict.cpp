#include "ddp/verdict.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "ddp/agreement.h"
#include "ddp/bucket.h"

namespace convoy {
namespace {

constexpr std::size_t kHead = 1 + 3 * 8 + sizeof(Stamps);
constexpr std::size_t kTextBytes = 2048;

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
  auto* const bytes = bytes_.mutable_data_ptr<std::uint8_t>();
  std::memset(bytes, 0, static_cast<std::size_t>(bytes_.numel()));
  auto* const head = bytes + kHead * static_cast<std::size_t>(group.rank());
  head[0] = static_cast<std::uint8_t>(mine.outcome);
  std::memcpy(head + 1, &mine.backward, 8);
  std::memcpy(head + 9, &mine.forwards, 8);
  std::memcpy(head + 17, &mine.layout, 8);
  std::memcpy(head + 25, &mine.stamps, sizeof(Stamps));
  auto* const map = bytes + kHead * seen_.size();
  for (std::size_t i = 0; i < used_.size(); ++i) map[i] = mine.used[i] ? 1 : 0;

  group.all_reduce(bytes_, {.op = ReduceOp::kMax});

  for (std::size_t r = 0; r < seen_.size(); ++r) {
    const auto* const other = bytes + kHead * r;
    seen_[r].outcome = static_cast<Outcome>(other[0]);
    std::memcpy(&seen_[r].backward, other + 1, 8);
    std::memcpy(&seen_[r].forwards, other + 9, 8);
    std::memcpy(&seen_[r].layout, other + 17, 8);
    std::memcpy(&stamps_[r], other + 25, sizeof(Stamps));
  }
  for (std::size_t i = 0; i < used_.size(); ++i) used_[i] = map[i] != 0;
  return std::all_of(seen_.begin(), seen_.end(), [&](const Seen& other) {
    return other.outcome == Outcome::kGood && other.backward == mine.backward &&
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

Outcome Verdict::worst() const {
  Outcome worst = Outcome::kGood;
  for (const Seen& seen : seen_) worst = std::max(worst, seen.outcome);
  return worst;
}

std::uint64_t Verdict::last_backward() const {
  std::uint64_t last = 0;
  for (const Seen& seen : seen_) last = std::max(last, seen.backward);
  return last;
}

std::string Verdict::explain(const ProcessGroup& group, const std::string& text) const {
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(kTextBytes)}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), text.data(), std::min(text.size(), kTextBytes));
  const at::Tensor all =
      at::zeros({static_cast<std::int64_t>(kTextBytes * seen_.size())}, at::kByte);
  group.all_gather_single(all, mine);

  const auto* const texts = reinterpret_cast<const char*>(all.const_data_ptr());
  const Outcome worst_seen = worst();
  const auto is_cause = [&](Outcome outcome) {
    if (worst_seen >= Outcome::kFailed) return outcome >= Outcome::kFailed;
    return outcome == worst_seen && outcome != Outcome::kGood;
  };
  std::vector<std::string> causes(seen_.size());
  for (std::size_t r = 0; r < seen_.size(); ++r) {
    if (!is_cause(seen_[r].outcome)) continue;
    const char* const from = texts + r * kTextBytes;
    causes[r] = std::string(from, strnlen(from, kTextBytes));
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
