#include "base/log.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

namespace convoy {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

LogLevel level_from_environment() {
  LogLevel level = parse_log_level(environment("CONVOY_LOG"));
  std::string debug(environment("CONVOY_DEBUG"));
  if (debug.empty()) debug = environment("TORCH_DISTRIBUTED_DEBUG");
  std::transform(debug.begin(), debug.end(), debug.begin(),
                 [](char c) { return static_cast<char>(std::tolower(c)); });
  if (debug == "info") level = std::max(level, LogLevel::kInfo);
  if (debug == "detail") level = std::max(level, LogLevel::kDebug);
  return level;
}

// Written by set_log_level, read by every thread; no other memory depends on it: relaxed.
std::atomic<LogLevel>& level_word() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

std::mutex& name_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::string& name_word() {  // guarded by name_mutex()
  static std::string name;
  return name;
}

char letter(LogLevel level) { return "-EWID"[static_cast<int>(level)]; }

}  // namespace

LogLevel log_level() { return level_word().load(std::memory_order_relaxed); }
void set_log_level(LogLevel level) { level_word().store(level, std::memory_order_relaxed); }

LogLevel parse_log_level(std::string_view text) {
  if (text == "off") return LogLevel::kOff;
  if (text == "error") return LogLevel::kError;
  if (text == "info") return LogLevel::kInfo;
  if (text == "debug") return LogLevel::kDebug;
  return LogLevel::kWarn;
}

void set_log_name(std::string_view name) {
  const std::lock_guard lock(name_mutex());
  name_word() = name;
}

void write_log(LogLevel level, std::string_view text) noexcept try {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  char head[64];
  std::snprintf(head, sizeof head, "[convoy %c %02d:%02d:%02d.%03d ", letter(level), local.tm_hour,
                local.tm_min, local.tm_sec, static_cast<int>(now.tv_nsec / 1'000'000));
  std::string line = head;
  {
    const std::lock_guard lock(name_mutex());
    if (!name_word().empty()) line += name_word() + " ";
  }
  line += concat("pid ", getpid(), "] ", text, "\n");
  // A log that cannot be written is lost on purpose: there is nobody to tell.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
} catch (...) {
}

}  // namespace convoy
