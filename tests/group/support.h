#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <vector>

#include "convoy/backend.h"
#include "convoy/group.h"
#include "convoy/init.h"
#include "support/rank_group.h"

namespace convoy::test {

using Tensors = std::vector<at::Tensor>;

inline c10::intrusive_ptr<ConvoyBackend> make_backend(const Rank& r,
                                                      const std::string& name = "world") {
  if (r.mode() == RankMode::kMpi) {
    const auto group = new_group("mpi", {.timeout = std::chrono::seconds(30),
                                         .store = with_prefix(r.store(), name),
                                         .rank = r.id(),
                                         .size = r.size(),
                                         .name = name,
                                         .options = {{"check", "true"}}});
    return c10::intrusive_ptr<ConvoyBackend>::reclaim_copy(
        dynamic_cast<ConvoyBackend*>(group.backend().get()));
  }
  auto options = c10::make_intrusive<ConvoyBackend::Options>(std::chrono::seconds(30));
  options->group_name = name;
  return c10::make_intrusive<ConvoyBackend>(with_prefix(r.store(), name), r.id(), r.size(),
                                            options);
}

inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_TRUE(at::equal(actual, expected)) << actual << "\nexpected\n" << expected;
}

// A tensor of one value.
inline at::Tensor full(double value, at::IntArrayRef sizes, c10::ScalarType type = at::kFloat) {
  return at::full(sizes, value, at::TensorOptions().dtype(type));
}

// What a function throws, which must throw.
template <class Function>
std::string text_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace convoy::test
