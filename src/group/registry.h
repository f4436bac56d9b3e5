#pragma once

#include "convoy/init.h"

namespace convoy {

// The factory of a backend, after checking its name, the names of `options` and, for ours, their
// values and the device.
BackendFactory find_backend(const std::string& name, c10::Device device,
                            const BackendOptions& options);

}  // namespace convoy
