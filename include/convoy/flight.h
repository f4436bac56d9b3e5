#pragma once

#include <string>

namespace convoy {

// The flight record: what this process's groups did last, about 2000 operations. Written always;
// read from outside by `convoy record`, after a death by `convoy run`, or here. See
// docs/reference/debugging.md.

// As JSON, in the form of PyTorch's flight recorder. Empty if none is written (CONVOY_FLIGHT=off).
std::string flight_record();
// Writes folder/rank_<r>, which torchfrtrace reads once all ranks have written theirs, and
// folder/<r>.json. Throws kUnsupported if none is written.
void write_flight_record(const std::string& folder);

}  // namespace convoy
