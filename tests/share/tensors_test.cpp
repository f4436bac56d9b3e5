// What a tensor is after it was sent, its memory, and the cache: with both ends in one process.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <torch/types.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "convoy/share.h"
#include "share/cache.h"
#include "share/device.h"
#include "support.h"
#include "tensor/memory.h"

namespace convoy::share::test {
namespace {

using testing::HasSubstr;

// Across a channel, as another process would see it: the sender's own storage is not found.
at::Tensor copy_of(const at::Tensor& tensor) {
  auto [a, b] = channel();
  a.send(tensor);
  return b.receive();
}

void expect_same(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.layout(), expected.layout());
  EXPECT_EQ(actual.requires_grad(), expected.requires_grad());
  EXPECT_EQ(actual.is_conj(), expected.is_conj());
  EXPECT_EQ(actual.is_neg(), expected.is_neg());
  if (!expected.is_nested()) {
    EXPECT_EQ(actual.sizes(), expected.sizes());
  }
  const auto plain = [](const at::Tensor& tensor) {
    const auto detached = tensor.detach();
    const auto dense = detached.is_nested() ? detached.to_padded_tensor(0) : detached.to_dense();
    return dense.resolve_conj().resolve_neg();
  };
  EXPECT_TRUE(at::equal(plain(actual), plain(expected))) << actual << "\nexpected\n" << expected;
}

struct ShareTensorTest : ShareTest {};

TEST_F(ShareTensorTest, EveryType) {
  for (const auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kComplexHalf,
        at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const auto tensor = at::zeros({3, 4}, at::kByte).to(type);
    const auto same = copy_of(tensor);
    EXPECT_EQ(same.data_ptr(), tensor.data_ptr());
    EXPECT_EQ(same.scalar_type(), type);
    EXPECT_TRUE(is_shared(same));
  }
}

TEST_F(ShareTensorTest, ViewsAndBits) {
  const auto base = at::arange(24, at::kFloat).reshape({4, 6});
  for (const auto& view : {base, base.t(), base[2], base.select(1, 3), base.slice(0, 1, 4, 2),
                           base[0][0], base[1].expand({5, 6}), base.slice(0, 2, 2)}) {
    const auto same = copy_of(view);
    expect_same(same, view);
    EXPECT_EQ(same.strides(), view.strides());
    EXPECT_EQ(same.storage_offset(), view.storage_offset());
    EXPECT_TRUE(same.is_alias_of(base));
  }
  // torch.multiprocessing drops both bits: other numbers arrive.
  const auto complex = at::complex(at::ones({3}), at::ones({3}));
  expect_same(copy_of(complex.conj()), complex.conj());
  expect_same(copy_of(at::imag(complex.conj())), at::imag(complex.conj()));
}

TEST_F(ShareTensorTest, GradientsStay) {
  auto leaf = at::ones({3}).set_requires_grad(true);
  (leaf * 2).sum().backward();
  const auto same = copy_of(leaf);
  EXPECT_TRUE(same.requires_grad());
  EXPECT_TRUE(same.is_leaf());
  const auto ends = channel();
  expect_error(ErrorKind::kInvalidArgument, "detach() it first",
               [&] { ends.first.send(leaf * 2); });
  ends.first.send((leaf * 2).detach());
  EXPECT_EQ(ends.second.receive().sum().item<float>(), 6);
  const auto whole = at::arange(3);  // an integer parameter has no gradient
  expect_same(copy_of(whole), whole);
}

TEST_F(ShareTensorTest, SparseOnes) {
  const auto dense = at::tensor({0, 1, 0, 2, 0, 3}, at::kFloat).view({2, 3});
  auto coo = dense.to_sparse();
  expect_same(copy_of(coo), coo);
  EXPECT_TRUE(copy_of(coo).is_coalesced());
  const auto twice = at::sparse_coo_tensor(at::zeros({1, 2}, at::kLong), at::ones({2}), {3});
  EXPECT_FALSE(copy_of(twice).is_coalesced());
  auto learned = coo.detach();
  learned.set_requires_grad(true);  // torch.multiprocessing loses it
  EXPECT_TRUE(copy_of(learned).requires_grad());
  const auto square = at::eye(4, at::kFloat);
  for (const auto& sparse : {square.to_sparse_csr(), square.to_sparse_csc(),
                             square.to_sparse_bsr({2, 2}), square.to_sparse_bsc({2, 2})}) {
    expect_same(copy_of(sparse), sparse);
    share_memory_(sparse);
    EXPECT_TRUE(is_shared(sparse));
  }
}

TEST_F(ShareTensorTest, NestedMetaAndEmpty) {
  const auto nested = at::_nested_tensor_from_tensor_list({at::ones({2, 3}), at::ones({4, 3}) * 2});
  const auto same = copy_of(nested);
  EXPECT_TRUE(same.is_nested());
  expect_same(same, nested);
  EXPECT_EQ(same.values().data_ptr(), nested.values().data_ptr());

  const auto meta =
      at::empty_strided({3, 4}, {1, 3}, at::TensorOptions(at::kMeta).dtype(at::kHalf));
  const auto shape = copy_of(meta);
  EXPECT_TRUE(shape.is_meta());
  EXPECT_EQ(shape.sizes(), meta.sizes());
  EXPECT_EQ(shape.strides(), meta.strides());
  EXPECT_EQ(shape.scalar_type(), at::kHalf);

  for (const auto& empty :
       {at::empty({0}), at::empty({3, 0, 2}), share::empty({0, 5}, at::kLong)}) {
    expect_same(copy_of(empty), empty);
  }
}

TEST_F(ShareTensorTest, Devices) {
  DeviceSharing& cpu = device_sharing(c10::DeviceType::CPU);
  const auto tensor = at::ones({3});
  const std::string bytes = cpu.reduce(tensor);  // moves it
  EXPECT_EQ(cpu.rebuild(bytes).data_ptr(), tensor.data_ptr());
  if (!at::hasCUDA()) {
    expect_error(ErrorKind::kUnsupported, "without CUDA",
                 [] { device_sharing(c10::DeviceType::CUDA); });
  }
  expect_error(ErrorKind::kUnsupported, "copy them to the CPU",
               [] { device_sharing(c10::DeviceType::XLA); });
}

TEST_F(ShareTensorTest, WhatCannotBeSent) {
  auto [a, b] = channel();
  const auto refused = [&end = a](ErrorKind kind, const char* part, const at::Tensor& tensor) {
    expect_error(kind, part, [&] { end.send(tensor); });
  };
  refused(ErrorKind::kInvalidArgument, "undefined", {});
  refused(ErrorKind::kUnsupported, "QInt8",
          at::quantize_per_tensor(at::ones({2}), 1.0, 0, at::kQInt8));
  if (at::hasMKLDNN()) {
    refused(ErrorKind::kUnsupported, "Mkldnn", at::ones({2, 2}).to_mkldnn());
  }
  // The channel goes on.
  a.send(at::ones({2}));
  EXPECT_EQ(b.receive().sum().item<float>(), 2);
}

TEST_F(ShareTensorTest, MemoryMovesOnceAndInPlace) {
  auto tensor = at::arange(6, at::kFloat);
  const auto view = tensor.slice(0, 2, 4);
  EXPECT_FALSE(is_shared(tensor));
  EXPECT_FALSE(is_shared({}));
  share_memory_(tensor);
  EXPECT_TRUE(is_shared(tensor));
  EXPECT_TRUE(is_shared(view));
  const void* const place = tensor.data_ptr();
  view.fill_(9);
  EXPECT_EQ(tensor[2].item<float>(), 9);
  // Also under the other strategy: torch would move it, and its earlier receivers would be alone.
  set_sharing_strategy(Strategy::kFile);
  share_memory_(tensor);
  EXPECT_EQ(copy_of(tensor).data_ptr(), place);
  set_sharing_strategy(Strategy::kDescriptor);
  EXPECT_EQ(tensor.data_ptr(), place);

  const auto born = share::empty({3, 5}, at::TensorOptions(at::kDouble).requires_grad(true));
  EXPECT_TRUE(is_shared(born));
  EXPECT_TRUE(born.is_contiguous());
  EXPECT_TRUE(born.requires_grad());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(born.data_ptr()) % 64, 0U);
  expect_error(ErrorKind::kUnsupported, "meta", [] { share::empty({3}, at::kMeta); });
  expect_error(ErrorKind::kInvalidArgument, "sizes", [] { share::empty({-3}); });
  expect_error(ErrorKind::kResource, "too large for any memory",
               [] { share::empty({INT64_MAX / 2}); });
}

