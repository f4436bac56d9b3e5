#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/error.h"
#include "convoy/group.h"

namespace convoy {

// Collective: kInvalidArgument on every rank unless all pass the same lines, naming the first
// difference and who has it. Only a digest travels unless they differ. A rank that has an `error`
// instead of lines makes it everyone's, with the kind of the first rank's. Returns rank 0's
// `number`.
std::uint64_t agree(const ProcessGroup& group, const std::string& what,
                    const std::vector<std::string>& lines,
                    const std::optional<Error>& error = std::nullopt, std::uint64_t number = 0);

// "set_reduce, group "world", rank 0 of 2: ".
std::string head_of(const ProcessGroup& group, std::string_view operation);
// In a handler: throws an Error that is being handled on, with head_of() in front unless its text
// says already where it comes from.
[[noreturn]] void rethrow_from(const ProcessGroup& group, std::string_view operation);
// Calls `function` for a user, who called `operation`.
template <class Function>
auto told_from(const ProcessGroup& group, std::string_view operation, const Function& function) {
  try {
    return function();
  } catch (const Error&) {
    rethrow_from(group, operation);
  }
}

// Collective: what each rank says, by rank; of each the first 2048 bytes.
std::vector<std::string> gather_texts(const ProcessGroup& group, std::string_view text);
// The memory of a tensor of bytes, for base/wire.h.
std::span<std::byte> wire_bytes(const at::Tensor& bytes);

// "rank 1: a; ranks 2 and 3: b", by rank; empty texts are left out.
std::string by_cause(const std::vector<std::string>& texts);
// "rank 3", "ranks 0 and 1", "ranks 0, 1 and 3", "ranks 0 to 7".
std::string name_ranks(const std::vector<std::size_t>& ranks);

}  // namespace convoy
