#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace convoy::launch {

// What a rank said about its own failure in the file that TORCHELASTIC_ERROR_FILE names.
//
// torch's `@record` writes {"message": {"message": "RuntimeError: ...", "extraInfo": {...}}}; a
// plain {"message": "..."} is understood as well. nullopt if the text says nothing.
std::optional<std::string> parse_error_text(std::string_view text);
// nullopt also if there is no such file, it is no regular file or larger than 1 MiB.
std::optional<std::string> read_error_file(const std::string& path);

}  // namespace convoy::launch
