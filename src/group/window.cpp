#include "convoy/window.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Storage.h>

#include "base/error.h"
#include "coll/window.h"
#include "group/process_group_impl.h"
#include "tensor/handle.h"
#include "tensor/memory.h"

namespace convoy {

struct Window::Impl : std::enable_shared_from_this<Window::Impl> {
  ProcessGroup group;
  at::Tensor mine;                    // outlives `memory`, which says when others are done with it
  std::vector<TensorHandle> tensors;  // by rank
  std::shared_ptr<coll::Window> memory;  // of the storages
};

namespace {

void check(const at::Tensor& tensor) {
  constexpr const char* kAdvice = "; take one from group.allocate()";
  if (!tensor.defined()) fail(ErrorKind::kInvalidArgument, "the tensor is undefined", kAdvice);
  if (tensor.is_meta() || tensor.layout() != c10::kStrided) {
    fail(ErrorKind::kInvalidArgument, "the tensor has no dense memory of the CPU", kAdvice);
  }
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    fail(ErrorKind::kInvalidArgument, "the tensor is not contiguous", kAdvice);
  }
  if (tensor.storage().nbytes() != 0 && !is_shared_memory(tensor)) {
    fail(ErrorKind::kInvalidArgument, "the tensor is in private memory", kAdvice);
  }
}

std::span<std::byte> storage_of(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  if (storage.nbytes() == 0) return {};
  return {static_cast<std::byte*>(storage.mutable_data()), storage.nbytes()};
}

}  // namespace

Window ProcessGroup::window(const at::Tensor& tensor, const CallOptions& options) const {
  impl().check_process("window");
  if (!impl().shares_memory()) {
    fail(ErrorKind::kUnsupported, impl().head("window"), "the ranks of backend \"", backend_name(),
         "\" do not share memory; a window needs backend \"convoy\"");
  }
  auto made = std::make_shared<Window::Impl>();
  made->group = *this;
  // A rank that cannot go on says so, instead of letting the others wait.
  std::string handle;
  try {
    check(tensor);
    made->mine = tensor.detach();
    handle = concat("+", encode(handle_of(made->mine)));
  } catch (const std::exception& error) {
    handle = concat("-", error.what());
  }
  const auto all = all_gather_object(handle, options);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].front() == '+') continue;
    fail(ErrorKind::kInvalidArgument, "window, group \"", name(), "\", rank ", rank(), " of ",
         size(), ": rank ", r, ": ", all[r].substr(1));
  }
  for (const auto& one : all)
    made->tensors.push_back(decode_handle(std::string_view(one).substr(1)));
  const auto limit = in_milliseconds(options.timeout);
  made->memory = coll::Window::create(impl().own->group(), storage_of(made->mine),
                                      limit.count() == 0 ? timeout() : limit);
  return Window(std::move(made));
}

Window::Impl& Window::impl() const {
  if (!impl_)
    fail(ErrorKind::kInvalidArgument, "this Window is empty; group.window(tensor) gives one");
  return *impl_;
}

int Window::rank() const { return impl().memory->rank(); }
int Window::size() const { return impl().memory->size(); }

at::Tensor Window::at(int rank) const {
  const auto memory = impl().memory->at(rank);
  if (rank == this->rank()) return impl().mine;
  // The tensor keeps the window: this rank has not left while it can still reach others' memory.
  return tensor_of(impl().tensors[static_cast<std::size_t>(rank)], [&](const shm::Location&,
                                                                       std::uint64_t bytes) {
    CONVOY_CHECK(bytes <= memory.size(), "a window's tensor is larger than its memory");
    auto* const keep = new std::shared_ptr<Impl>(impl_);
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                        c10::DataPtr(
                            memory.data(), keep,
                            [](void* kept) { delete static_cast<std::shared_ptr<Impl>*>(kept); },
                            c10::Device(c10::DeviceType::CPU)),
                        nullptr, false);
  });
}

void Window::put(int rank, const at::Tensor& tensor, std::int64_t offset) const {
  const auto target = at(rank);
  const auto refuse = [&](const auto&... text) {
    const ProcessGroup& group = impl().group;
    fail(ErrorKind::kInvalidArgument, "put, window of group \"", group.name(), "\", rank ",
         group.rank(), " of ", group.size(), ": ", text...);
  };
  if (!tensor.defined() || tensor.is_meta()) {
    refuse("the tensor is ", tensor.defined() ? "on device meta" : "undefined",
           "; pass one with values");
  }
  if (tensor.scalar_type() != target.scalar_type()) {
    refuse("elements of type ", c10::toString(tensor.scalar_type()), " into the window of rank ",
           rank, ", which has ", c10::toString(target.scalar_type()));
  }
  if (offset < 0 || offset > target.numel() || tensor.numel() > target.numel() - offset) {
    refuse(tensor.numel(), " elements from element ", offset, " of the window of rank ", rank,
           ", which has ", target.numel());
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  target.view(-1).slice(0, offset, offset + tensor.numel()).copy_(tensor.reshape(-1));
}

void Window::fence(const CallOptions& options) const { impl().group.barrier(options); }
void Window::signal(int rank) const { impl().memory->signal(rank); }
void Window::wait_signal(int rank, const Deadline& deadline) const {
  impl().memory->wait_signal(rank, deadline);
}

}  // namespace convoy
