#include "transport/shm/peer.h"

#include <sys/epoll.h>
#include <sys/mman.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "base/log.h"

#ifndef MADV_POPULATE_WRITE  // Linux 5.14; glibc 2.36 does not name it everywhere
#define MADV_POPULATE_WRITE 23
#endif

namespace convoy::shm {
namespace {

// A stopped process does not read; descriptors wait in the socket meanwhile, and few are sent.
constexpr auto kSendTimeout = std::chrono::seconds(30);
// A dying process closes its socket a moment before its pidfd tells how it ended.
constexpr auto kExitGrace = std::chrono::milliseconds(200);
// Who closes a dialed connection says so before: without that it dies, which takes long where many
// do.
constexpr auto kDialedGrace = std::chrono::seconds(2);

}  // namespace

std::string ProcessInfo::encode() const {
  return concat(id.to_string(), " ", pid, " ", start_time, " ", domain, " ", boot, " ", host, " ",
                socket, " ", cores.to_string());
}

ProcessInfo ProcessInfo::decode(const std::string& text) {
  std::istringstream in(text);
  ProcessInfo info;
  std::string id, cores;
  if (!(in >> id >> info.pid >> info.start_time >> info.domain >> info.boot >> info.host >>
        info.socket >> cores) ||
      info.pid <= 0) {
    fail(ErrorKind::kInvalidArgument, "the store has a malformed process description: '", text,
         "'");
  }
  info.id = Id::parse(id);
  info.cores = CoreSet::parse(cores);
  return info;
}

std::string describe_end(pid_t pid, int pidfd) {
  const auto status = exit_status_of(pid, pidfd);
  if (!status) return "has ended (how is not known: see its launcher's report)";
  return concat(status->signal != 0 ? "was killed by " : "exited with ", status->to_string());
}

Peer::Peer(ProcessInfo info, Socket socket, UniqueFd pidfd)
    : info_(std::move(info)), socket_(std::move(socket)), pidfd_(std::move(pidfd)) {}

std::optional<std::string> Peer::loss() {
  if (!lost()) return std::nullopt;
  return state_.lock()->loss;
}

bool Peer::ends(const Deadline& deadline) {
  if (!lost() && !closed_.load(std::memory_order_acquire)) return false;
  auto state = state_.lock();
  return state.wait(deadline, [&] { return state->loss.has_value(); });
}

void Peer::subscribe(const std::shared_ptr<Alarm>& alarm) {
  {
    auto state = state_.lock();
    std::erase_if(state->alarms, [](const auto& weak) { return weak.expired(); });
    state->alarms.push_back(alarm);
    if (!state->loss) return;
  }
  alarm->ring();
}

std::byte* Peer::resolve(const Location& location, std::size_t bytes, const Deadline& deadline) {
  auto state = state_.lock();
  const bool came = state.wait(deadline, [&] {
    return state->segments.contains(location.segment) || state->loss.has_value();
  });
  const auto found = state->segments.find(location.segment);
  if (found == state->segments.end()) {
    if (came) fail(ErrorKind::kPeerLost, "pid ", info_.pid, " ", *state->loss);
    fail(ErrorKind::kTimeout, "shared memory of pid ", info_.pid,
         " did not arrive by the deadline");
  }
  const Segment& segment = *found->second;
  if (location.offset > segment.size() || bytes > segment.size() - location.offset) {
    fail(ErrorKind::kInvalidArgument, "pid ", info_.pid, " published ", bytes, " bytes at offset ",
         location.offset, " of a segment of ", segment.size());
  }
  return segment.data() + location.offset;
}

std::shared_ptr<const Segment> Peer::keep(SegmentId id) {
  auto state = state_.lock();
  const auto found = state->segments.find(id);
  return found == state->segments.end() ? nullptr : found->second;
}

void Peer::send(const Frame& frame, std::span<const int> descriptors) {
  const std::lock_guard lock(send_mutex_);
  try {
    socket_.send(frame, Deadline::after(kSendTimeout), descriptors);
  } catch (const Error& error) {
    // A peer that is gone needs nothing; the watch thread finds out by itself.
    if (error.kind() != ErrorKind::kPeerLost) throw;
  }
}

void Peer::send_segment(SegmentId id, const Segment& segment) {
  const int fd = segment.fd();
  send({.type = Frame::kSegment, .segment = id, .bytes = segment.size()}, {&fd, 1});
}

void Peer::send_drop(SegmentId id) { send({.type = Frame::kDrop, .segment = id}, {}); }

bool Peer::try_note(std::uint64_t number, std::uint64_t bytes, int descriptor, const Id& id) {
  const Frame frame{.type = Frame::kNote, .process = id, .segment = number, .bytes = bytes};
  const std::lock_guard lock(send_mutex_);
  try {
    socket_.send(frame, Deadline::after(std::chrono::seconds(0)),
                 {&descriptor, descriptor < 0 ? std::size_t{0} : std::size_t{1}});
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kResource) return false;
    if (error.kind() != ErrorKind::kPeerLost) throw;
  }
  return true;
}

