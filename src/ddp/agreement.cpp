#include "ddp/agreement.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "base/error.h"
#include "base/id.h"
#include "base/wire.h"

namespace convoy {
namespace {

// Two hashes, number of lines, the kind of an error as a number from 1 on (0: there is none); and a
// number that need not agree.
using Digest = std::array<std::uint64_t, 5>;
constexpr std::size_t kErrorAt = 3;

Digest digest_of(const std::vector<std::string>& lines, const std::optional<Error>& error,
                 std::uint64_t number) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const std::uint64_t kind = error ? static_cast<std::uint64_t>(error->kind()) + 1 : 0;
  return {hash_text(text, 1), hash_text(text, 2), lines.size(), kind, number};
}

std::vector<Digest> gather(const ProcessGroup& group, const Digest& mine) {
  const auto bytes = static_cast<std::int64_t>(sizeof(Digest));
  const at::Tensor input = at::empty({bytes}, at::kByte);
  WireWriter(wire_bytes(input)).put(mine);
  const at::Tensor output = at::empty({bytes * group.size()}, at::kByte);
  group.all_gather_single(output, input);
  WireReader in(wire_bytes(output), "digest");
  std::vector<Digest> all(static_cast<std::size_t>(group.size()));
  for (Digest& digest : all) digest = in.take<Digest>();
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

// "rank 0 has ..., rank 1 has ..."; both texts end with a line break.
std::string difference(const std::vector<std::string>& texts) {
  const auto first = lines_of(texts[0]);
  for (std::size_t r = 1; r < texts.size(); ++r) {
    const auto other = lines_of(texts[r]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = i < first.size() ? first[i] : "nothing more";
      const std::string b = i < other.size() ? other[i] : "nothing more";
      if (a != b) return concat("rank 0 has ", a, ", rank ", r, " has ", b);
    }
  }
  return "the digests differ, but not what they were made of";
}

}  // namespace

std::span<std::byte> wire_bytes(const at::Tensor& bytes) {
  return {static_cast<std::byte*>(bytes.mutable_data_ptr()),
          static_cast<std::size_t>(bytes.numel())};
}

std::vector<std::string> gather_texts(const ProcessGroup& group, std::string_view text) {
  constexpr std::int64_t kTextBytes = 2048;
  const at::Tensor mine = at::zeros({kTextBytes}, at::kByte);
  WireWriter(wire_bytes(mine)).put(text.substr(0, kTextBytes));
  const at::Tensor all = at::zeros({kTextBytes * group.size()}, at::kByte);
  group.all_gather_single(all, mine);
  WireReader in(wire_bytes(all), "text");
  std::vector<std::string> texts(static_cast<std::size_t>(group.size()));
  for (std::string& each : texts) {
    const auto bytes = in.take(kTextBytes);
    each = bytes.substr(0, bytes.find('\0'));
  }
  return texts;
}

std::string head_of(const ProcessGroup& group, std::string_view operation) {
  return concat(operation, ", group \"", group.name(), "\", rank ", group.rank(), " of ",
                group.size(), ": ");
}

void rethrow_from(const ProcessGroup& group, std::string_view operation) {
  try {
    throw;
  } catch (const Error& error) {
    std::string text = error.what();
    if (text.find("group \"") != std::string::npos) throw;
    const std::string own = concat(operation, ": ");
    if (text.starts_with(own)) text = text.substr(own.size());
    throw Error(error.kind(), head_of(group, operation) + text);
  }
}

std::string name_ranks(const std::vector<std::size_t>& ranks) {
  if (ranks.size() == 1) return concat("rank ", ranks[0]);
  const bool is_range = ranks.back() - ranks.front() + 1 == ranks.size();
  if (is_range && ranks.size() > 2) {
    return concat("ranks ", ranks.front(), " to ", ranks.back());
  }
  std::string text = "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += concat(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  }
  return text;
}

// A few ranks are named one by one, as their own logs are.
std::string by_cause(const std::vector<std::string>& texts) {
  constexpr std::size_t kFew = 4;
  std::string result;
  std::vector<bool> told(texts.size());
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (told[r] || texts[r].empty()) continue;
    std::vector<std::size_t> ranks = {r};
    for (std::size_t other = r + 1; other < texts.size() && texts.size() > kFew; ++other) {
      if (texts[other] == texts[r]) ranks.push_back(other);
    }
    for (const std::size_t rank : ranks) told[rank] = true;
    result += concat(result.empty() ? "" : "; ", name_ranks(ranks), ": ", texts[r]);
  }
  return result;
}

std::uint64_t agree(const ProcessGroup& group, const std::string& what,
                    const std::vector<std::string>& lines, const std::optional<Error>& error,
                    std::uint64_t number) {
  const auto all = gather(group, digest_of(lines, error, number));
  const auto fine = [&](const Digest& one) {
    return std::equal(one.begin(), one.end() - 1, all[0].begin()) && one[kErrorAt] == 0;
  };
  if (std::all_of(all.begin(), all.end(), fine)) return all[0].back();

  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const auto texts = group.all_gather_object(error ? std::string(error->what()) : text);
  std::vector<std::string> errors(all.size());
  auto kind = ErrorKind::kInvalidArgument;
  for (std::size_t r = all.size(); r-- > 0;) {
    if (all[r][kErrorAt] == 0) continue;
    errors[r] = texts[r];
    kind = static_cast<ErrorKind>(all[r][kErrorAt] - 1);
  }
  std::string reason = by_cause(errors);
  if (reason.empty()) reason = difference(texts) + "; it must be the same on all ranks";
  fail(kind, what, ", group \"", group.name(), "\", rank ", group.rank(), " of ", group.size(),
       ": ", reason);
}

}  // namespace convoy
