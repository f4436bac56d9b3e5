#pragma once

#include <string_view>

#include "base/concat.h"

namespace convoy {

// kOff .. kDebug; CONVOY_LOG=off|error|warn|info|debug (default warn). CONVOY_DEBUG=info|detail, or
// TORCH_DISTRIBUTED_DEBUG where that is set, raises it to info or debug.
enum class LogLevel { kOff, kError, kWarn, kInfo, kDebug };

LogLevel log_level();
void set_log_level(LogLevel level);
// In any case of letters; kWarn for a text that names no level.
LogLevel parse_log_level(std::string_view text);
// What the variables above say now; log_level() is what they said at its first use.
LogLevel log_level_from_environment();

// Names this process in every line ("rank 3"); empty by default.
void set_log_name(std::string_view name);

// Writes one whole line to stderr with one write(2), so that lines of several processes do not mix.
// Never throws, keeps errno. Thread-safe; takes no lock, so a forked child may log too.
void write_log(LogLevel level, std::string_view text) noexcept;

template <class... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (level != LogLevel::kOff && level <= log_level()) write_log(level, concat(parts...));
}
template <class... Parts>
void log_error(const Parts&... parts) {
  log(LogLevel::kError, parts...);
}
template <class... Parts>
void log_warn(const Parts&... parts) {
  log(LogLevel::kWarn, parts...);
}
template <class... Parts>
void log_info(const Parts&... parts) {
  log(LogLevel::kInfo, parts...);
}
template <class... Parts>
void log_debug(const Parts&... parts) {
  log(LogLevel::kDebug, parts...);
}

}  // namespace convoy