void Peer::send_bye() noexcept {
  const std::lock_guard lock(send_mutex_);
  try {
    socket_.try_send({.type = Frame::kBye});
  } catch (const Error&) {
    // The end of the stream says as much, a little later.
  }
  socket_.socket().shutdown();
}

void Peer::start_on_loop(Loop& loop) {
  CONVOY_DCHECK(loop.in_loop());
  loop_ = &loop;
  try {
    socket_watch_ = loop.watch(descriptor(), EPOLLIN, [this](std::uint32_t) { receive_on_loop(); });
    pid_watch_ = loop.watch(pidfd_.get(), EPOLLIN, [this](std::uint32_t) { exited_on_loop(); });
  } catch (const Error& error) {
    lose_on_loop(concat("cannot be watched by this process: ", error.what()));
  }
}

void Peer::stop_on_loop() {
  if (!loop_) return;
  CONVOY_DCHECK(loop_->in_loop());
  loop_->unwatch(socket_watch_);
  loop_->unwatch(pid_watch_);
  loop_->cancel(grace_);
  state_.lock()->alarms.clear();
}

void Peer::receive_on_loop() {
  CONVOY_DCHECK(loop_->in_loop());
  try {
    while (const auto frame = socket_.try_receive()) {
      take_frame_on_loop(*frame);
      if (lost()) return;
    }
    if (socket_.ended()) closed_on_loop();
  } catch (const Error& error) {
    const bool mine = error.kind() == ErrorKind::kResource;
    lose_on_loop(concat(mine ? "cannot be heard by this process: " : "sent something unusable: ",
                        error.what()));
  }
}

void Peer::take_frame_on_loop(const Frame& frame) {
  CONVOY_DCHECK(loop_->in_loop());
  if (frame.type == Frame::kSegment) {
    Segment segment = Segment::adopt(socket_.take_descriptor(), frame.bytes, Segment::Warm::kNo);
    segment.close_descriptor();
    const auto shared = std::make_shared<const Segment>(std::move(segment));
    state_.lock()->segments.try_emplace(frame.segment, shared);
    state_.notify();
    warm_on_loop(shared, 0);
  } else if (frame.type == Frame::kDrop) {
    state_.lock()->segments.erase(frame.segment);
  } else if (frame.type == Frame::kNote && notes_) {
    auto descriptors = socket_.take_descriptors(0, 1);
    notes_(*this, frame, descriptors.empty() ? UniqueFd() : std::move(descriptors[0]));
  } else if (frame.type == Frame::kBye && notes_) {
    lose_on_loop("closed its endpoint, or the connection to it");
  } else {
    fail(ErrorKind::kInvalidArgument, "unknown message ", frame.type);
  }
}

// Fills the page tables before somebody needs them. A piece at a time: gigabytes of small pages
// take seconds, and a death must be heard meanwhile. Where the kernel cannot, the first use does
// it.
void Peer::warm_on_loop(const std::weak_ptr<const Segment>& segment, std::size_t begin) {
  CONVOY_DCHECK(loop_->in_loop());
  constexpr std::size_t kPiece = std::size_t{32} << 20;
  const auto mapped = segment.lock();
  if (!mapped || begin >= mapped->size()) return;
  const std::size_t bytes = std::min(kPiece, mapped->size() - begin);
  if (::madvise(mapped->data() + begin, bytes, MADV_POPULATE_WRITE) < 0 && errno != EAGAIN) return;
  loop_->post([weak = weak_from_this(), segment, next = begin + bytes] {
    if (const auto peer = weak.lock()) peer->warm_on_loop(segment, next);
  });
}

void Peer::exited_on_loop() {
  CONVOY_DCHECK(loop_->in_loop());
  // What it sent before it died counts: memory that it told of is mapped by all survivors, or they
  // would disagree about what can still be completed.
  receive_on_loop();
  lose_on_loop(describe_end(info_.pid, pidfd_.get()));
}

void Peer::closed_on_loop() {
  CONVOY_DCHECK(loop_->in_loop());
  closed_.store(true, std::memory_order_release);
  loop_->unwatch(socket_watch_);
  const auto until = Deadline::Clock::now() + (notes_ ? kDialedGrace : kExitGrace);
  grace_ = loop_->call_at(until, [weak = weak_from_this()] {
    const auto peer = weak.lock();
    if (!peer || peer->lost()) return;
    peer->lose_on_loop("closed its connection but still runs (did it call exec?)");
  });
}

void Peer::lose_on_loop(const std::string& why) {
  CONVOY_DCHECK(loop_->in_loop());
  loop_->unwatch(socket_watch_);
  loop_->unwatch(pid_watch_);
  std::vector<std::weak_ptr<Alarm>> alarms;
  {
    auto state = state_.lock();
    if (state->loss) return;
    state->loss = why;
    alarms.swap(state->alarms);
  }
  // If it lives, it hears that this side has given up, and both can connect anew.
  socket_.socket().shutdown();
  lost_.store(true, std::memory_order_release);
  state_.notify();
  log_info("process ", info_.pid, " ", why);
  for (const auto& weak : alarms) {
    if (const auto alarm = weak.lock()) alarm->ring();
  }
}

}  // namespace convoy::shm
