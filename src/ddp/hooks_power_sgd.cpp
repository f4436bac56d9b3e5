// PowerSGD: gradients as products of two thin matrices.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "convoy/hooks.h"
#include "ddp/hook_state.h"
#include "ddp/orthogonalize.h"
#include "ddp/reduce_bucket.h"

namespace convoy::hooks {

struct PowerSgd::State {
  explicit State(const PowerSgdOptions& wanted) : options(wanted) {}

  const PowerSgdOptions options;
  BackwardCount count;
  ByParameter errors;   // as the matrices
  ByParameter factors;  // m x r, of the approximation before
  Traffic traffic;
  std::uint64_t traffic_of = 0;  // which backward
};

namespace {

// One gradient as a matrix, and what becomes of it.
struct Matrix {
  std::size_t parameter;
  at::Tensor gradient;        // in the bucket
  at::Tensor values = {};     // n x m, with the error of before; not in the bucket
  at::Tensor p = {}, q = {};  // n x r and m x r, in the memory that travels

  std::int64_t rows() const { return values.size(0); }
  std::int64_t columns() const { return values.size(1); }
  std::int64_t rank() const { return p.size(1); }
};

// A bucket on its way.
struct Journey {
  GradBucket bucket;
  at::ScalarType wire;  // what travels is of this type, as the bucket
  std::vector<Matrix> matrices = {};
  std::vector<at::Tensor> small = {};  // gradients that go as they are
  at::Tensor small_values = {};        // these one after the other
  at::Tensor all_p = {}, all_q = {};
  std::optional<HookResult> small_result = {};
};

at::Tensor as_real(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient) : gradient;
}

std::int64_t rank_for(std::int64_t rows, std::int64_t columns, const PowerSgdOptions& options) {
  return std::min<std::int64_t>({rows, columns, options.matrix_approximation_rank});
}

bool pays(std::int64_t rows, std::int64_t columns, const PowerSgdOptions& options) {
  if (rows == 0 || columns == 0) return false;
  const auto rank = static_cast<double>(rank_for(rows, columns, options));
  return static_cast<double>(rows + columns) * rank * options.min_compression_rate <
         static_cast<double>(rows) * static_cast<double>(columns);
}

// Standard normal numbers, the same on all ranks.
at::Tensor noise(const PowerSgdOptions& options, std::size_t parameter, std::uint64_t backward,
                 at::IntArrayRef sizes, at::ScalarType type) {
  std::uint64_t seed = options.random_seed;
  for (const std::uint64_t part : {std::uint64_t{parameter}, backward}) {
    seed = (seed ^ part) * 0x9e3779b97f4a7c15 + 1;
  }
  const auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(type));
}

// Columns of length one that are orthogonal, for what has none in their direction too: a column
// that died out would never come back.
void orthogonalize_or_fill(const at::Tensor& q, const PowerSgdOptions& options,
                           std::size_t parameter, std::uint64_t backward) {
  const auto dead = orthogonalize(q, options.orthogonalization_epsilon);
  if (dead.empty()) return;
  const at::Tensor fresh = noise(options, parameter, backward, q.sizes(), q.scalar_type());
  for (const std::int64_t column : dead) q.select(1, column).copy_(fresh.select(1, column));
  orthogonalize(q, options.orthogonalization_epsilon);
}

// The mean of `values` over all ranks, in the type that travels.
HookResult start_mean(const Journey& journey, const at::Tensor& values) {
  const at::Tensor sent = values.scalar_type() == journey.wire ? values : values.to(journey.wire);
  return reduce_bucket(journey.bucket.group(), sent, GradReduce::kMean, 1)
      .then([values](const at::Tensor& mean) -> at::Tensor {
        if (!mean.is_same(values)) values.copy_(mean);
        return values;
      });
}

}  // namespace

PowerSgd::PowerSgd(const PowerSgdOptions& options) : state_(std::make_shared<State>(options)) {
  const auto require = [](bool fine, const auto&... text) {
    if (!fine) fail(ErrorKind::kInvalidArgument, "hooks::PowerSgd: ", text...);
  };
  require(options.matrix_approximation_rank >= 1, "matrix_approximation_rank must be >= 1, got ",
          options.matrix_approximation_rank);
  require(options.min_compression_rate >= 1, "min_compression_rate must be >= 1, got ",
          options.min_compression_rate);
  require(options.orthogonalization_epsilon >= 0, "orthogonalization_epsilon must be >= 0, got ",
          options.orthogonalization_epsilon);
}

