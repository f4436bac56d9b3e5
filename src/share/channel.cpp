#include <array>
#include <cstring>
#include <deque>
#include <span>

#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "convoy/share.h"
#include "os/fork_guard.h"
#include "os/socket.h"
#include "share/link.h"
#include "share/pack.h"

namespace convoy::share {
namespace {

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

const char* kind_of(const Value& value) {
  static constexpr std::array kNames = {"nothing",  "a bool",          "an integer",
                                        "a number", "a string",        "bytes",
                                        "a tensor", "a Python object", "a queue or lock"};
  static_assert(kNames.size() == std::variant_size_v<Value>);
  return kNames[value.index()];
}

template <class T>
const T& get(const Message& message, std::size_t i, const char* wanted) {
  if (i >= message.size()) {
    fail(ErrorKind::kInvalidArgument, "value ", i, " does not exist: the message has ",
         message.size(), " values");
  }
  const T* const value = std::get_if<T>(&message[i]);
  if (!value) {
    fail(ErrorKind::kInvalidArgument, "value ", i, " of a message is ", kind_of(message[i]),
         ", not ", wanted);
  }
  return *value;
}

}  // namespace

// Not inline: GCC 12 warns of copies of variants that it looks into.
Message::Message(std::initializer_list<Value> values) : values_(values) {}
Message::Message(std::vector<Value> values) : values_(std::move(values)) {}
void Message::add(Value value) { values_.push_back(std::move(value)); }

const at::Tensor& Message::tensor(std::size_t i) const {
  return get<at::Tensor>(*this, i, "a tensor");
}
const std::string& Message::text(std::size_t i) const {
  return get<std::string>(*this, i, "a string");
}
std::int64_t Message::integer(std::size_t i) const {
  return get<std::int64_t>(*this, i, "an integer");
}
double Message::real(std::size_t i) const { return get<double>(*this, i, "a number"); }
const Bytes& Message::bytes(std::size_t i) const { return get<Bytes>(*this, i, "bytes"); }
const Shared& Message::shared(std::size_t i) const {
  return get<Shared>(*this, i, "a queue, event, barrier or lock");
}

namespace {

// The sending end: the link, and what was sent over it and not yet received, which is kept for the
// receiver. Lives on after its channel until nothing is left.
struct Outbox {
  struct Sent {
    std::uint64_t number = 0;
    std::vector<Parcel> parcels;
    Lease body;
  };

  explicit Outbox(Socket socket) : link(std::move(socket)) {}

  // Lets go of what was received, or never will be. True: nothing is left.
  bool reap() {
    const std::uint64_t done = link.done();
    const bool never = link.lost();
    std::deque<Sent> gone;  // destroyed after the lock
    auto waiting = sent.lock();
    while (!waiting->empty() && (never || waiting->front().number <= done)) {
      gone.push_back(std::move(waiting->front()));
      waiting->pop_front();
    }
    const bool none = waiting->empty();
    waiting.unlock();
    return none;
  }
  bool look_and_reap() {
    link.look();
    return reap();
  }

