#pragma once

#include <chrono>
#include <string>

namespace convoy {

// For people: "3.2 s", "0.02 s", "5 s", "2 min 5 s".
std::string format_duration(std::chrono::nanoseconds duration);

}  // namespace convoy
