#include "base/chrome_trace.h"

#include <array>
#include <cstdio>

#include "base/concat.h"
#include "base/quote.h"

namespace convoy {
namespace {

// Of which viewers want thousandths.
std::string microseconds(std::chrono::nanoseconds time) {
  std::array<char, 40> text;
  std::snprintf(text.data(), text.size(), "%lld.%03d", static_cast<long long>(time.count() / 1000),
                static_cast<int>(time.count() % 1000));
  return text.data();
}

}  // namespace

ChromeTrace::ChromeTrace(int process, std::string_view name) : process_(process) {
  begin_event("M", 0, "process_name");
  text_ += concat(",\"args\":{\"name\":", quote_json(name), "}}");
}

void ChromeTrace::begin_event(const char* phase, int lane, std::string_view name) {
  text_ += concat(text_.empty() ? "" : ",\n", "{\"ph\":\"", phase, "\",\"pid\":", process_,
                  ",\"tid\":", lane, ",\"name\":", quote_json(name));
}

int ChromeTrace::number_of(std::string_view lane) {
  const auto found = lanes_.find(lane);
  if (found != lanes_.end()) return found->second;
  const int number = static_cast<int>(lanes_.size()) + 1;
  lanes_.emplace(lane, number);
  begin_event("M", number, "thread_name");
  text_ += concat(",\"args\":{\"name\":", quote_json(lane), "}}");
  return number;
}

void ChromeTrace::span(std::string_view lane, std::string_view name, Time from, Time to,
                       std::string_view args) {
  if (from == Time{} || to == Time{} || to < from) return;
  begin_event("X", number_of(lane), name);
  text_ += concat(",\"ts\":", microseconds(from.time_since_epoch()),
                  ",\"dur\":", microseconds(to - from));
  if (!args.empty()) text_ += concat(",\"args\":{", args, "}");
  text_ += '}';
}

void ChromeTrace::arrow(Arrow end, std::string_view lane, std::string_view name, std::uint64_t id,
                        Time at) {
  if (at == Time{}) return;
  begin_event(end == Arrow::kBegin ? "s" : "f", number_of(lane), name);
  // A flow ends at the span that encloses it, not at the next one.
  text_ += concat(",\"cat\":\"call\",\"id\":", id, ",\"ts\":", microseconds(at.time_since_epoch()),
                  end == Arrow::kEnd ? ",\"bp\":\"e\"}" : "}");
}

std::string chrome_trace(std::span<const std::string> processes) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  for (std::size_t i = 0; i < processes.size(); ++i) {
    text += concat(i == 0 ? "" : ",\n", processes[i]);
  }
  return text + "\n]}\n";
}

}  // namespace convoy