  Link link;
  Guarded<std::deque<Sent>> sent;
  std::shared_ptr<Depot::Reaper> reaper;  // of this object
};

// Of channels that are gone. A forked child has none: those of its parent are its parent's.
Guarded<std::vector<std::shared_ptr<Outbox>>>& orphans() {
  static PerProcess<Guarded<std::vector<std::shared_ptr<Outbox>>>> boxes;
  return boxes.get();
}

void reap_orphans() {
  std::vector<std::shared_ptr<Outbox>> done;  // destroyed after the lock
  auto boxes = orphans().lock();
  for (auto& box : *boxes) {
    if (box->look_and_reap()) done.push_back(std::move(box));
  }
  std::erase(*boxes, nullptr);
  boxes.unlock();
}

std::shared_ptr<Outbox> make_outbox(Socket socket) {
  static auto* const sweep =
      new std::shared_ptr<Depot::Reaper>(std::make_shared<Depot::Reaper>([] { reap_orphans(); }));
  Depot::instance().on_shortage(*sweep);
  reap_orphans();
  auto box = std::make_shared<Outbox>(std::move(socket));
  box->reaper = std::make_shared<Depot::Reaper>([weak = std::weak_ptr(box)] {
    if (const auto there = weak.lock()) there->look_and_reap();
  });
  Depot::instance().on_shortage(box->reaper);
  return box;
}

}  // namespace

struct Channel::Impl {
  Impl(Socket socket, const ChannelOptions& chosen)
      : box(make_outbox(std::move(socket))), options(chosen) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  // What was sent may still be received.
  ~Impl() {
    if (generation != fork_generation()) return;  // a forked child's copy
    link.close();
    if (!box->reap() && !box->look_and_reap()) orphans().lock()->push_back(box);
  }

  Deadline deadline() const { return Deadline::after(options.timeout); }

  void send(const Message& message, const Deadline& until) {
    const std::scoped_lock lock(send_mutex);
    box->reap();
    const auto name = [&](const std::shared_ptr<Region>& region) {
      return link.introduce(region, until);
    };
    const PassShared pass = [&](const Shared& object) {
      std::optional<std::uint32_t> first;
      for (const int descriptor : object.descriptors()) {
        const std::uint32_t number = link.pass(descriptor, until);
        if (!first) first = number;
      }
      return first.value();
    };
    Packed packed = pack(message, get_sharing_strategy(), name, pass);
    Outbox::Sent item{.number = 0, .parcels = std::move(packed.parcels), .body = {}};
    if (packed.bytes.size() > Ring::kMostBytes) {
      item.body = Depot::instance().allocate(packed.bytes.size());
      std::memcpy(item.body.data(), packed.bytes.data(), packed.bytes.size());
      packed.bytes = encode(WireEnvelope{to_wire(item.body.ref(), name)});
    }
    item.number = link.send(std::as_bytes(std::span(packed.bytes)), until);
    if (!item.parcels.empty() || item.body) box->sent.lock()->push_back(std::move(item));
  }

  Message receive(const Deadline& until) {
    if (put_back) return std::move(*std::exchange(put_back, std::nullopt));
    const auto bytes = link.receive(until);
    // Whatever becomes of it, the sender need not keep it any more.
    struct Finish {
      Link& link;
      ~Finish() { link.finish(); }
    } const finish{link};
    const FindRegion find = [&](std::uint32_t number) { return link.region(number); };
    const TakeShared take = [&](std::uint32_t first, std::uint32_t count) {
      std::vector<UniqueFd> owned;
      for (std::uint32_t i = 0; i < count; ++i) owned.push_back(link.passed(first + i));
      std::vector<int> descriptors;
      for (UniqueFd& descriptor : owned) descriptors.push_back(descriptor.release());
      return Shared::adopt(descriptors);
    };
    if (!is_envelope(as_text(bytes))) return unpack(as_text(bytes), find, take);
    const Lease body =
        Depot::instance().open(from_wire(parse_envelope(as_text(bytes)).block, find));
    // A copy: the sender can still write to the memory.
    const std::string copy(reinterpret_cast<const char*>(body.data()), body.bytes());
    return unpack(copy, find, take);
  }

