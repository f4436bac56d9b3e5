#include "ddp/orthogonalize.h"

#include <cmath>
#include <limits>

namespace convoy {
namespace {

template <class T>
class Columns {
 public:
  Columns(T* data, std::int64_t rows, std::int64_t columns)
      : data_(data), rows_(rows), columns_(columns) {}

  double dot(std::int64_t a, std::int64_t b) const {
    double sum = 0;
    for (std::int64_t i = 0; i < rows_; ++i) sum += double{at(i, a)} * double{at(i, b)};
    return sum;
  }
  // column b -= factor * column a
  void subtract(std::int64_t a, std::int64_t b, double factor) {
    for (std::int64_t i = 0; i < rows_; ++i) {
      at(i, b) = static_cast<T>(double{at(i, b)} - factor * double{at(i, a)});
    }
  }
  void scale(std::int64_t a, double factor) {
    for (std::int64_t i = 0; i < rows_; ++i) at(i, a) = static_cast<T>(double{at(i, a)} * factor);
  }

 private:
  T& at(std::int64_t row, std::int64_t column) const { return data_[row * columns_ + column]; }

  T* data_;
  std::int64_t rows_, columns_;
};

template <class T>
std::vector<std::int64_t> orthogonalize_as(T* data, std::int64_t rows, std::int64_t columns,
                                           double epsilon) {
  Columns<T> matrix(data, rows, columns);
  std::vector<std::int64_t> dead;
  for (std::int64_t c = 0; c < columns; ++c) {
    const double before = std::sqrt(matrix.dot(c, c));
    // Twice: the second time removes what rounding left of the first.
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t b = 0; b < c; ++b) matrix.subtract(b, c, matrix.dot(b, c));
    }
    const double length = std::sqrt(matrix.dot(c, c));
    // Not `<=`: a NaN goes on to be one, for somebody to see.
    const bool is_dead = length == 0 || length < 16 * std::numeric_limits<T>::epsilon() * before;
    if (is_dead) dead.push_back(c);
    matrix.scale(c, is_dead ? 0 : 1 / (length + epsilon));
  }
  return dead;
}

}  // namespace

std::vector<std::int64_t> orthogonalize(const at::Tensor& matrix, double epsilon) {
  const std::int64_t rows = matrix.size(0), columns = matrix.size(1);
  if (matrix.scalar_type() == at::kDouble) {
    return orthogonalize_as(matrix.mutable_data_ptr<double>(), rows, columns, epsilon);
  }
  return orthogonalize_as(matrix.mutable_data_ptr<float>(), rows, columns, epsilon);
}

}  // namespace convoy
