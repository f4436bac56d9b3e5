#include "tensor/handle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <map>
#include <random>

#include "convoy/error.h"
#include "tensor/memory.h"
#include "transport/shm/fabric.h"

namespace convoy {
namespace {

using testing::HasSubstr;

// Storages of this process itself, each once: what a receiver does with peers' memory. (Sizes are
// part of the key because a place is used again after its tensor has gone.)
class Resolver {
 public:
  c10::Storage operator()(const shm::Location& location, std::uint64_t bytes) {
    auto& storage = storages_[{location.segment, location.offset, bytes}];
    if (!storage) {
      auto* const data = shm::Fabric::instance().resolve(location, bytes);
      storage = c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                             c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)));
    }
    return storage;
  }

 private:
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>, c10::Storage> storages_;
};

at::Tensor shared(const at::Tensor& like) {
  return empty_shared(like.sizes(), like.options()).copy_(like);
}

at::Tensor there_and_back(const at::Tensor& tensor, Resolver& resolver) {
  const auto handle = handle_of(tensor);
  const auto decoded = decode_handle(encode(handle));
  EXPECT_EQ(decoded, handle);
  return tensor_of(decoded, std::ref(resolver));
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.layout(), expected.layout());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  EXPECT_EQ(actual.requires_grad(), expected.requires_grad());
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.detach().to_dense().resolve_conj().resolve_neg();
  };
  EXPECT_TRUE(at::equal(plain(actual), plain(expected))) << actual << "\nexpected\n" << expected;
}

TEST(TensorHandleTest, EveryTypeAndView) {
  Resolver resolver;
  for (const auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kComplexHalf,
        at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    auto tensor = empty_shared({3, 4}, type);
    std::memset(tensor.data_ptr(), 1, tensor.nbytes());
    const auto same = there_and_back(tensor, resolver);
    EXPECT_EQ(same.data_ptr(), tensor.data_ptr());
    EXPECT_EQ(same.scalar_type(), type);
  }
  const auto base = shared(at::arange(24, at::kFloat).reshape({4, 6}));
  for (const auto& view :
       {base, base.t(), base[2], base.select(1, 3), base.slice(0, 1, 4, 2), base[0][0],
        base[1].expand({5, 6}), base.slice(0, 2, 2), base.unfold(1, 3, 1)}) {
    const auto same = there_and_back(view, resolver);
    expect_same(same, view);
    EXPECT_EQ(same.strides(), view.strides());
    EXPECT_EQ(same.storage_offset(), view.storage_offset());
  }
  // Views of one storage are views of one storage.
  auto row = there_and_back(base[0], resolver),
       column = there_and_back(base.select(1, 0), resolver);
  EXPECT_TRUE(row.is_alias_of(column));
  row[0].fill_(100);
  EXPECT_EQ(column[0].item<float>(), 100);
  EXPECT_EQ(base[0][0].item<float>(), 100);
}

TEST(TensorHandleTest, BitsGradientsAndNothing) {
  Resolver resolver;
  const auto complex = shared(at::complex(at::ones({3}), at::ones({3})));
  // torch.multiprocessing drops both bits: other values arrive.
  for (const auto& lazy : {complex.conj(), at::imag(complex.conj())}) {
    const auto same = there_and_back(lazy, resolver);
    expect_same(same, lazy);
    EXPECT_EQ(same.is_conj(), lazy.is_conj());
    EXPECT_EQ(same.is_neg(), lazy.is_neg());
  }
  auto leaf = shared(at::ones({2}));
  leaf.set_requires_grad(true);
  EXPECT_TRUE(there_and_back(leaf, resolver).requires_grad());
  for (const auto& empty : {empty_shared({0}, at::kLong), empty_shared({3, 0, 2}, at::kFloat)}) {
    expect_same(there_and_back(empty, resolver), empty);
  }
}