// torch ends the process by a segmentation fault.
TEST_F(ShareTensorTest, ASharedTensorCannotGrow) {
  auto tensor = share_memory_(at::ones({4}));
  try {
    tensor.resize_({100000});
    ADD_FAILURE() << "it grew";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("not resizable"));
  }
  tensor.resize_({4});  // torch sets sizes before it asks for memory
  EXPECT_EQ(tensor.sum().item<float>(), 4);
  tensor.resize_({2});
  EXPECT_EQ(copy_of(tensor).sum().item<float>(), 2);
  EXPECT_ANY_THROW(copy_of(tensor).resize_({100000}));
}

TEST_F(ShareTensorTest, OneStorageForOneBlock) {
  auto [a, b] = channel();
  auto tensor = at::arange(12, at::kFloat).reshape({3, 4});
  a.send(Message{tensor, tensor[1], tensor.select(1, 2)});
  const Message message = b.receive_message();
  EXPECT_TRUE(message.tensor(0).is_alias_of(message.tensor(1)));
  EXPECT_TRUE(message.tensor(0).is_alias_of(message.tensor(2)));
  a.send(tensor);
  EXPECT_TRUE(b.receive().is_alias_of(message.tensor(0)));
  // It came home: not only the same memory, but the same storage.
  EXPECT_EQ(message.tensor(0).storage().unsafeGetStorageImpl(),
            tensor.storage().unsafeGetStorageImpl());
}

