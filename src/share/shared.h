#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/guarded.h"
#include "base/unique_fd.h"
#include "convoy/share.h"
#include "os/segment.h"
#include "os/socket.h"

namespace convoy::share {

// What a Shared stands for in this process: there is one for each object, however often it came.
struct Shared::Impl {
  explicit Impl(Kind is) : kind(is) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  virtual ~Impl();

  // The memory comes first.
  virtual std::vector<int> descriptors() const = 0;

  // First of all in destructors of what derives from this: offers use the descriptors.
  void end_offers();

  const Kind kind;

  class Offer;
  Guarded<std::vector<std::shared_ptr<Offer>>> offers;  // names under which others find it
};

// The objects that this process has, by their memory. A new one is made and an old one ends under
// its lock, so that there is never a second.
class SharedObjects {
 public:
  using Make = std::function<std::shared_ptr<Shared::Impl>()>;

  // The one that is there, or a new one.
  static std::shared_ptr<Shared::Impl> find_or(const Segment::Key& key, const Make& make);
  // The object of this key ends, unless it has come again in the meantime.
  static void end(const Segment::Key& key, const std::function<void()>& finish);
};

Segment adopt_segment(UniqueFd descriptor);
std::shared_ptr<Shared::Impl> adopt_queue(std::vector<UniqueFd> descriptors);
std::shared_ptr<Shared::Impl> adopt_small(UniqueFd descriptor);

// kInvalidArgument unless the object is of this kind.
void require(const Shared& object, Shared::Kind kind);

}  // namespace convoy::share
