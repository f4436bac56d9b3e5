#include "base/log.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <forward_list>
#include <mutex>
#include <string>

namespace convoy {
namespace {

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Written by set_log_level, read by every thread; no other memory depends on it: relaxed.
std::atomic<LogLevel>& level_word() {
  static std::atomic<LogLevel> level{log_level_from_environment()};
  return level;
}

// The name is read without a lock, since a child forked while another thread held it could never
// log. Names are few and set once, so old ones are kept: a reader may still look at one.
std::atomic<const std::string*> current_name{nullptr};

const std::string* keep_name(std::string_view name) {
  static auto* const mutex = new std::mutex;
  static auto* const names = new std::forward_list<std::string>;  // guarded by mutex; never freed:
                                                                  // threads may log until the end
  const std::lock_guard lock(*mutex);
  return &names->emplace_front(name);
}

// Read once: localtime_r takes a lock, which must not be held when this process forks.
long seconds_east_of_utc() {
  static const long offset = [] {
    const time_t now = ::time(nullptr);
    tm local{};
    ::localtime_r(&now, &local);
    return local.tm_gmtoff;
  }();
  return offset;
}

char letter(LogLevel level) { return "-EWID"[static_cast<int>(level)]; }

std::string line_of(LogLevel level, std::string_view text) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const auto second = static_cast<int>((now.tv_sec + seconds_east_of_utc()) % 86400);
  char head[64];
  std::snprintf(head, sizeof head, "[convoy %c %02d:%02d:%02d.%03d ", letter(level), second / 3600,
                second / 60 % 60, second % 60, static_cast<int>(now.tv_nsec / 1'000'000));
  std::string line = head;
  const std::string* name = current_name.load(std::memory_order_acquire);
  if (name && !name->empty()) line += *name + " ";
  return line + concat("pid ", ::getpid(), "] ", text, "\n");
}

}  // namespace

LogLevel log_level() { return level_word().load(std::memory_order_relaxed); }
void set_log_level(LogLevel level) { level_word().store(level, std::memory_order_relaxed); }

LogLevel parse_log_level(std::string_view text) {
  const std::string level = lower_case(text);
  if (level == "off") return LogLevel::kOff;
  if (level == "error") return LogLevel::kError;
  if (level == "info") return LogLevel::kInfo;
  if (level == "debug") return LogLevel::kDebug;
  return LogLevel::kWarn;
}

LogLevel log_level_from_environment() {
  LogLevel level = parse_log_level(environment("CONVOY_LOG"));
  std::string debug = lower_case(environment("CONVOY_DEBUG"));
  if (debug.empty()) debug = lower_case(environment("TORCH_DISTRIBUTED_DEBUG"));
  if (debug == "info") level = std::max(level, LogLevel::kInfo);
  if (debug == "detail") level = std::max(level, LogLevel::kDebug);
  return level;
}

void set_log_name(std::string_view name) {
  current_name.store(keep_name(name), std::memory_order_release);
}

void write_log(LogLevel level, std::string_view text) noexcept {
  const int saved = errno;  // callers log between a failed call and the look at its errno
  try {
    const std::string line = line_of(level, text);
    // A log that cannot be written is lost on purpose: there is nobody to tell.
    std::string_view rest = line;
    while (!rest.empty()) {
      const ssize_t n = ::write(STDERR_FILENO, rest.data(), rest.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
      rest.remove_prefix(
          static_cast<std::size_t>(n));  // a line longer than a full pipe has room for
    }
  } catch (...) {
  }
  errno = saved;
}

}  // namespace convoy
