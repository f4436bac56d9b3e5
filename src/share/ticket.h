#pragma once

#include <string>
#include <string_view>

namespace convoy {

// What a spawned process finds as its last argument: the descriptors that it has inherited, and
// which of the processes it is.
struct Ticket {
  static constexpr std::string_view kPrefix = "--convoy-spawned=";

  int control = -1;  // a channel: arguments come, an exception goes
  int channel = -1;  // a channel for the program
  int parent = -1;   // a pidfd
  int index = 0;
  int count = 0;

  std::string to_string() const;
  static Ticket parse(std::string_view text);  // kInvalidArgument
};

}  // namespace convoy
