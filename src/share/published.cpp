#include "convoy/published.h"

#include <ATen/core/grad_mode.h>

#include <cstring>
#include <mutex>

#include "base/error.h"
#include "os/fork_guard.h"
#include "share/layout.h"
#include "share/version_board.h"
#include "tensor/handle.h"

namespace convoy::share {

// This process as a reader. Lives as long as any of its snapshots.
struct PublishedTensors::Reader {
  Reader(at::Tensor bytes, const VersionBoard& versions, std::shared_ptr<const TensorLayout> where)
      : memory(std::move(bytes)), board(versions), layout(std::move(where)), slot(board.enter()) {}
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() {
    if (is_ours()) board.leave(slot);
  }

  // In a forked child it is its parent's.
  bool is_ours() const { return generation == fork_generation(); }

  const at::Tensor memory;  // keeps it
  const VersionBoard board;
  const std::shared_ptr<const TensorLayout> layout;
  const std::size_t slot;
  const unsigned generation = fork_generation();
};

struct Snapshot::Pin {
  Pin(std::shared_ptr<PublishedTensors::Reader> by, const VersionBoard::Pinned& what)
      : reader(std::move(by)), pinned(what) {}
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() {
    if (reader->is_ours()) reader->board.unpin(reader->slot, pinned.buffer);
  }

  const std::shared_ptr<PublishedTensors::Reader> reader;
  const VersionBoard::Pinned pinned;
};

struct PublishedTensors::Impl {
  Impl(at::Tensor bytes, const VersionBoard& versions, const PublishedOptions& chosen)
      : memory(std::move(bytes)),
        board(versions),
        layout(std::make_shared<TensorLayout>(TensorLayout::parse(board.layout()))),
        options(chosen) {
    if (layout->bytes() > board.buffer_bytes()) {
      fail(ErrorKind::kInvalidArgument, "Published: the tensors do not fit their memory: refused");
    }
  }

  std::shared_ptr<Reader> reader() {
    const std::scoped_lock lock(mutex);
    if (!current || !current->is_ours()) current = std::make_shared<Reader>(memory, board, layout);
    return current;
  }

  const at::Tensor memory;
  const VersionBoard board;
  const std::shared_ptr<const TensorLayout> layout;
  const PublishedOptions options;
  std::mutex mutex;
  std::shared_ptr<Reader> current;
};

namespace {

// For each published tensor, the one of that name; all of them fit. Their order is free: C++ and
// Python may list a module's buffers differently.
std::vector<const at::Tensor*> in_order(const char* operation, const TensorLayout& layout,
                                        const std::vector<NamedTensor>& tensors) {
  const auto& specs = layout.tensors();
  if (tensors.size() != specs.size()) {
    fail(ErrorKind::kInvalidArgument, operation, ": ", tensors.size(), " tensors, but ",
         specs.size(), " are published");
  }
  std::vector<const at::Tensor*> found(specs.size(), nullptr);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    const std::size_t at = name == specs[i].name ? i : layout.index_of(name);
    if (found[at]) fail(ErrorKind::kInvalidArgument, operation, ": ", in_quotes(name), " twice");
    found[at] = &tensor;
    const TensorSpec& spec = specs[at];
    if (!tensor.defined() || tensor.sizes() != at::IntArrayRef(spec.sizes) ||
        tensor.scalar_type() != spec.type) {
      fail(ErrorKind::kInvalidArgument, operation, ": ", in_quotes(name), " is ",
           tensor.defined() ? c10::str(tensor.sizes(), " of ", tensor.scalar_type()) : "undefined",
           ", but ", c10::str(at::IntArrayRef(spec.sizes), " of ", spec.type), " is published");
    }
    if (tensor.device().is_cpu() && !tensor._is_zerotensor()) require_memory(tensor);
  }
  return found;
}

std::vector<TensorSpec> specs_of(const std::vector<NamedTensor>& tensors) {
  if (tensors.empty()) fail(ErrorKind::kInvalidArgument, "Published: there are no tensors");
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) {
      fail(ErrorKind::kInvalidArgument, "Published: ", in_quotes(name), " is undefined");
    }
    if (tensor.layout() != c10::kStrided || tensor.is_nested() || tensor.is_quantized()) {
      fail(ErrorKind::kUnsupported, "Published: ", in_quotes(name),
           " is not a plain strided tensor; publish the tensors that it is made of");
    }
    specs.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  return specs;
}

void copy(std::byte* to, const at::Tensor& from, const TensorLayout& layout, std::size_t i) {
  if (from.device().is_cpu() && from.is_contiguous() && !from.is_conj() && !from.is_neg() &&
      !from._is_zerotensor()) {
    if (from.nbytes() > 0) std::memcpy(to + layout.offset(i), from.const_data_ptr(), from.nbytes());
  } else {
    layout.view(i, to, nullptr).copy_(from);
  }
}

}  // namespace

