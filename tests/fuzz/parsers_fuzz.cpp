// The small parsers of base and os: they take any bytes, and what they accept is in range.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/concat.h"
#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "os/machine.h"
#include "os/process.h"
#include "transport/shm/peer.h"

namespace convoy {
namespace {

// Unlike assert, in every build.
void require(bool condition) {
  if (!condition) std::abort();
}

void fuzz_id(std::string_view text) {
  try {
    require(Id::parse(text).to_string() == text);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument);
  }
}

void fuzz_signal(std::string_view text) {
  const auto signal = parse_signal(std::string(text));
  if (!signal) return;
  require(*signal > 0 && *signal < 65);
  require(!signal_name(*signal).empty());
}

void fuzz_cgroup(std::string_view text) {
  for (const std::string_view controller : {"", "cpu", "memory"}) {
    const auto path = parse_cgroup_path(text, controller);
    if (path) require(path->find('\n') == std::string::npos && path->size() < text.size());
  }
}

void fuzz_numbers(std::string_view text) {
  if (const auto cores = parse_cpu_max(text)) require(*cores >= 1 && *cores <= 1 << 20);
  if (const auto number = parse_number(text)) {
    require(text.starts_with('0') || text.starts_with(std::to_string(*number)));
  }
  parse_field(text, "inactive_file");
  parse_field(text, "");
}

void fuzz_cores(std::string_view text) {
  try {
    const CoreSet set = CoreSet::parse(text);
    require(CoreSet::parse(set.to_string()).to_string() == set.to_string());
    require(set.count() >= 0 && set.nth(0) < static_cast<int>(4 * text.size()));
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument);
  }
}

void fuzz_process_info(std::string_view text) {
  try {
    const auto info = shm::ProcessInfo::decode(std::string(text));
    require(info.pid > 0);
    require(shm::ProcessInfo::decode(info.encode()).encode() == info.encode());
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument);
  }
}

void fuzz_text(std::string_view text) {
  const std::string shown = in_quotes(text);
  for (const char c : shown) require(c >= 0x20 && c < 0x7f);
  parse_log_level(text);
}

}  // namespace
}  // namespace convoy

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace convoy;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 7) {
    case 0: fuzz_id(text); break;
    case 1: fuzz_signal(text); break;
    case 2: fuzz_cgroup(text); break;
    case 3: fuzz_numbers(text); break;
    case 4: fuzz_text(text); break;
    case 5: fuzz_cores(text); break;
    default: fuzz_process_info(text); break;
  }
  return 0;
}
