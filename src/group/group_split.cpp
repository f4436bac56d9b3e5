// ProcessGroup: groups out of groups.
#include <ATen/Functions.h>

#include <algorithm>
#include <set>

#include "base/concat.h"
#include "base/error.h"
#include "convoy/c10d_store.h"
#include "group/process_group_impl.h"

namespace convoy {
std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ",", rank);
  return text;
}

void check_ranks(const std::string& head, const std::vector<int>& ranks, int size) {
  if (ranks.empty()) {
    fail(ErrorKind::kInvalidArgument, head, "the list of ranks is empty; name at least one");
  }
  std::set<int> seen;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size) {
      fail(ErrorKind::kInvalidArgument, head, "there is no rank ", rank, " in a group of ", size);
    }
    if (!seen.insert(rank).second) {
      fail(ErrorKind::kInvalidArgument, head, "rank ", rank, " is in the list twice");
    }
  }
}

std::optional<ProcessGroup> ProcessGroup::split(const std::vector<int>& ranks,
                                                const SplitOptions& options) const {
  impl().check_process("split");
  check_ranks(impl().head("split"), ranks, size());
  if (!impl().store && !(impl().own && !impl().shares_memory())) {  // MPI needs none
    fail(ErrorKind::kInvalidArgument, impl().head("split"),
         "the group has no store for the new ranks to meet; adopt the backend with one: "
         "ProcessGroup::from(backend, {.store = store})");
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), rank());
  if (mine == ranks.end() && impl().own) return std::nullopt;
  const int again = (*impl().splits.lock())[{options.name, ranks}]++;
  const std::string members = join_ranks(ranks);
  const auto key = concat("split/", options.name, "/", members, "/", again);
  const auto prefixed = [](const std::shared_ptr<Store>& store, const std::string& prefix) {
    return store ? with_prefix(store, prefix) : nullptr;
  };
  const auto store = prefixed(impl().store, key);

  const auto more = c10::make_intrusive<c10d::Backend::Options>(backend_name(), timeout());
  more->group_name = options.name.empty()
                         ? concat(name(), "/", members, again == 0 ? "" : concat("#", again))
                         : options.name;
  if (options.timeout != std::chrono::milliseconds::zero()) more->timeout = options.timeout;
  const Adopted adopted{.name = more->group_name,  // before a backend changes what it is given
                        .store = prefixed(store, "groups"),
                        .timeout = more->timeout};
  auto backend = impl().backend->split(
      store ? to_c10d(with_prefix(store, "backend")) : c10::intrusive_ptr<c10d::Store>(), ranks,
      more);
  if (!backend) return std::nullopt;
  if (!impl().own)
    backend->setTimeout(adopted.timeout);  // some take only options of their own kind
  return from(std::move(backend), adopted);
}

ProcessGroup ProcessGroup::split_by(int color, int key, const SplitOptions& options) const {
  const auto all = all_gather(at::tensor({color, key}, at::kLong));
  const auto table = all.accessor<std::int64_t, 2>();
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) {
    if (table[r][0] == color) ranks.push_back(r);
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return table[a][1] < table[b][1]; });
  return split(ranks, options).value();
}

}  // namespace convoy
