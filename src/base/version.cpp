#include "convoy/version.h"

#include "base/config.h"

namespace convoy {

const char* version() { return CONVOY_VERSION_TEXT; }

}  // namespace convoy
