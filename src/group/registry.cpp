#include "group/registry.h"

#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "base/guarded.h"
#include "convoy/backend.h"
#include "group/mpi_backend.h"

namespace convoy {
namespace {

struct Entry {
  BackendFactory factory;
  std::vector<std::string> options;
};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

int to_threads(const std::string& text) {
  const bool digits =
      !text.empty() && text.size() < 5 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoi(text) < 1) {
    fail(ErrorKind::kInvalidArgument, "option threads of backend \"convoy\" is \"", text,
         "\", not a number from 1");
  }
  return std::stoi(text);
}

bool to_bool(const char* backend, const std::string& name, const std::string& text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  fail(ErrorKind::kInvalidArgument, "option ", name, " of backend \"", backend, "\" is \"", text,
       "\", neither true nor false");
}

void require_cpu(const char* backend, c10::Device device) {
  if (device.is_cpu()) return;
  fail(ErrorKind::kUnsupported, "backend \"", backend, "\" works on CPU tensors; asked for device ",
       device.str());
}

c10::intrusive_ptr<ConvoyBackend::Options> convoy_options(std::chrono::milliseconds timeout,
                                                          c10::Device device,
                                                          const BackendOptions& options) {
  require_cpu("convoy", device);
  auto own = c10::make_intrusive<ConvoyBackend::Options>(timeout);
  for (const auto& [name, value] : options) {
    if (name == "threads") own->threads = to_threads(value);
    if (name == "read_private") own->read_private = to_bool("convoy", name, value);
    if (name == "compare_shapes") own->compare_shapes = to_bool("convoy", name, value);
    if (name == "name") own->group_name = value;
  }
  return own;
}

c10::intrusive_ptr<c10d::Backend> make_convoy(const std::shared_ptr<Store>& store, int rank,
                                              int size, std::chrono::milliseconds timeout,
                                              c10::Device device, const BackendOptions& options) {
  return c10::make_intrusive<ConvoyBackend>(store, rank, size,
                                            convoy_options(timeout, device, options));
}

bool mpi_checks(c10::Device device, const BackendOptions& options) {
  require_cpu("mpi", device);
  const auto check = options.find("check");
  return check != options.end() && to_bool("mpi", check->first, check->second);
}

c10::intrusive_ptr<c10d::Backend> make_mpi(const std::shared_ptr<Store>& store, int rank, int size,
                                           std::chrono::milliseconds timeout, c10::Device device,
                                           const BackendOptions& options) {
  auto own = c10::make_intrusive<ConvoyBackend::Options>(timeout);
  if (const auto name = options.find("name"); name != options.end()) {
    own->group_name = name->second;
  }
  if (const auto compare = options.find("compare_shapes"); compare != options.end()) {
    own->compare_shapes = to_bool("mpi", compare->first, compare->second);
  }
  return make_mpi_backend(store, rank, size, own, mpi_checks(device, options));
}

using Entries = std::map<std::string, Entry>;

// Lives forever: groups may be made while statics are destroyed.
Guarded<Entries>& entries() {
  static auto* const all = new Guarded<Entries>(
      Entries{{"convoy", {make_convoy, {"compare_shapes", "name", "read_private", "threads"}}},
              {"mpi", {make_mpi, {"check", "compare_shapes", "name"}}}});
  return *all;
}

std::vector<std::string> names_of(const Entries& all) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : all) names.push_back(name);
  return names;
}

// Backends that people ask for and that this libtorch does not let C++ make.
[[noreturn]] void refuse_known(const std::string& name, const std::string& why) {
  fail(ErrorKind::kUnsupported, "backend \"", name, "\" cannot be made here: ", why,
       ". A group of it that was made elsewhere (in Python, by another library) can be used: "
       "ProcessGroup::from(backend)");
}

}  // namespace

void register_backend(const std::string& name, BackendFactory factory,
                      std::vector<std::string> options) {
  if (name.empty()) fail(ErrorKind::kInvalidArgument, "register_backend: the name is empty");
  if (!factory) {
    fail(ErrorKind::kInvalidArgument, "register_backend: \"", name, "\" has no factory");
  }
  std::sort(options.begin(), options.end());
  auto all = entries().lock();
  if (!all->try_emplace(name, Entry{std::move(factory), std::move(options)}).second) {
    fail(ErrorKind::kInvalidArgument, "register_backend: \"", name,
         "\" is registered already; registered are: ", join(names_of(*all)));
  }
}

std::vector<std::string> backend_names() { return names_of(*entries().lock()); }

BackendFactory find_backend(const std::string& name, c10::Device device,
                            const BackendOptions& options) {
  auto all = entries().lock();
  const auto found = all->find(name);
  if (found == all->end()) {
    if (name == "gloo") refuse_known(name, "libtorch comes without Gloo's headers");
    if (name == "nccl") refuse_known(name, "libtorch gives C++ programs no way to make it");
    fail(ErrorKind::kInvalidArgument, "there is no backend \"", name,
         "\"; registered are: ", join(names_of(*all)));
  }
  for (const auto& [option, value] : options) {
    const auto& known = found->second.options;
    if (std::find(known.begin(), known.end(), option) == known.end()) {
      fail(ErrorKind::kInvalidArgument, "backend \"", name, "\" has no option \"", option,
           "\"; it has: ", join(known));
    }
  }
  if (name == "convoy") convoy_options(kDefaultGroupTimeout, device, options);
  if (name == "mpi") mpi_checks(device, options);
  return found->second.factory;
}

}  // namespace convoy
