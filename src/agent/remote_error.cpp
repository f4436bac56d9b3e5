#include <utility>

#include "convoy/rpc_error.h"

namespace convoy::rpc {

RemoteError::RemoteError(ErrorKind kind, const std::string& message, std::string worker,
                         std::string remote_type)
    : Error(kind, message), worker_(std::move(worker)), remote_type_(std::move(remote_type)) {}

RemoteError::~RemoteError() = default;

}  // namespace convoy::rpc
