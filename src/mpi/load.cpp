#include <dlfcn.h>

#include <string_view>

#include "base/error.h"
#include "convoy/version.h"
#include "mpi/module.h"

namespace convoy::mpi {
namespace {

constexpr const char* kFile = "libconvoy_mpi.so";

// Beside the library that this code is in, wherever the tree was moved to.
std::string beside_this() {
  Dl_info self{};
  if (::dladdr(reinterpret_cast<void*>(&module), &self) == 0 || !self.dli_fname) return kFile;
  const std::string_view path = self.dli_fname;
  const auto slash = path.rfind('/');
  return slash == path.npos ? kFile : std::string(path.substr(0, slash + 1)) + kFile;
}

Module& load() {
  // Global: an MPI's own plug-ins look for its symbols.
  const std::string path = beside_this();
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
  if (!library) {
    const char* const why = ::dlerror();
    fail(ErrorKind::kUnsupported, "backend \"mpi\" is not available: ", why ? why : path,
         ". It is built where CMake finds an MPI (CONVOY_MPI), and needs that MPI to run");
  }
  using Entry = Module*();
  auto* const entry = reinterpret_cast<Entry*>(::dlsym(library, "convoy_mpi_module"));
  if (!entry) fail(ErrorKind::kUnsupported, path, " is not convoy's: it has no convoy_mpi_module");
  Module& found = *entry();
  if (std::string_view(found.version()) != version()) {
    fail(ErrorKind::kUnsupported, path, " belongs to convoy ", found.version(), ", not ",
         version());
  }
  return found;
}

}  // namespace

Module& module() {
  static Module& loaded = load();  // tried again after a failure
  return loaded;
}

}  // namespace convoy::mpi