namespace {

Journey pack(const GradBucket& bucket, const PowerSgdOptions& options, const ByParameter& errors) {
  Journey made{.bucket = bucket, .wire = as_real(bucket.buffer()).scalar_type()};
  const auto type = made.wire == at::kDouble ? at::kDouble : at::kFloat;
  const auto gradients = bucket.gradients();
  std::int64_t p_size = 0, q_size = 0;
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const at::Tensor gradient = as_real(gradients[k]);
    const std::int64_t rows = gradient.dim() < 2 ? 0 : gradient.size(0);
    const std::int64_t columns = rows == 0 ? 0 : gradient.numel() / rows;
    if (!pays(rows, columns, options)) {
      made.small.push_back(gradient);
      continue;
    }
    Matrix matrix{.parameter = bucket.indices()[k], .gradient = gradient};
    const auto found = errors.find(matrix.parameter);
    if (found == errors.end()) {
      matrix.values = at::empty({rows, columns}, at::TensorOptions().dtype(type));
      matrix.values.copy_(gradient.reshape({rows, columns}));
    } else {
      check_state(found->second, rows * columns, matrix.parameter, "hooks::PowerSgd");
      matrix.values = at::add(found->second, gradient.reshape({rows, columns}).to(type));
    }
    const std::int64_t rank = rank_for(rows, columns, options);
    p_size += rows * rank;
    q_size += columns * rank;
    made.matrices.push_back(std::move(matrix));
  }
  made.all_p = at::empty({p_size}, at::TensorOptions().dtype(type));
  made.all_q = at::empty({q_size}, at::TensorOptions().dtype(type));
  std::int64_t p_at = 0, q_at = 0;
  for (Matrix& matrix : made.matrices) {
    const std::int64_t n = matrix.rows(), m = matrix.columns(), r = rank_for(n, m, options);
    matrix.p = made.all_p.narrow(0, p_at, n * r).view({n, r});
    matrix.q = made.all_q.narrow(0, q_at, m * r).view({m, r});
    p_at += n * r;
    q_at += m * r;
  }
  return made;
}

}  // namespace

HookResult PowerSgd::operator()(const GradBucket& bucket) const {
  const at::NoGradGuard no_grad;
  const PowerSgdOptions& options = state_->options;
  const std::uint64_t backward = state_->count.of(bucket);
  if (std::exchange(state_->traffic_of, backward) != backward) state_->traffic = {};
  const auto elements = static_cast<std::uint64_t>(bucket.buffer().numel());
  state_->traffic.gradients += elements;
  const auto plain = [&] {
    state_->traffic.sent += elements;
    return all_reduce(bucket);
  };
  if (backward <= options.start_power_sgd_iter) return plain();
  auto made = pack(bucket, options, state_->errors);
  if (made.matrices.empty()) return plain();

  const auto journey = std::make_shared<Journey>(std::move(made));
  for (const Matrix& matrix : journey->matrices) {
    const auto before = state_->factors.find(matrix.parameter);
    const bool warm = options.warm_start && before != state_->factors.end() &&
                      before->second.sizes().equals(matrix.q.sizes());
    matrix.q.copy_(warm ? before->second
                        : noise(options, matrix.parameter, backward, matrix.q.sizes(),
                                matrix.q.scalar_type()));
    orthogonalize_or_fill(matrix.q, options, matrix.parameter, backward);
    at::Tensor p = matrix.p;
    at::mm_out(p, matrix.values, matrix.q);
  }
  state_->traffic.sent +=
      static_cast<std::uint64_t>(journey->all_p.numel() + journey->all_q.numel());
  if (!journey->small.empty()) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : journey->small) flat.push_back(gradient.reshape({-1}));
    journey->small_values = at::cat(flat);
    state_->traffic.sent += static_cast<std::uint64_t>(journey->small_values.numel());
    journey->small_result = start_mean(*journey, journey->small_values);
  }
  return start_mean(*journey, journey->all_p)
      .then([journey, state = state_](const at::Tensor&) -> at::Tensor {
        const at::NoGradGuard inside;
        const double epsilon = state->options.orthogonalization_epsilon;
        for (const Matrix& matrix : journey->matrices) {
          orthogonalize(matrix.p, epsilon);
          at::Tensor q = matrix.q;
          at::mm_out(q, matrix.values.t(), matrix.p);
        }
        start_mean(*journey, journey->all_q).wait();
        for (const Matrix& matrix : journey->matrices) {
          const at::Tensor product = at::mm(matrix.p, matrix.q.t());
          at::Tensor gradient = matrix.gradient;
          gradient.copy_(product.view(gradient.sizes()));
          if (state->options.use_error_feedback) {
            at::Tensor error = matrix.values;
            state->errors[matrix.parameter] = error.sub_(product);
          }
          if (state->options.warm_start) state->factors[matrix.parameter] = matrix.q.clone();
        }
        if (journey->small_result) {
          at::Tensor values = journey->small_result->wait();
          std::int64_t offset = 0;
          for (const at::Tensor& gradient : journey->small) {
            gradient.copy_(values.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
            offset += gradient.numel();
          }
        }
        return journey->bucket.buffer();
      });
}

PowerSgd::Traffic PowerSgd::traffic() const { return state_->traffic; }

void PowerSgd::save(torch::serialize::OutputArchive& archive) const {
  write_number(archive, "backwards", state_->count.last());
  write_state(archive, "errors", state_->errors);
  write_state(archive, "factors", state_->factors);
}

void PowerSgd::load(torch::serialize::InputArchive& archive) const {
  auto errors = read_state(archive, "errors");
  state_->factors = read_state(archive, "factors");
  state_->errors = std::move(errors);
  state_->count.go_on_after(read_number(archive, "backwards"));
}

}  // namespace convoy::hooks
