#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/duration.h"

namespace convoy::launch {

// "5", "5s" (seconds), "500ms", "1.5s", "2m", "1h"; nullopt for anything else, below zero and above
// ten years included.
std::optional<std::chrono::nanoseconds> parse_duration(std::string_view text);
using convoy::format_duration;

// "64 MiB", "1.5 GiB".
std::string format_bytes(std::uint64_t bytes);

// A whole decimal number; nullopt for anything else.
std::optional<int> parse_int(std::string_view text);

// "rank 2", "ranks 0-3, 5", "no rank". The ranks are sorted.
std::string format_ranks(std::vector<int> ranks);

// The candidate that a mistyped `text` most likely stands for; nullopt if none is near.
std::optional<std::string> nearest(std::string_view text,
                                   const std::vector<std::string>& candidates);

std::vector<std::string> split(std::string_view text, char separator);

}  // namespace convoy::launch
