#pragma once

#include <string>

namespace convoy {

// The flight record: the last operations of this process's groups, about 2000 of them. Recording is
// on by default. `convoy record` reads it from outside, `convoy run` reads it after a death, and
// the functions below read it in the process. They are thread-safe. See
// docs/reference/debugging.md.

// The record as JSON, in the format of PyTorch's flight recorder. Empty if recording is off
// (CONVOY_FLIGHT=off).
std::string flight_record();
// Writes folder/rank_<r> and folder/<r>.json; creates the folder. torchfrtrace can read the first
// once all ranks have written theirs. Throws kUnsupported if recording is off.
void write_flight_record(const std::string& folder);

}  // namespace convoy
