// Memory that torch shares stays where it is, whoever passes it on; and what has no memory is
// refused. tests/python/hogwild_test.py has the same with torch's own processes.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/MapAllocator.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <sys/mman.h>
#include <torch/types.h>

#include "convoy/published.h"
#include "convoy/queue.h"
#include "convoy/spawn.h"
#include "share/cache.h"
#include "support.h"

namespace convoy::share::test {
namespace {

class OutsideTest : public ShareTest {};
class NoMemoryTest : public ShareTest {};

constexpr std::int64_t kElements = 1000;

// As torch's share_memory_() in Python.
at::Tensor torch_shared() {
  std::size_t bytes = 0;
  auto data = at::MapAllocator::makeDataPtr(
      at::NewProcessWideShmHandle(),
      at::ALLOCATOR_MAPPED_SHAREDMEM | at::ALLOCATOR_MAPPED_EXCLUSIVE |
          at::ALLOCATOR_MAPPED_KEEPFD | at::ALLOCATOR_MAPPED_UNLINK,
      kElements * sizeof(float), &bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), nullptr, false);
  auto tensor = at::empty({0}, at::kFloat);
  tensor.set_(storage, 0, {kElements}, {1});
  return tensor.fill_(1);
}

void add_one(int, const at::Tensor& tensor) { tensor.add_(1); }

TEST_F(OutsideTest, StaysWhereItIs) {
  const at::Tensor tensor = torch_shared();
  const void* const place = tensor.data_ptr();
  share_memory_(tensor);
  EXPECT_EQ(tensor.data_ptr(), place);
  EXPECT_FALSE(is_shared(tensor));  // by this library
  auto [a, b] = channel();
  for (int i = 0; i < 3; ++i) {
    a.send(Message{tensor, tensor.slice(0, 10)});
    const Message got = b.receive_message(soon());
    EXPECT_EQ(got.tensor(0).storage().unsafeGetStorageImpl(),
              tensor.storage().unsafeGetStorageImpl());
    EXPECT_EQ(got.tensor(1).data_ptr(), tensor.slice(0, 10).data_ptr());
  }
  const Queue queue({.capacity = 4, .item_bytes = 8192, .copy_below = 4096});
  const at::Tensor second = torch_shared();
  queue.put(Message{tensor, second});
  const Message both = queue.get(soon());
  EXPECT_EQ(both.tensor(0).data_ptr(), place);
  EXPECT_EQ(both.tensor(1).data_ptr(), second.data_ptr());
  EXPECT_EQ(from_bytes(to_bytes(tensor)).data_ptr(), place);
}

TEST_F(OutsideTest, OtherProcessesSeeIt) {
  const at::Tensor tensor = torch_shared();
  const void* const place = tensor.data_ptr();
  EXPECT_TRUE(convoy::spawn<add_one>(2, tensor).join(soon()));
  EXPECT_EQ(tensor.data_ptr(), place);
  EXPECT_TRUE(tensor.eq(3).all().item<bool>());
}

// The memory outlives the tensor here as long as others have it, and then is gone.
TEST_F(OutsideTest, LivesAsLongAsAnybodyHasIt) {
  const Queue queue({.capacity = 4});
  c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      torch_shared().storage().unsafeGetStorageImpl()));
  EXPECT_TRUE(weak.expired());
  {
    at::Tensor tensor = torch_shared();
    weak = tensor.storage().getWeakStorageImpl();
    queue.put(tensor);
  }
  EXPECT_FALSE(weak.expired());
  at::Tensor got = queue.get(soon()).tensor(0);
  EXPECT_TRUE(got.eq(1).all().item<bool>());
  got.reset();
  (void)trim();
  EXPECT_TRUE(weak.expired());
}

// Others of the same kind: memory that only forked children can have.
TEST_F(OutsideTest, WhatCannotBePassedOnIsRefused) {
  constexpr std::size_t kBytes = 4096;
  void* const memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  {
    const at::Tensor tensor = at::from_blob(memory, {4});
    auto [a, b] = channel();
    expect_error(ErrorKind::kUnsupported, "share a clone()", [&] { a.send(tensor); });
    expect_error(ErrorKind::kUnsupported, "share a clone()", [&] { share_memory_(tensor); });
    EXPECT_EQ(tensor.data_ptr(), memory);
    a.send(tensor.clone());
    EXPECT_EQ(b.receive(soon()).numel(), 4);
  }
  ::munmap(memory, kBytes);
}