  const std::shared_ptr<Outbox> box;  // shared with who frees memory, and with the orphans
  Link& link = box->link;
  const ChannelOptions options;
  const unsigned generation = fork_generation();
  std::mutex send_mutex;
  std::mutex receive_mutex;
  std::optional<Message> put_back;  // under receive_mutex
};

Channel::Impl& Channel::impl() const {
  if (!impl_)
    fail(ErrorKind::kInvalidArgument,
         "this Channel is empty; channel(), listen() or connect() give one");
  // Its rings are still mapped: what a child wrote, the peer would take for its parent's.
  if (impl_->generation != fork_generation()) {
    fail(ErrorKind::kUnsupported,
         "a channel cannot be used in a forked child: it belongs to the parent; make a channel in "
         "the "
         "child (connect), or start the child with spawn");
  }
  return *impl_;
}

std::pair<Channel, Channel> channel(const ChannelOptions& options) {
  auto ends = Socket::pair();
  return {Channel(std::make_shared<Channel::Impl>(std::move(ends.first), options)),
          Channel(std::make_shared<Channel::Impl>(std::move(ends.second), options))};
}

Channel Channel::adopt(int descriptor, const ChannelOptions& options) {
  return Channel(std::make_shared<Impl>(Socket(UniqueFd(descriptor)), options));
}

int Channel::release() const { return impl().link.release().release(); }

void Channel::send(const at::Tensor& tensor) const { send(Message{tensor}); }
void Channel::send(const Message& message) const { impl().send(message, impl().deadline()); }
void Channel::send(const Message& message, const Deadline& deadline) const {
  impl().send(message, deadline);
}

at::Tensor Channel::receive() const { return receive(impl().deadline()); }

at::Tensor Channel::receive(const Deadline& deadline) const {
  const std::scoped_lock lock(impl().receive_mutex);
  Message message = impl().receive(deadline);
  if (message.size() == 1 && std::holds_alternative<at::Tensor>(message[0])) {
    return message.tensor(0);
  }
  const std::string what =
      message.size() == 1 ? kind_of(message[0]) : concat(message.size(), " values");
  impl().put_back = std::move(message);
  fail(ErrorKind::kInvalidArgument, "receive: the next message is ", what,
       ", not one tensor; receive_message() gives it");
}

Message Channel::receive_message() const { return receive_message(impl().deadline()); }

Message Channel::receive_message(const Deadline& deadline) const {
  const std::scoped_lock lock(impl().receive_mutex);
  return impl().receive(deadline);
}

std::optional<Message> Channel::try_receive() const {
  const std::scoped_lock lock(impl().receive_mutex);
  if (!impl().put_back && !impl().link.has_message()) return std::nullopt;
  return impl().receive(impl().deadline());
}

void Channel::close() const {
  if (impl_ && impl_->generation != fork_generation()) return;  // a forked child's copy
  impl().link.close();
}

struct ChannelListener::Impl {
  Impl(const std::string& folder, const std::string& name) : listener(folder, name) {}
  Listener listener;
};

ChannelListener::ChannelListener(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChannelListener::ChannelListener(ChannelListener&&) noexcept = default;
ChannelListener& ChannelListener::operator=(ChannelListener&&) noexcept = default;
ChannelListener::~ChannelListener() = default;

const std::string& ChannelListener::path() const { return impl_->listener.path(); }

Channel ChannelListener::accept(const Deadline& deadline, const ChannelOptions& options) const {
  for (;;) {
    Socket socket = impl_->listener.accept(deadline);
    try {
      socket.require_same_user();
    } catch (const Error& error) {
      log_warn("refused: ", error.what());
      continue;
    }
    return Channel(std::make_shared<Channel::Impl>(std::move(socket), options));
  }
}

ChannelListener listen(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos || slash == 0 || slash + 1 == path.size()) {
    fail(ErrorKind::kInvalidArgument, "listen: ", in_quotes(path),
         " is not a path of a socket in a folder of its own, such as /tmp/mine/socket");
  }
  return ChannelListener(
      std::make_unique<ChannelListener::Impl>(path.substr(0, slash), path.substr(slash + 1)));
}

Channel connect(const std::string& path, const Deadline& deadline, const ChannelOptions& options) {
  Socket socket = Socket::connect(path, deadline);
  socket.require_same_user();
  return Channel(std::make_shared<Channel::Impl>(std::move(socket), options));
}

}  // namespace convoy::share