TEST(TensorHandleTest, SparseLayouts) {
  Resolver resolver;
  const auto dense = at::tensor({0, 1, 0, 2, 0, 3}, at::kFloat).view({2, 3});
  const auto coo = dense.to_sparse();
  const auto sparse = at::_sparse_coo_tensor_unsafe(shared(coo._indices()), shared(coo._values()),
                                                    coo.sizes(), coo.options());
  expect_same(there_and_back(sparse, resolver), sparse);
  sparse._coalesced_(true);
  EXPECT_TRUE(there_and_back(sparse, resolver).is_coalesced());
  auto learned = sparse.detach();
  learned.set_requires_grad(true);  // torch.multiprocessing loses it
  EXPECT_TRUE(there_and_back(learned, resolver).requires_grad());

  const auto square = at::eye(4, at::kFloat);
  const auto compressed = [&](const at::Tensor& made, const at::Tensor& first,
                              const at::Tensor& second) {
    const auto tensor = at::_sparse_compressed_tensor_unsafe(
        shared(first), shared(second), shared(made.values()), made.sizes(), made.options());
    expect_same(there_and_back(tensor, resolver), tensor);
  };
  const auto csr = square.to_sparse_csr(), csc = square.to_sparse_csc();
  const auto bsr = square.to_sparse_bsr({2, 2}), bsc = square.to_sparse_bsc({2, 2});
  compressed(csr, csr.crow_indices(), csr.col_indices());
  compressed(csc, csc.ccol_indices(), csc.row_indices());
  compressed(bsr, bsr.crow_indices(), bsr.col_indices());
  compressed(bsc, bsc.ccol_indices(), bsc.row_indices());
}

template <class Function>
void refused(const char* part, Function function) {
  try {
    function();
    ADD_FAILURE() << "nothing was thrown; expected: " << part;
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(TensorHandleTest, WhatHasNone) {
  refused("not in shared memory", [] { handle_of(at::ones({3})); });
  refused("undefined", [] { handle_of({}); });
  refused("QInt8", [] { handle_of(at::quantize_per_tensor(at::ones({2}), 1.0, 0, at::kQInt8)); });
}

TEST(TensorHandleTest, BytesThatAreNoHandle) {
  const auto tensor = empty_shared({4, 6}, at::kFloat);
  const std::string good = encode(handle_of(tensor.t()));
  for (std::size_t length = 0; length < good.size(); ++length) {
    refused("malformed handle", [&] { decode_handle(std::string_view(good).substr(0, length)); });
  }
  refused("more behind it", [&] { decode_handle(good + "x"); });
  const auto changed = [&](const auto& change) {
    auto handle = handle_of(tensor.t());
    change(handle);
    return encode(handle);
  };
  const auto beyond = "not all inside of its storage";
  refused(beyond, [&] { decode_handle(changed([](auto& h) { h.offset = 1; })); });
  refused(beyond, [&] { decode_handle(changed([](auto& h) { h.sizes[0] = 7; })); });
  refused(beyond, [&] { decode_handle(changed([](auto& h) { h.strides[1] = 9; })); });
  refused(beyond, [&] { decode_handle(changed([](auto& h) { h.type = at::kDouble; })); });
  refused("negative", [&] { decode_handle(changed([](auto& h) { h.sizes[0] = -1; })); });
  refused("negative", [&] { decode_handle(changed([](auto& h) { h.strides[0] = -1; })); });
  refused("negative", [&] { decode_handle(changed([](auto& h) { h.offset = -24; })); });
  refused("beyond any memory",
          [&] { decode_handle(changed([](auto& h) { h.sizes = {INT64_MAX, INT64_MAX}; })); });
  refused("without a place", [&] { decode_handle(changed([](auto& h) { h.storage = {}; })); });
  refused("layout", [&] { decode_handle(changed([](auto& h) { h.layout = c10::kSparse; })); });
}

// Whatever is made of a good handle: it is refused, or all its elements are inside.
TEST(TensorHandleTest, DamagedHandlesAreRefusedOrHarmless) {
  const auto tensor = empty_shared({4, 6}, at::kFloat);
  const auto coo = at::_sparse_coo_tensor_unsafe(shared(at::zeros({1, 2}, at::kLong)),
                                                 shared(at::ones({2})), {5}, at::kFloat);
  const std::string seeds[] = {encode(handle_of(tensor.t())), encode(handle_of(coo))};
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 100'000; ++round) {
    std::string bytes = seeds[round % 2];
    for (auto changes = 1 + random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    TensorHandle handle;
    try {
      handle = decode_handle(bytes);
    } catch (const Error&) {
      continue;
    }
    ++accepted;
    std::vector<TensorHandle> parts = handle.parts;
    parts.push_back(handle);
    for (const auto& part : parts) {
      if (part.kind != TensorHandle::Kind::kStrided) continue;
      auto end = static_cast<unsigned __int128>(part.offset) + 1;
      bool empty = false;
      for (std::size_t i = 0; i < part.sizes.size(); ++i) {
        empty = empty || part.sizes[i] == 0;
        end += static_cast<unsigned __int128>(std::max<std::int64_t>(part.sizes[i] - 1, 0)) *
               static_cast<unsigned __int128>(part.strides[i]);
      }
      ASSERT_TRUE(empty || end * c10::elementSize(part.type) <= part.storage_bytes);
    }
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace convoy
