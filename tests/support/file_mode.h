#pragma once

#include <sys/stat.h>

#include <string>

namespace convoy::test {

// Of the file itself, also where it is a link; 0 without one.
inline unsigned mode_of(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

}  // namespace convoy::test
