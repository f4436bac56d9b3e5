#include "launch/lines.h"

namespace convoy::launch {
namespace {

// "frame #3: c10::Error::Error(...) + 0x60 (0x7f.. in libc10.so)": libtorch writes dozens of them
// behind a message, which is what readers need.
bool is_stack_frame(std::string_view line) {
  const auto text = line.find_first_not_of(" \t");
  return text != std::string_view::npos && line.substr(text).starts_with("frame #");
}

}  // namespace

void Tail::add(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  if (const auto back = line.rfind('\r'); back != std::string_view::npos) {
    line.remove_prefix(back + 1);
  }
  if (is_stack_frame(line)) return;
  std::string kept(line.substr(0, kLineBytes));
  if (line.size() > kLineBytes) kept += " ...";
  if (lines_.size() == kLines) lines_.pop_front();
  lines_.push_back(std::move(kept));
}

}  // namespace convoy::launch
