#include "launch/lines.h"

namespace convoy::launch {

void Tail::add(std::string_view line) {
  while (line.ends_with('\r')) line.remove_suffix(1);
  if (const auto back = line.rfind('\r'); back != std::string_view::npos) {
    line.remove_prefix(back + 1);
  }
  std::string kept(line.substr(0, kLineBytes));
  if (line.size() > kLineBytes) kept += " ...";
  if (lines_.size() == kLines) lines_.pop_front();
  lines_.push_back(std::move(kept));
}

}  // namespace convoy::launch