// Memory that is this process's alone is moved as ever, wherever it came from.
TEST_F(OutsideTest, PrivateMemoryIsMoved) {
  std::vector<float> own(kElements, 2);
  const at::Tensor tensor = at::from_blob(own.data(), {kElements});
  share_memory_(tensor);
  EXPECT_NE(tensor.data_ptr(), own.data());
  EXPECT_TRUE(is_shared(tensor));
  EXPECT_TRUE(tensor.eq(2).all().item<bool>());
}

void expect_refused(const at::Tensor& tensor, ErrorKind kind, std::string_view part) {
  auto [a, b] = channel();
  const Queue queue({.capacity = 4});
  expect_error(kind, part, [&] { a.send(tensor); });
  expect_error(kind, part, [&] { a.send(Message(std::vector<Value>(5, tensor))); });
  expect_error(kind, part, [&] { queue.put(tensor); });
  expect_error(kind, part, [&] { share_memory_(tensor); });
  expect_error(kind, part, [&] { (void)to_bytes(tensor); });
  EXPECT_FALSE(is_shared(tensor));
  EXPECT_FALSE(b.try_receive());
}

TEST_F(NoMemoryTest, ZeroTensor) {
  expect_refused(at::_efficientzerotensor({3}, at::kFloat), ErrorKind::kUnsupported, "zero tensor");
}

TEST_F(NoMemoryTest, FunctionalTensor) {
  expect_refused(at::functionalization::impl::to_functional_tensor(at::ones({3})),
                 ErrorKind::kUnsupported, "functional tensor");
}

TEST_F(NoMemoryTest, FreedStorage) {
  const at::Tensor tensor = at::ones({3});
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(0);
  expect_refused(tensor, ErrorKind::kInvalidArgument, "freed or shrunk");
  const at::Tensor sparse = at::ones({3}).to_sparse();
  sparse._values().storage().unsafeGetStorageImpl()->set_nbytes(0);
  expect_refused(sparse, ErrorKind::kInvalidArgument, "freed or shrunk");
  // Nothing is missing of an empty one.
  const at::Tensor empty_part = at::ones({3}).slice(0, 2, 2);
  empty_part.storage().unsafeGetStorageImpl()->set_nbytes(0);
  auto [a, b] = channel();
  a.send(empty_part);
  EXPECT_EQ(b.receive(soon()).numel(), 0);
}

TEST_F(NoMemoryTest, Published) {
  const share::PublishedTensors weights({{"w", at::ones({3})}}, {});
  const at::Tensor freed = at::ones({3});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  expect_error(ErrorKind::kInvalidArgument, "freed", [&] { weights.publish({{"w", freed}}); });
  weights.publish({{"w", at::_efficientzerotensor({3}, at::kFloat)}});
  EXPECT_TRUE(weights.read()["w"].eq(0).all().item<bool>());
}

// Of several handles of one tensor, each holds the memory by itself.
TEST_F(OutsideTest, BytesAreTurnedOnce) {
  for (const Strategy strategy : {Strategy::kDescriptor, Strategy::kFile}) {
    const Strategy before = get_sharing_strategy();
    set_sharing_strategy(strategy);
    std::string first, second;
    {
      const at::Tensor tensor = at::ones({kElements});
      first = to_bytes(tensor);
      second = to_bytes(tensor);
    }
    set_sharing_strategy(before);
    (void)from_bytes(first);
    for (int i = 0; i < 3; ++i) {
      expect_error(ErrorKind::kPeerLost, "turned into a tensor before",
                   [&] { (void)from_bytes(first); });
    }
    std::vector<at::Tensor> others;
    for (int i = 0; i < 20; ++i) others.push_back(share_memory_(at::zeros({kElements})));
    EXPECT_TRUE(from_bytes(second).eq(1).all().item<bool>());
  }
}

}  // namespace
}  // namespace convoy::share::test
