#include "launch/output.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/error.h"

namespace convoy::launch {
namespace {

// Ranks are not read from while this much waits for a slow reader ...
constexpr std::size_t kFull = std::size_t{1} << 20;
// ... and are again below this.
constexpr std::size_t kResume = kFull / 4;
constexpr std::size_t kReadSize = 64 * 1024;

bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

bool wants_colour(int fd) {
  const char* refused = std::getenv("NO_COLOR");
  return isatty(fd) && !(refused && *refused);
}

}  // namespace

std::string line_prefix(int rank, bool continues, bool colour) {
  const std::string plain = concat("[", rank, continues ? "+" : "", "]");
  if (!colour) return plain + " ";
  constexpr std::array<int, 6> kColours = {36, 33, 32, 35, 34, 31};
  return concat("\033[", kColours[static_cast<std::size_t>(rank) % kColours.size()], "m", plain,
                "\033[0m ");
}

Output::Output(Loop& loop, const OutputSettings& settings, std::function<void(Channel)> on_closed)
    : loop_(loop),
      settings_(settings),
      raw_(settings.ranks == 1 && !settings.prefix),
      on_closed_(std::move(on_closed)) {
  screens_[0] = {std::make_shared<Writer>("stdout", writer_events()), settings.out,
                 wants_colour(settings.out)};
  // Two threads that write to one pipe or terminal would cut each other's lines.
  screens_[1] = same_file(settings.out, settings.err)
                    ? screens_[0]
                    : Screen{std::make_shared<Writer>("stderr", writer_events()), settings.err,
                             wants_colour(settings.err)};
  if (!settings.log_folder.empty()) {
    log_writer_ = std::make_shared<Writer>("log files", writer_events());
  }
}

Output::~Output() {
  for (auto& stream : streams_) close(*stream);
}

Writer::Events Output::writer_events() {
  return {
      .failed = [this](int fd,
                       int error) { loop_.post([this, fd, error] { failed_on_loop(fd, error); }); },
      .progress = [this] { loop_.post([this] { progress_on_loop(); }); }};
}

void Output::failed_on_loop(int fd, int error) {
  CONVOY_DCHECK(loop_.in_loop());
  const auto log = log_files_.find(fd);
  if (log != log_files_.end()) {
    note(concat("convoy: writing ", log->second, ": ", errno_text(error),
                "; the rest of this output is not logged\n"));
    return;
  }
  const Channel channel = fd == settings_.out ? Channel::kOut : Channel::kErr;
  for (auto& candidate : screens_) candidate.broken |= candidate.fd == fd;
  if (error == EPIPE || error == ECONNRESET) {
    on_closed_(channel);
  } else {
    note(concat("convoy: writing standard ", channel == Channel::kOut ? "output" : "error", ": ",
                errno_text(error), "; the rest of it is dropped\n"));
  }
}

void Output::progress_on_loop() {
  CONVOY_DCHECK(loop_.in_loop());
  for (auto& stream : streams_) {
    if (stream->fd && stream->watch == 0 && has_room(*stream)) watch(*stream);
  }
  if (on_idle_ && idle()) std::exchange(on_idle_, nullptr)();
}

UniqueFd Output::open(int rank, Channel channel) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("making a pipe for the output of rank ", rank);
  auto stream = std::make_unique<Stream>();
  stream->rank = rank;
  stream->channel = channel;
  stream->fd.reset(ends[0]);
  UniqueFd childs(ends[1]);
  // Only our end: a rank would take a non-blocking standard output for a full one.
  if (fcntl(ends[0], F_SETFL, O_NONBLOCK) < 0) fail_errno("setting up a pipe");
  if (log_writer_) {
    const std::string path =
        concat(settings_.log_folder, "/rank-", rank, channel == Channel::kOut ? ".out" : ".err");
    UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!file) fail_errno("opening the log file ", path);
    stream->log_fd = file.get();
    log_files_[file.get()] = path;
    log_fds_.push_back(std::move(file));
  }
  watch(*stream);
  streams_.push_back(std::move(stream));
  return childs;
}

void Output::watch(Stream& stream) {
  stream.watch = loop_.watch(stream.fd.get(), EPOLLIN,
                             [this, &stream](std::uint32_t) { read_on_loop(stream); });
}