Snapshot::Pin& Snapshot::pin() const {
  if (!pin_) fail(ErrorKind::kInvalidArgument, "this Snapshot is empty; read() gives one");
  return *pin_;
}

std::uint64_t Snapshot::version() const { return pin().pinned.version; }

std::chrono::nanoseconds Snapshot::age() const {
  return std::chrono::steady_clock::now() - pin().pinned.published;
}

std::size_t Snapshot::size() const { return pin().reader->layout->tensors().size(); }

const std::string& Snapshot::name(std::size_t i) const {
  return pin().reader->layout->tensors().at(i).name;
}

at::Tensor Snapshot::operator[](std::size_t i) const {
  if (i >= size())
    fail(ErrorKind::kInvalidArgument, "tensor ", i, " does not exist: the snapshot has ", size(),
         " tensors");
  const auto& reader = *pin().reader;
  if (!reader.is_ours()) {
    fail(ErrorKind::kUnsupported,
         "this Snapshot belongs to the parent of this forked process; read() one in the child");
  }
  return reader.layout->view(i, reader.board.data(pin_->pinned.buffer), pin_);
}

at::Tensor Snapshot::operator[](std::string_view name) const {
  return (*this)[pin().reader->layout->index_of(name)];
}

std::vector<at::Tensor> Snapshot::tensors() const {
  std::vector<at::Tensor> found;
  for (std::size_t i = 0; i < size(); ++i) found.push_back((*this)[i]);
  return found;
}

PublishedTensors::PublishedTensors(const std::vector<NamedTensor>& tensors,
                                   const PublishedOptions& options) {
  const TensorLayout layout(specs_of(tensors));
  const std::string encoded = layout.encode();
  auto memory =
      shared_bytes(VersionBoard::bytes_for(options.buffers, layout.bytes(), encoded.size()));
  const auto board =
      VersionBoard::create(bytes_of(memory), options.buffers, layout.bytes(), encoded);
  impl_ = std::make_shared<Impl>(std::move(memory), board, options);
  publish(tensors);
}

PublishedTensors::Impl& PublishedTensors::impl() const {
  if (!impl_)
    fail(ErrorKind::kInvalidArgument, "this Published object is empty; construct or open one");
  return *impl_;
}

std::uint64_t PublishedTensors::publish(const std::vector<NamedTensor>& tensors) const {
  Impl& self = impl();
  const auto sources = in_order("publish", *self.layout, tensors);
  const at::NoGradGuard no_gradients;
  const std::size_t buffer = self.board.begin(Deadline::after(self.options.patience));
  try {
    std::byte* const to = self.board.data(buffer);
    for (std::size_t i = 0; i < sources.size(); ++i) copy(to, *sources[i], *self.layout, i);
  } catch (...) {
    self.board.give_up();
    throw;
  }
  return self.board.publish(buffer);
}

Snapshot PublishedTensors::read() const {
  const auto reader = impl().reader();
  const auto pinned = reader->board.pin(reader->slot);
  if (!pinned) {
    fail(ErrorKind::kPeerLost,
         "read: the process that made these tensors ended before it "
         "published the first version");
  }
  return Snapshot(std::make_shared<Snapshot::Pin>(reader, *pinned));
}

Snapshot PublishedTensors::read_newer(std::uint64_t version, const Deadline& deadline) const {
  const VersionBoard& board = impl().board;
  if (!board.wait_newer(version, deadline)) {
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "read_newer: version ", version, " is still the newest");
    }
    fail(ErrorKind::kPeerLost, "read_newer: pid ", pid_of(board.writer()),
         ", which published up to version ", this->version(), ", has ended");
  }
  return read();
}

std::uint64_t PublishedTensors::load_into(const std::vector<NamedTensor>& tensors) const {
  const auto targets = in_order("load_into", *impl().layout, tensors);
  const at::NoGradGuard no_gradients;
  const Snapshot snapshot = read();
  for (std::size_t i = 0; i < targets.size(); ++i) targets[i]->copy_(snapshot[i]);
  return snapshot.version();
}

std::uint64_t PublishedTensors::version() const { return impl().board.version(); }
at::Tensor PublishedTensors::handle() const { return impl().memory; }

PublishedTensors PublishedTensors::open(const at::Tensor& handle) {
  PublishedTensors opened;
  const auto board = VersionBoard::open(bytes_of(handle));
  opened.impl_ = std::make_shared<Impl>(handle, board, PublishedOptions{});
  return opened;
}

}  // namespace convoy::share
