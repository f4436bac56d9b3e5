// Objects that processes use together: who has them.
#include "share/shared.h"

#include <sys/stat.h>

#include <array>
#include <map>

#include "base/error.h"

namespace convoy::share {
namespace {

using Objects = std::map<Segment::Key, std::weak_ptr<Shared::Impl>>;

Guarded<Objects>& objects() {
  static auto* const known = new Guarded<Objects>;
  return *known;
}

}  // namespace

std::shared_ptr<Shared::Impl> SharedObjects::find_or(const Segment::Key& key, const Make& make) {
  auto known = objects().lock();
  auto& place = (*known)[key];
  if (auto there = place.lock()) return there;
  auto made = make();
  place = made;
  return made;
}

void SharedObjects::end(const Segment::Key& key, const std::function<void()>& finish) {
  auto known = objects().lock();
  const auto found = known->find(key);
  if (found != known->end() && !found->second.expired()) return;
  if (found != known->end()) known->erase(found);
  finish();
}

Shared Shared::adopt(const std::vector<int>& descriptors) {
  std::vector<UniqueFd> owned;
  for (const int descriptor : descriptors) owned.emplace_back(descriptor);
  if (owned.size() != 1 && owned.size() != 3) {
    fail(ErrorKind::kInvalidArgument, owned.size(),
         " descriptors are not a queue, event, barrier or lock");
  }
  if (owned.size() == 3) return Shared(adopt_queue(std::move(owned)));
  return Shared(adopt_small(std::move(owned[0])));
}

Shared::Impl& Shared::impl() const {
  if (!impl_) {
    fail(ErrorKind::kInvalidArgument, "this object is not a queue, event, barrier or lock yet");
  }
  return *impl_;
}

std::vector<int> Shared::descriptors() const { return impl().descriptors(); }
Shared::Kind Shared::kind() const { return impl().kind; }

void require(const Shared& object, Shared::Kind kind) {
  static constexpr std::array kNames = {"", "a queue", "an event", "a barrier", "a lock"};
  if (object.kind() != kind) {
    fail(ErrorKind::kInvalidArgument, "this is ", kNames[static_cast<std::size_t>(object.kind())],
         ", not ", kNames[static_cast<std::size_t>(kind)]);
  }
}

Segment adopt_segment(UniqueFd descriptor) {
  struct stat info {};
  if (::fstat(descriptor.get(), &info) < 0) fail_errno("looking at memory of another process");
  return Segment::adopt(std::move(descriptor), static_cast<std::size_t>(info.st_size),
                        Segment::Warm::kYes);
}

}  // namespace convoy::share