// Not modify(): epoll reports a hang-up even where no event is asked for.
void Output::pause(Stream& stream) {
  if (stream.watch != 0) loop_.unwatch(std::exchange(stream.watch, 0));
}

bool Output::has_room(const Stream& stream) {
  const auto queued = [&](std::size_t limit) {
    return screen(stream.channel).writer->queued() > limit ||
           (log_writer_ && log_writer_->queued() > limit);
  };
  return !queued(stream.watch == 0 ? kResume : kFull);
}

void Output::read_on_loop(Stream& stream) {
  CONVOY_DCHECK(loop_.in_loop());
  if (!take(stream, kReadSize)) {
    close(stream);
  } else if (!has_room(stream)) {
    pause(stream);
  }
}

bool Output::take(Stream& stream, std::size_t limit) {
  std::string bytes(limit, '\0');
  ssize_t n = 0;
  do {
    n = ::read(stream.fd.get(), bytes.data(), bytes.size());
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return true;
  if (n < 0) {
    note(concat("convoy: reading the output of rank ", stream.rank, ": ", errno_text(errno),
                "; the rest of it is lost\n"));
  }
  if (n <= 0) return false;
  bytes.resize(static_cast<std::size_t>(n));
  show(stream, bytes);
  if (stream.log_fd >= 0) log_writer_->write(stream.log_fd, std::move(bytes));
  return true;
}

bool Output::is_shown(int rank) const {
  return !settings_.shown || settings_.shown->contains(rank);
}

void Output::append_line(std::string& out, const Stream& stream, std::string_view text,
                         bool continues) {
  tails_[stream.rank].add(text);
  if (raw_ || !is_shown(stream.rank)) return;
  if (settings_.prefix) out += line_prefix(stream.rank, continues, screen(stream.channel).colour);
  out += text;
  out += '\n';
}

void Output::show(Stream& stream, std::string_view bytes) {
  Screen& target = screen(stream.channel);
  std::string out;
  stream.lines.feed(bytes, [&](std::string_view text, bool continues) {
    append_line(out, stream, text, continues);
  });
  if (raw_ && is_shown(stream.rank)) out = bytes;
  if (!target.broken) target.writer->write(target.fd, std::move(out));
}

void Output::flush_line(Stream& stream) {
  Screen& target = screen(stream.channel);
  std::string out;
  stream.lines.flush(
      [&](std::string_view text, bool continues) { append_line(out, stream, text, continues); });
  if (!target.broken) target.writer->write(target.fd, std::move(out));
}

void Output::close(Stream& stream) {
  if (!stream.fd) return;
  pause(stream);
  flush_line(stream);
  stream.fd.reset();
}

void Output::drain(int rank) {
  for (auto& stream : streams_) {
    if (stream->rank != rank || !stream->fd) continue;
    // What is in the pipe now is all the rank wrote. More may come from its children: without a
    // limit one that never stops would keep us here.
    int waiting = 0;
    if (ioctl(stream->fd.get(), FIONREAD, &waiting) < 0) waiting = 0;
    const bool open = waiting == 0 || take(*stream, static_cast<std::size_t>(waiting));
    flush_line(*stream);
    if (!open) close(*stream);
  }
}

void Output::note(std::string_view lines) {
  Screen& target = screen(Channel::kErr);
  if (!target.broken) target.writer->write(target.fd, std::string(lines));
}

void Output::save(const std::string& name, std::string_view text) {
  if (!log_writer_) return;
  const std::string path = concat(settings_.log_folder, "/", name);
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) return;  // the same text is on standard error
  log_writer_->write(file.get(), std::string(text));
  log_files_[file.get()] = path;
  log_fds_.push_back(std::move(file));
}

std::vector<std::string> Output::last_lines(int rank) const {
  const auto found = tails_.find(rank);
  return found == tails_.end() ? std::vector<std::string>() : found->second.lines();
}

bool Output::idle() const {
  return screens_[0].writer->queued() == 0 && screens_[1].writer->queued() == 0 &&
         (!log_writer_ || log_writer_->queued() == 0);
}

void Output::when_idle(std::function<void()> callback) {
  on_idle_ = std::move(callback);
  if (idle()) std::exchange(on_idle_, nullptr)();
}

void Output::abandon() {
  for (auto& target : screens_) target.writer->abandon();
  if (log_writer_) log_writer_->abandon();
}

}  // namespace convoy::launch