TEST_F(ShareTensorTest, EntriesOfTheCacheGoWithTheirStorages) {
  SharedCache& cache = SharedCache::instance();
  const std::size_t before = cache.free_dead_references();
  {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 300; ++i) many.push_back(share_memory_(at::ones({4})));
    EXPECT_EQ(cache.size(), before + 300);
  }
  EXPECT_EQ(cache.size(), before);
}

TEST_F(ShareTensorTest, MemoryOfAGroupIsSharedAsItIs) {
  auto [a, b] = channel();
  {
    auto tensor = empty_shared({8}, at::kFloat).fill_(1);
    EXPECT_TRUE(is_shared(tensor));
    const void* const place = tensor.data_ptr();
    a.send(tensor.slice(0, 2, 4));
    const auto same = b.receive();
    EXPECT_EQ(tensor.data_ptr(), place);
    EXPECT_EQ(same.storage().unsafeGetStorageImpl(), tensor.storage().unsafeGetStorageImpl());
    a.send(tensor);
  }
  // Its storage is gone, the memory is not: the message is under way.
  const auto again = b.receive();
  EXPECT_EQ(again.sum().item<float>(), 8);
  SharedCache::instance().free_dead_references();
}

TEST_F(ShareTensorTest, TenThousandTensorsTakeFewDescriptors) {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = count();
  std::vector<at::Tensor> many;
  for (int i = 0; i < 10'000; ++i) many.push_back(share_memory_(at::full({16}, i)));
  EXPECT_LT(count() - before, 20);
  for (int i = 0; i < 10'000; i += 999) {
    EXPECT_EQ(many[static_cast<std::size_t>(i)][15].item<float>(), static_cast<float>(i));
  }
}

TEST_F(ShareTensorTest, TooLittleMemoryIsAnError) {
  trim();
  Depot::instance().set_headroom_for_testing([] { return std::uint64_t{1} << 20; });
  auto tensor = at::ones({1 << 20});
  auto [a, b] = channel();
  expect_error(ErrorKind::kResource, "cannot grow", [&, &end = a] { end.send(tensor); });
  EXPECT_FALSE(is_shared(tensor));
  EXPECT_EQ(tensor.sum().item<float>(), 1 << 20);  // as it was
  a.send(at::ones({4}));                           // that much is left
  EXPECT_EQ(b.receive().sum().item<float>(), 4);
  Depot::instance().set_headroom_for_testing(nullptr);
  a.send(tensor);
  EXPECT_EQ(b.receive().sum().item<float>(), 1 << 20);
}

TEST_F(ShareTensorTest, TrimGivesMemoryBack) {
  trim();
  const std::size_t before = usage().pool_bytes;
  auto tensor = share::empty({1 << 20});
  EXPECT_GE(usage().pool_bytes, before + (4U << 20));
  EXPECT_EQ(usage().blocks, 1U);
  trim();
  EXPECT_GE(usage().pool_bytes, 4U << 20);  // in use
  tensor.reset();
  EXPECT_GT(trim(), 4U << 20);
  EXPECT_EQ(usage().pool_bytes, before);
}

TEST_F(ShareTensorTest, AsBytesOnce) {
  auto tensor = at::arange(5, at::kFloat);
  std::string bytes = to_bytes(tensor.slice(0, 1, 3));
  const auto same = from_bytes(bytes);
  EXPECT_TRUE(same.is_alias_of(tensor));
  EXPECT_EQ(same.sum().item<float>(), 3);
  expect_error(ErrorKind::kInvalidArgument, "malformed message",
               [] { from_bytes("something else"); });
  bytes = to_bytes(at::ones({3}));  // nobody has it but the bytes
  EXPECT_EQ(usage().elsewhere, 1U);
  EXPECT_EQ(from_bytes(bytes).sum().item<float>(), 3);
  EXPECT_EQ(usage().elsewhere, 0U);
  expect_error(ErrorKind::kPeerLost, "no longer exists", [&] { from_bytes(bytes); });
}

TEST_F(ShareTensorTest, FilesLiveAsLongAsTheirStorages) {
  const std::size_t before = files("t-").size();
  set_sharing_strategy(Strategy::kFile);
  EXPECT_EQ(get_sharing_strategy(), Strategy::kFile);
  {
    auto [a, b] = channel();
    auto tensor = at::ones({3});
    a.send(tensor);
    EXPECT_EQ(files("t-").size(), before + 1);
    const auto same = b.receive();
    EXPECT_TRUE(same.is_alias_of(tensor));
    a.send(at::ones({5}));
    EXPECT_EQ(files("t-").size(), before + 2);  // only the message has it
    EXPECT_EQ(b.receive().sum().item<float>(), 5);
  }
  EXPECT_EQ(files("t-").size(), before);
  const auto bytes = to_bytes(at::ones({7}));
  EXPECT_EQ(files("t-").size(), before + 1);
  EXPECT_EQ(from_bytes(bytes).sum().item<float>(), 7);
  EXPECT_EQ(files("t-").size(), before);
  expect_error(ErrorKind::kPeerLost, "no longer exists", [&] { from_bytes(bytes); });
  set_sharing_strategy(Strategy::kDescriptor);
}

// Threads that share, send, receive and drop the same few storages.
TEST_F(ShareTensorTest, ManyThreads) {
  auto [a, b] = channel();
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back(at::full({64}, i, at::kFloat));
  constexpr int kEach = 300;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, &end = a] {
        for (int i = 0; i < kEach; ++i) {
          end.send(Message{tensors[static_cast<std::size_t>(i % 4)], std::int64_t{i % 4}});
          share_memory_(at::ones({i + 1}));
        }
      });
      threads.emplace_back([&, &end = b] {
        for (int i = 0; i < kEach; ++i) {
          const Message message = end.receive_message(soon());
          EXPECT_EQ(message.tensor(0)[63].item<float>(), static_cast<float>(message.integer(1)));
        }
      });
    }
  }
  for (const auto& tensor : tensors) EXPECT_TRUE(is_shared(tensor));
}

}  // namespace
}  // namespace convoy::share::test
