#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/unique_fd.h"

namespace convoy {

// What lies at an address of this process.
struct Mapping {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  bool shared = false;  // others may have it mapped too, and see what is written
  bool writable = false;
  std::uint64_t file_offset = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

// nullopt: nothing is mapped there. Throws if the system does not tell (kResource: no descriptors
// are left), as a wrong answer could be taken for "nobody else has it".
std::optional<Mapping> mapping_of(const void* address);

// A writable descriptor of the file that is mapped, which this process has open or can open; empty
// if it has none. `known` is tried first, if it is not -1.
UniqueFd descriptor_of(const Mapping& mapping, int known = -1);

}  // namespace convoy
