#include "agent/roster.h"

#include <memory>
#include <mutex>
#include <utility>

#include "agent/peer.h"
#include "base/error.h"

namespace convoy::agent {
namespace {

constexpr std::size_t kMostEarly = 4096;

}  // namespace

void Roster::add(const std::string& name, const transport::Address& address) {
  peers_.push_back(
      std::make_unique<Peer>(Worker{name, static_cast<WorkerId>(peers_.size())}, address));
}

void Roster::begin(const Id& session, Names names, Growth growth) {
  session_ = session;
  names_ = std::move(names);
  grows_ = growth == Growth::kGrows;
  begun_.store(true, std::memory_order_release);
}

void Roster::set_name(WorkerId worker, const std::string& name) {
  const std::unique_lock lock(names_mutex_);
  names_.insert_or_assign(name, worker);
}

void Roster::check_not_begun() const { CONVOY_CHECK(!begun_.load()); }

void Roster::check_grows() const { CONVOY_CHECK(begun_.load() && grows_); }

const Worker* Roster::find(std::string_view name) const {
  std::shared_lock lock(names_mutex_, std::defer_lock);
  if (grows_) lock.lock();
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : &peers_[found->second]->worker;
}

bool EarlyHellos::keep(transport::Remote& remote, std::span<const std::byte> head,
                       std::span<const std::byte> table) {
  auto kept = kept_.lock();
  if (kept->size() >= kMostEarly) return false;
  kept->push_back({&remote, {head.begin(), head.end()}, {table.begin(), table.end()}});
  return true;
}

std::vector<EarlyHellos::Kept> EarlyHellos::take() { return std::exchange(*kept_.lock(), {}); }

void EarlyHellos::drop(const transport::Remote& remote) {
  std::erase_if(*kept_.lock(), [&](const Kept& kept) { return kept.remote == &remote; });
}

}  // namespace convoy::agent
