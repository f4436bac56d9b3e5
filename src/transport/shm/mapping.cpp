#include "transport/shm/mapping.h"

#include <map>

#include "base/guarded.h"
#include "os/fork_guard.h"

namespace convoy::shm {
namespace {

using KnownMappings = Guarded<std::map<Segment::Key, std::weak_ptr<const Segment>>>;

KnownMappings& known_mappings() {
  static PerProcess<KnownMappings> known;
  return known.get();
}

}  // namespace

std::pair<Mapping, UniqueFd> make_mapping(std::size_t bytes, const std::string& label) {
  Segment segment = Segment::create(bytes, label);
  const Segment::Key key = segment.key();
  UniqueFd fd = duplicate(segment.fd());
  segment.close_descriptor();
  auto mapping = std::make_shared<const Segment>(std::move(segment));
  auto known = known_mappings().lock();
  std::erase_if(*known, [](const auto& item) { return item.second.expired(); });
  (*known)[key] = mapping;
  return {std::move(mapping), std::move(fd)};
}

Mapping adopt_mapping(UniqueFd fd, std::size_t bytes) {
  {
    auto known = known_mappings().lock();
    const auto found = known->find(Segment::key_of(fd.get()));
    if (found != known->end()) {
      if (auto mapping = found->second.lock(); mapping && mapping->size() == bytes) return mapping;
    }
  }
  Segment adopted = Segment::adopt(std::move(fd), bytes);
  adopted.close_descriptor();
  return std::make_shared<const Segment>(std::move(adopted));
}

}  // namespace convoy::shm
