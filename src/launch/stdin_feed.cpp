#include "launch/stdin_feed.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>

#include "base/error.h"

namespace convoy::launch {
namespace {

constexpr off_t kAhead = 256 * 1024;      // read from the source beyond what any rank has taken
constexpr off_t kFreeStep = 1024 * 1024;  // give taken bytes back in steps of this
constexpr std::size_t kChunk = 64 * 1024;

UniqueFd make_spool(const std::string& folder) {
  std::string path = folder + "/stdin.XXXXXX";
  UniqueFd fd(mkostemp(path.data(), O_CLOEXEC));
  if (!fd) fail_errno("making a file for standard input in ", folder);
  ::unlink(path.c_str());
  return fd;
}

void make_non_blocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) fail_errno("setting up a pipe");
}

}  // namespace

StdinFeed::StdinFeed(Loop& loop, UniqueFd source, const std::string& folder)
    : loop_(loop), source_(std::move(source)), spool_(make_spool(folder)) {
  make_non_blocking(source_.get());
}

StdinFeed::~StdinFeed() {
  end_source();
  for (auto& [rank, reader] : readers_) {
    if (reader->watch != 0) loop_.unwatch(reader->watch);
  }
}

UniqueFd StdinFeed::add(int rank) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe for the input of rank ", rank);
  UniqueFd childs(ends[0]);
  auto reader = std::make_unique<Reader>();
  reader->fd.reset(ends[1]);
  make_non_blocking(ends[1]);
  readers_[rank] = std::move(reader);
  update();
  return childs;
}

void StdinFeed::drop(int rank) {
  const auto found = readers_.find(rank);
  if (found == readers_.end()) return;
  if (found->second->watch != 0) loop_.unwatch(found->second->watch);
  readers_.erase(found);
  update();
}

off_t StdinFeed::fastest() const {
  off_t most = 0;
  for (const auto& [rank, reader] : readers_) most = std::max(most, reader->taken);
  return most;
}

void StdinFeed::end_source() {
  if (source_watch_ != 0) loop_.unwatch(std::exchange(source_watch_, 0));
  source_.reset();
}

void StdinFeed::update() {
  if (readers_.empty()) end_source();  // whoever writes to it need not go on
  const bool wanted = source_ && end_ - fastest() < kAhead;
  if (wanted && source_watch_ == 0) {
    source_watch_ = loop_.watch(source_.get(), EPOLLIN, [this](std::uint32_t) { read_on_loop(); });
  } else if (!wanted && source_watch_ != 0) {
    loop_.unwatch(std::exchange(source_watch_, 0));
  }
  for (auto at = readers_.begin(); at != readers_.end();) {
    const int rank = at->first;
    Reader& reader = *at->second;
    const bool behind = reader.taken < end_;
    if (behind && reader.watch == 0) {
      reader.watch = loop_.watch(reader.fd.get(), EPOLLOUT,
                                 [this, rank](std::uint32_t) { write_on_loop(rank); });
    } else if (!behind && reader.watch != 0) {
      loop_.unwatch(std::exchange(reader.watch, 0));
    }
    // The rank has all there will ever be: this is where it reads the end.
    at = !behind && !source_ ? readers_.erase(at) : std::next(at);
  }
}

void StdinFeed::read_on_loop() {
  CONVOY_DCHECK(loop_.in_loop());
  std::array<char, kChunk> buffer;
  const ssize_t n = ::read(source_.get(), buffer.data(), buffer.size());
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    end_source();
  } else if (pwrite(spool_.get(), buffer.data(), static_cast<std::size_t>(n), end_) != n) {
    error_ = concat("keeping standard input for slow ranks: ", errno_text(errno),
                    "; it ends here for all of them");
    end_source();
  } else {
    end_ += n;
  }
  update();
}

void StdinFeed::write_on_loop(int rank) {
  CONVOY_DCHECK(loop_.in_loop());
  Reader& reader = *readers_.at(rank);
  std::array<char, kChunk> buffer;
  const ssize_t got = pread(spool_.get(), buffer.data(), buffer.size(), reader.taken);
  if (got <= 0) return drop(rank);
  const ssize_t written = ::write(reader.fd.get(), buffer.data(), static_cast<std::size_t>(got));
  if (written < 0) {
    if (errno != EAGAIN && errno != EINTR) drop(rank);  // it closed its input, or is gone
    return;
  }
  reader.taken += written;
  free_taken();
  update();
}

void StdinFeed::free_taken() {
  off_t least = std::numeric_limits<off_t>::max();
  for (const auto& [rank, reader] : readers_) least = std::min(least, reader->taken);
  if (least - freed_ < kFreeStep) return;
  // Where the file system cannot do it the file merely stays larger.
  fallocate(spool_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, freed_, least - freed_);
  freed_ = least;
}

}  // namespace convoy::launch
