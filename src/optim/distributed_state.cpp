// What a distributed optimizer keeps, in archives.
#include <ATen/Functions.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <map>

#include "ddp/hook_state.h"
#include "optim/distributed_optimizer_impl.h"
#include "optim/optimizer_rule.h"
#include "rpc/recording.h"

namespace convoy {
namespace {

constexpr const char* kRulesName = "rules";

}  // namespace

std::vector<detail::KeptOfParameter> DistributedOptimizer::Impl::kept_of(
    const std::string& owner, detail::LocalOptimizer::Kept with) const {
  const rpc::detail::RecorderScope not_recorded(nullptr);
  std::vector<rpc::Future<std::vector<detail::KeptOfParameter>>> others;
  std::vector<detail::KeptOfParameter> all;
  for (const std::size_t i : owners_named(owner)) {
    if (owners_[i].here) {
      all = owners_[i].here->kept(with);
    } else {
      others.push_back(
          owners_[i].reference.with(call_options()).rpc_async<&detail::LocalOptimizer::kept>(with));
    }
  }
  for (auto& other : others) {
    for (const detail::KeptOfParameter& one : other.wait()) all.push_back(one);
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.number < b.number; });
  return all;
}

void DistributedOptimizer::Impl::save(torch::serialize::OutputArchive& archive,
                                      const std::string& owner) const {
  ByParameter steps, rules;
  std::array<ByParameter, kMostStates> states;
  for (const detail::KeptOfParameter& one : kept_of(owner, detail::LocalOptimizer::Kept::kAll)) {
    const auto number = static_cast<std::size_t>(one.number);
    steps[number] = at::full({1}, one.steps, at::kLong);
    rules[number] = at::full({1}, static_cast<std::int64_t>(one.rule), at::kLong);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      if (one.states.at(k).defined()) states[k][number] = one.states[k];
    }
  }
  write_state(archive, kCountsName, steps);
  write_state(archive, kRulesName, rules);
  for (std::size_t k = 0; k < kMostStates; ++k) write_state(archive, kStateNames[k], states[k]);
}

void DistributedOptimizer::Impl::load(torch::serialize::InputArchive& archive,
                                      const std::string& owner) {
  const auto steps = read_state(archive, kCountsName);
  const auto rules = read_state(archive, kRulesName);
  std::array<ByParameter, kMostStates> states;
  for (std::size_t k = 0; k < kMostStates; ++k) states[k] = read_state(archive, kStateNames[k]);
  // Compared here, so that an archive of something else changes nothing anywhere.
  std::map<std::uint64_t, detail::KeptOfParameter> loaded;
  for (detail::KeptOfParameter& one : kept_of(owner, detail::LocalOptimizer::Kept::kShapes)) {
    const auto number = static_cast<std::size_t>(one.number);
    const auto count = steps.find(number), rule = rules.find(number);
    if (count == steps.end() || rule == rules.end()) {
      refuse_distributed("the archive has no parameter ", number);
    }
    if (rule->second.item<std::int64_t>() != static_cast<std::int64_t>(one.rule)) {
      refuse_distributed("the archive has parameter ", number, " with another rule");
    }
    one.steps = count->second.item<std::int64_t>();
    one.states.resize(kMostStates);
    for (std::size_t k = 0; k < kMostStates; ++k) {
      const auto found = states[k].find(number);
      if (found == states[k].end()) continue;
      check_state(found->second, static_cast<std::int64_t>(one.elements), number, kDistributed);
      one.states[k] = found->second;
    }
    loaded.emplace(one.number, std::move(one));
  }
  if (owner.empty() && steps.size() != loaded.size()) {
    refuse_distributed("the archive has ", steps.size(), " parameters, not ", loaded.size());
  }
  const auto part_of = [&](std::size_t i) {
    std::vector<detail::KeptOfParameter> part;
    for (const detail::OwnedParameter& parameter : owners_[i].parameters) {
      part.push_back(loaded.at(parameter.number));
    }
    return part;
  };
  at_owners(owners_named(owner), "load", "loaded",
            {[&](const auto& target, std::size_t i) {
               return target.template rpc_async<&detail::LocalOptimizer::load>(part_of(i));
             },
             [&](detail::LocalOptimizer& here, std::size_t i) { return here.load(part_of(i)); },
             [](OwnerStep& step, std::size_t, const detail::LocalStep& result) {
               step.stepped = result.stepped;
             }});
}

}  // namespace convoy
