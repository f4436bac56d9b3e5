#include "launch/error_file.h"

#include <filesystem>

#include "launch/json.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

constexpr std::uintmax_t kMaxFile = 1 << 20;
constexpr std::size_t kMaxMessage = 2000;

}  // namespace

std::optional<std::string> parse_error_text(std::string_view text) {
  const auto json = Json::parse(text);
  if (!json) return std::nullopt;
  const Json* message = json->member("message");
  if (message && message->member("message")) message = message->member("message");
  if (!message || !message->text() || message->text()->empty()) return std::nullopt;
  return message->text()->substr(0, kMaxMessage);
}

std::optional<std::string> read_error_file(const std::string& path) {
  // The rank owns the place: a pipe there would block us, a huge file fill our memory.
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return std::nullopt;
  if (std::filesystem::file_size(path, error) > kMaxFile || error) return std::nullopt;
  return parse_error_text(read_file(path).value_or(""));
}

}  // namespace convoy::launch
