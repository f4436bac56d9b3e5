// What another process may send over its connection to the Fabric: frames, and descriptors with
// them. Nonsense loses the peer; memory is mapped only if all of a segment is there.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "base/loop.h"
#include "convoy/error.h"
#include "os/segment.h"
#include "transport/shm/peer.h"

namespace {

using namespace convoy;
using namespace convoy::shm;

void require(bool condition) {
  if (!condition) std::abort();
}

// Until everything that was sent has been read.
void run_once(Loop& loop) {
  loop.post([&loop] { loop.post([&loop] { loop.stop(); }); });
  loop.run();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kSegment = 8192;
  static const Segment segment = Segment::create(kSegment, "fuzz");
  Loop loop;
  auto [ours, theirs] = Socket::pair();
  const auto peer = std::make_shared<Peer>(ProcessInfo{.id = {}, .pid = ::getpid()},
                                           std::move(ours), UniqueFd(::eventfd(0, EFD_CLOEXEC)));
  loop.post([&] { peer->start_on_loop(loop); });
  run_once(loop);
  // Each part: how many bytes, and which descriptor goes with them.
  std::span<const std::uint8_t> left(data, size);
  while (left.size() > 2 && !peer->lost()) {
    const std::size_t length = std::min<std::size_t>(left[0] % 64 + 1, left.size() - 2);
    const std::uint8_t what = left[1];
    const auto bytes = std::as_bytes(left.subspan(2, length));
    left = left.subspan(2 + length);
    const UniqueFd plain(::eventfd(0, EFD_CLOEXEC));
    const int descriptors[] = {what % 4 == 1 ? segment.fd() : plain.get(), plain.get()};
    const std::size_t count = what % 4 == 0 ? 0 : what % 4 == 3 ? 2 : 1;
    try {
      theirs.send(bytes, Deadline::after(std::chrono::seconds(1)), {descriptors, count});
    } catch (const Error&) {  // it has closed
    }
    run_once(loop);
  }
  // Whatever it believes to have must be usable, all of it.
  for (SegmentId id = 0; id < 4; ++id) {
    const auto kept = peer->keep(id);
    if (!kept) continue;
    require(kept->size() <= kSegment);
    const std::byte* const first =
        peer->resolve({id, 0}, kept->size(), Deadline::after(std::chrono::seconds(1)));
    volatile auto last = first[kept->size() - 1];
    static_cast<void>(last);
    try {
      peer->resolve({id, kept->size()}, 1, Deadline::after(std::chrono::seconds(1)));
      std::abort();
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kInvalidArgument);
    }
  }
  return 0;
}
