#pragma once

#include "convoy/init.h"

namespace convoy {

// The factory of a backend, after checking its name and the names of `options`.
BackendFactory find_backend(const std::string& name, const BackendOptions& options);

}  // namespace convoy
