#include "base/error.h"

#include <cstring>

namespace convoy {

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument: return "invalid argument";
    case ErrorKind::kUnsupported: return "unsupported";
    case ErrorKind::kTimeout: return "timeout";
    case ErrorKind::kPeerLost: return "peer lost";
    case ErrorKind::kResource: return "out of resources";
    case ErrorKind::kRemote: return "remote error";
    case ErrorKind::kInternal: return "internal error";
    case ErrorKind::kCancelled: return "cancelled";
  }
  return "unknown error";
}

std::string errno_text(int code) {
  char buffer[128];
  return concat(strerror_r(code, buffer, sizeof buffer), " (errno ", code, ")");
}

ErrorKind errno_kind(int code) {
  switch (code) {
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
    case EAGAIN:
    case ENOBUFS:
    case EDQUOT:
    case EFBIG:
    case EIO:
    case ENOLCK:
    case ETOOMANYREFS: return ErrorKind::kResource;
    case EPIPE:
    case ESRCH:
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case ENOTCONN:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN: return ErrorKind::kPeerLost;
    case ETIMEDOUT: return ErrorKind::kTimeout;
    case EINVAL:
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EEXIST:
    case ELOOP:
    case EROFS:
    case EACCES:
    case EPERM:
    case ENAMETOOLONG:
    case ENOEXEC:
    case ETXTBSY:
    case E2BIG:
    case EADDRINUSE:
    case EADDRNOTAVAIL:
    case EPROTOTYPE: return ErrorKind::kInvalidArgument;
    case ENOSYS:
    case EOPNOTSUPP:
    case ENODEV:
    case ENOTTY:
    case EAFNOSUPPORT:
    case EPROTONOSUPPORT: return ErrorKind::kUnsupported;
    default: return ErrorKind::kInternal;
  }
}

}  // namespace convoy
