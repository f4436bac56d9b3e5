// The comm hook that sends 8 bits for each element.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <cstring>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/hook_state.h"
#include "ddp/quantize.h"

namespace convoy::hooks {

struct Quantize8::State {
  explicit State(const Quantize8Options& wanted) : options(wanted) {}

  const Quantize8Options options;
  ByParameter errors;  // flat f32, as the gradients lie in memory
};

namespace {

// A bucket on its way. Its elements, filled up with zeros, are rows; each rank owns equally many of
// them.
struct QuantizedBucket {
  GradBucket bucket;
  at::Tensor flat = {};     // the bucket as real numbers, in its memory
  std::size_t block = 0;    // elements of a row
  std::size_t owned = 0;    // rows of each rank
  at::Tensor values = {};   // f32, rows x block: first what is sent, then what it lost
  at::Tensor sent = {};     // rows as bytes
  at::Tensor arrived = {};  // all ranks' versions of the own rows

  std::size_t rows() const { return owned * ranks(); }
  std::size_t ranks() const { return static_cast<std::size_t>(bucket.group().size()); }
  std::size_t first_own() const { return owned * static_cast<std::size_t>(bucket.group().rank()); }
  float* row(std::size_t index) const { return values.mutable_data_ptr<float>() + index * block; }
};

at::Tensor byte_rows(std::size_t rows, std::size_t block) {
  return at::empty({static_cast<std::int64_t>(rows), static_cast<std::int64_t>(row_bytes(block))},
                   at::kByte);
}

std::uint8_t* byte_row(const at::Tensor& rows, std::size_t index) {
  return rows.mutable_data_ptr<std::uint8_t>() + index * static_cast<std::size_t>(rows.size(1));
}

// Calls function(parameter, offset, elements) for each parameter's piece of the flat bucket.
template <class Function>
void for_each_piece(const QuantizedBucket& journey, const Function& function) {
  const std::int64_t factor = journey.bucket.buffer().is_complex() ? 2 : 1;
  std::int64_t offset = 0;
  for (std::size_t k = 0; k < journey.bucket.indices().size(); ++k) {
    const std::int64_t elements = factor * journey.bucket.parameters()[k].numel();
    function(journey.bucket.indices()[k], offset, elements);
    offset += elements;
  }
}

QuantizedBucket pack(const GradBucket& bucket, const Quantize8Options& options,
                     const ByParameter& errors) {
  QuantizedBucket made{.bucket = bucket};
  const at::Tensor& buffer = bucket.buffer();
  made.flat = buffer.is_complex() ? at::view_as_real(buffer).view({-1}) : buffer;
  made.block = static_cast<std::size_t>(options.block);
  const auto elements = static_cast<std::size_t>(made.flat.numel());
  const std::size_t share = made.ranks() * made.block;
  made.owned = (elements + share - 1) / share;
  made.values = at::empty({static_cast<std::int64_t>(made.rows() * made.block)}, at::kFloat);
  const auto count = static_cast<std::int64_t>(elements);
  made.values.narrow(0, 0, count).copy_(made.flat);
  made.values.narrow(0, count, made.values.numel() - count).zero_();
  for_each_piece(made, [&](std::size_t parameter, std::int64_t offset, std::int64_t size) {
    const auto found = errors.find(parameter);
    if (found == errors.end()) return;
    check_state(found->second, size, parameter, "hooks::Quantize8");
    made.values.narrow(0, offset, size).add_(found->second);
  });
  made.sent = byte_rows(made.rows(), made.block);
  for (std::size_t r = 0; r < made.rows(); ++r) {
    quantize_row(made.row(r), made.block, byte_row(made.sent, r));
  }
  made.arrived = byte_rows(made.rows(), made.block);
  return made;
}

// Averages the own rows, and gets the others'.
at::Tensor average(const QuantizedBucket& journey) {
  const std::size_t block = journey.block, ranks = journey.ranks();
  const at::Tensor own = byte_rows(journey.owned, block);
  std::vector<float> mean(block);
  for (std::size_t k = 0; k < journey.owned; ++k) {
    std::fill(mean.begin(), mean.end(), 0.0F);
    for (std::size_t r = 0; r < ranks; ++r) {
      add_row(byte_row(journey.arrived, r * journey.owned + k), block,
              1 / static_cast<float>(ranks), mean.data());
    }
    quantize_row(mean.data(), block, byte_row(own, k));
    // What the mean has lost is the sum of what `ranks` gradients would have to bring.
    float* const lost = journey.row(journey.first_own() + k);
    for (std::size_t i = 0; i < block; ++i) lost[i] += static_cast<float>(ranks) * mean[i];
  }
  journey.bucket.group().all_gather_single(journey.sent, own);
  return journey.sent;
}

void unpack(const QuantizedBucket& journey, const at::Tensor& rows) {
  const auto elements = static_cast<std::size_t>(journey.flat.numel());
  const bool in_place = journey.flat.scalar_type() == at::kFloat;
  const at::Tensor decoded =
      in_place ? journey.flat : at::empty({journey.flat.numel()}, at::kFloat);
  auto* const target = decoded.mutable_data_ptr<float>();
  std::vector<float> last(journey.block);
  for (std::size_t r = 0; r * journey.block < elements; ++r) {
    const std::size_t begin = r * journey.block, left = elements - begin;
    if (left >= journey.block) {
      decode_row(byte_row(rows, r), journey.block, target + begin);
    } else {
      decode_row(byte_row(rows, r), journey.block, last.data());
      std::memcpy(target + begin, last.data(), left * sizeof(float));
    }
  }
  if (!in_place) journey.flat.copy_(decoded);
}

}  // namespace

Quantize8::Quantize8(const Quantize8Options& options) : state_(std::make_shared<State>(options)) {
  constexpr std::int64_t kLeast = 8, kMost = std::int64_t{1} << 24;
  if (options.block < kLeast || options.block > kMost) {
    fail(ErrorKind::kInvalidArgument, "hooks::Quantize8: block must be from ", kLeast, " to ",
         kMost, " elements, got ", options.block);
  }
}

HookResult Quantize8::operator()(const GradBucket& bucket) const {
  const at::NoGradGuard no_grad;
  if (bucket.buffer().numel() == 0) return bucket.buffer();
  const auto journey =
      std::make_shared<const QuantizedBucket>(pack(bucket, state_->options, state_->errors));
  auto work = bucket.group().all_to_all_single_async(journey->arrived, journey->sent);
  return {std::move(work), [journey, state = state_] {
            const at::NoGradGuard inside;
            unpack(*journey, average(*journey));
            if (state->options.error_feedback) {
              for_each_piece(
                  *journey, [&](std::size_t parameter, std::int64_t offset, std::int64_t size) {
                    state->errors[parameter] = journey->values.narrow(0, offset, size).clone();
                  });
            }
            return journey->bucket.buffer();
          }};
}

void Quantize8::save(torch::serialize::OutputArchive& archive) const {
  write_state(archive, "errors", state_->errors);
}
void Quantize8::load(torch::serialize::InputArchive& archive) const {
  state_->errors = read_state(archive, "errors");
}

}  // namespace convoy::hooks
