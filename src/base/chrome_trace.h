#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace convoy {

// Events of one process for chrome://tracing and Perfetto. Several processes' texts make one file:
// times are those of the steady clock, which processes of one host share. One thread at a time.
class ChromeTrace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `process` is the number by which the viewer sorts, `name` what it shows.
  ChromeTrace(int process, std::string_view name);

  // Spans of a lane must not overlap, except that one may lie within another. `args`: members of a
  // JSON object, without braces. Nothing for times that are none or backward.
  void span(std::string_view lane, std::string_view name, Time from, Time to,
            std::string_view args = {});
  // An arrow between two spans, of two processes perhaps, from `kBegin` to `kEnd` of the same id.
  // It is tied to the span of that lane that encloses `at`.
  enum class Arrow { kBegin, kEnd };
  void arrow(Arrow end, std::string_view lane, std::string_view name, std::uint64_t id, Time at);

  const std::string& text() const { return text_; }

 private:
  int number_of(std::string_view lane);
  void begin_event(const char* phase, int lane, std::string_view name);

  const int process_;
  std::map<std::string, int, std::less<>> lanes_;
  std::string text_;
};

// The file, of the texts of all processes.
std::string chrome_trace(std::span<const std::string> processes);

}  // namespace convoy
