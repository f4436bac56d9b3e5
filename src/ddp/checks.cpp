#include "ddp/checks.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>

#include "base/error.h"

namespace convoy {
namespace {

at::Tensor real_values(const at::Tensor& values) {
  const at::Tensor plain = values.is_sparse() ? values._values() : values;
  return plain.is_complex() ? at::view_as_real(plain.resolve_conj()) : plain;
}

std::string list_of(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? " " : ", ", ranks[i]);
  return text;
}

}  // namespace

// Four lanes, so that multiplications overlap: as fast as memory. Not for secrets.
std::uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().contiguous();
  const auto* data = static_cast<const std::byte*>(dense.const_data_ptr());
  std::size_t left = dense.nbytes();
  constexpr std::uint64_t kPrime = 0x9e3779b97f4a7c15;
  std::uint64_t lanes[4] = {1, 2, 3, 4};
  for (; left >= 32; left -= 32, data += 32) {
    std::uint64_t words[4];
    std::memcpy(words, data, 32);
    for (int i = 0; i < 4; ++i) lanes[i] = std::rotl((lanes[i] ^ words[i]) * kPrime, 29);
  }
  std::uint64_t hash = dense.nbytes();
  std::uint64_t rest[4] = {};
  if (left > 0) std::memcpy(rest, data, left);
  for (int i = 0; i < 4; ++i) hash = std::rotl((hash ^ lanes[i] ^ rest[i]) * kPrime, 29) * kPrime;
  return hash;
}

DebugLevel debug_level() {
  const auto parse = [](std::string text) -> std::optional<DebugLevel> {
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (text == "off" || text.empty()) return DebugLevel::kOff;
    if (text == "info") return DebugLevel::kInfo;
    if (text == "detail") return DebugLevel::kDetail;
    return std::nullopt;
  };
  if (const char* const own = std::getenv("CONVOY_DEBUG"); own != nullptr) {
    const auto level = parse(own);
    if (!level) {
      fail(ErrorKind::kInvalidArgument, "CONVOY_DEBUG is ", in_quotes(own),
           "; it can be off, info or detail");
    }
    return *level;
  }
  const char* const torch = std::getenv("TORCH_DISTRIBUTED_DEBUG");
  return parse(torch == nullptr ? "" : torch).value_or(DebugLevel::kOff);
}

bool is_finite(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor plain = real_values(values);
  if (plain.numel() == 0 || !at::isFloatingType(plain.scalar_type())) return true;
  // A sum is not finite if one of its parts is not; it may also overflow.
  if (at::isfinite(plain.sum()).item<bool>()) return true;
  return at::isfinite(plain).all().item<bool>();
}

bool is_zero(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  return !real_values(values).any().item<bool>();
}

std::string describe_nonfinite(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const at::Tensor plain = real_values(values).reshape({-1});
  const at::Tensor places = at::isfinite(plain).logical_not().nonzero();
  if (places.numel() == 0) return "all values are finite";
  const auto first = places[0].item<std::int64_t>();
  return concat(places.size(0), " of ", plain.numel(), " values are not finite, the first is ",
                plain[first].item<double>(), " at ", first);
}

std::string compare_replicas(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                             const std::vector<std::string>& names, bool counts) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = at::zeros({static_cast<std::int64_t>(tensors.size()) + 1}, at::kLong);
  auto* const hashes = mine.mutable_data_ptr<std::int64_t>();
  hashes[0] = counts ? 1 : 0;
  for (std::size_t i = 0; i < tensors.size() && counts; ++i) {
    hashes[i + 1] = static_cast<std::int64_t>(hash_of(tensors[i]));
  }
  const at::Tensor all = group.all_gather(mine);
  const auto* const table = all.const_data_ptr<std::int64_t>();
  const std::size_t width = tensors.size() + 1;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::map<std::int64_t, std::vector<std::size_t>> camps;
    for (std::size_t r = 0; r < static_cast<std::size_t>(group.size()); ++r) {
      if (table[r * width] != 0) camps[table[r * width + i + 1]].push_back(r);
    }
    if (camps.size() <= 1) continue;
    // The most ranks are right; of equally many, those with the lowest.
    const auto right =
        std::max_element(camps.begin(), camps.end(), [](const auto& a, const auto& b) {
          return a.second.size() != b.second.size() ? a.second.size() < b.second.size()
                                                    : a.second.front() > b.second.front();
        });
    std::vector<std::size_t> wrong;
    for (auto camp = camps.begin(); camp != camps.end(); ++camp) {
      if (camp != right) wrong.insert(wrong.end(), camp->second.begin(), camp->second.end());
    }
    std::sort(wrong.begin(), wrong.end());
    return concat("parameter ", names[i], ": ", list_of(wrong),
                  wrong.size() == 1 ? " has" : " have", " other values than ",
                  list_of(right->second));
  }
  return {};
}

}  // namespace convoy
