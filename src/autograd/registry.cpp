#include "autograd/registry.h"

#include <algorithm>
#include <atomic>

#include "autograd/coordinator.h"
#include "autograd/pass.h"
#include "base/error.h"

namespace convoy::autograd::detail {
namespace {

using namespace std::chrono_literals;

// Runs of the engine that take less do not need a thread of their own.
constexpr std::chrono::nanoseconds kShortRun = 300us;

constexpr std::size_t kMostAbortReplies = 256;

// Tells the contexts and passes of a session what happens to its agent.
class Ears final : public agent::Companion {
 public:
  explicit Ears(const std::shared_ptr<Registry>& registry) : registry_(registry) {}

  void gone(const agent::Worker& worker, const std::string& why) noexcept override {
    if (const auto registry = registry_.lock()) registry->lost(worker.id, why);
  }
  // All that passes wait for is calls.
  bool idle() override { return true; }
  std::uint64_t activity() override { return 0; }
  std::vector<std::string> under_way() override { return {}; }
  void finish() override {}
  void closed() noexcept override {
    if (const auto registry = registry_.lock()) registry->shut_down();
  }

 private:
  const std::weak_ptr<Registry> registry_;
};

// What the session owns.
class Holder final : public rpc::detail::Recordings {
 public:
  explicit Holder(rpc::detail::SessionImpl& session)
      : registry_(std::make_shared<Registry>(session)) {
    session.agent().accompany(std::make_shared<Ears>(registry_));
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  ~Holder() override { registry_->close(); }

  std::shared_ptr<rpc::detail::Recorder> came(std::uint32_t from,
                                              const rpc::detail::RecordTrailer& trailer,
                                              std::span<const std::byte> tail,
                                              const std::vector<at::Tensor>& tensors,
                                              std::string_view function, bool reply) override {
    // A reply of a context that is over here makes none.
    auto context =
        reply ? registry_->find(trailer.context) : registry_->find_or_make(trailer.context);
    if (!context) return nullptr;
    auto place = context->came(from, trailer.message, tail, tensors, function, reply);
    if (!place) return nullptr;
    return std::make_shared<FrameRecorder>(std::move(context), std::move(place));
  }

  Registry& registry() { return *registry_; }

 private:
  const std::shared_ptr<Registry> registry_;
};

Registry& registry_of(rpc::detail::SessionImpl& session) {
  return static_cast<Holder*>(session.recordings())->registry();
}

[[maybe_unused]] const bool kAutogradSet = rpc::detail::set_recordings(
    [](rpc::detail::SessionImpl& session) -> std::unique_ptr<rpc::detail::Recordings> {
      return std::make_unique<Holder>(session);
    });

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

Registry::Registry(rpc::detail::SessionImpl& session)
    : address_(&session), serial_(next_serial()), session_(&session) {}

void Registry::close() {
  decltype(contexts_) contexts;
  decltype(passes_) passes;
  {
    const std::scoped_lock lock(mutex_);
    session_ = nullptr;
    contexts.swap(contexts_);
    passes.swap(passes_);
    coordinators_.clear();
  }
  for (const auto& [id, context] : contexts) context->release();
}

// NOLINTNEXTLINE(bugprone-exception-escape): without memory nothing goes on
void Registry::shut_down() noexcept {
  constexpr const char* kWhy = "the session was shut down";
  std::vector<std::shared_ptr<Coordinator>> roots;
  std::vector<std::shared_ptr<Pass>> others;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [id, coordinator] : coordinators_) {
      if (auto root = coordinator.lock()) roots.push_back(std::move(root));
    }
    for (const auto& [id, pass] : passes_) {
      if (!coordinators_.contains(id)) others.push_back(pass);
    }
  }
  for (const auto& root : roots) {
    root->failed({static_cast<std::int32_t>(ErrorKind::kCancelled), root->id().root, "", kWhy});
  }
  for (const auto& pass : others) {
    pass->abort(kWhy);
    end_pass(pass->id());
  }
}

std::shared_ptr<rpc::detail::SessionImpl> Registry::session() const {
  const std::scoped_lock lock(mutex_);
  auto session = session_ ? session_->weak_from_this().lock() : nullptr;
  if (!session) fail(ErrorKind::kCancelled, "autograd: the session has ended");
  return session;
}

bool Registry::is_shut_down() const noexcept {
  try {
    return session()->agent().is_shut_down();
  } catch (const Error&) {
    return true;
  }
}

void Registry::wake() const noexcept {
  try {
    session()->agent().wake();
  } catch (const Error&) {
    // Nobody waits.
  }
}

Registry& Registry::of(const rpc::Session& session) { return registry_of(*session.impl()); }

Registry& Registry::here() {
  return registry_of(*rpc::detail::SessionImpl::of(*agent::Request::current()));
}

WorkerId Registry::self() const {
  std::uint64_t id = self_.load(std::memory_order_relaxed);
  if (id == kUnknown) self_.store(id = session()->agent().self().id, std::memory_order_relaxed);
  return static_cast<WorkerId>(id);
}

std::string Registry::name_of(WorkerId worker) const {
  try {
    return session()->agent().worker(static_cast<std::int64_t>(worker)).name;
  } catch (const Error&) {
    return concat("worker with id ", worker);
  }
}

bool Registry::is_worker(WorkerId worker) const {
  try {
    static_cast<void>(session()->agent().worker(static_cast<std::int64_t>(worker)));
    return true;
  } catch (const Error&) {
    return false;
  }
}

void Registry::require_worker(WorkerId worker) const {
  static_cast<void>(rpc::detail::find_worker(*session(), rpc::To(worker)));
}

std::uint64_t Registry::next_message() { return numbered_by(self(), ++last_message_); }

// --- passes ------------------------------------------------------------------------------------

PassHead Registry::new_pass(ContextState& context, bool fast, bool retain) {
  PassHead head;
  head.pass.root = self();
  head.context = context.id();
  head.fast = fast;
  head.retain = retain;
  head.remaining = kNoLimit;
  const std::scoped_lock lock(mutex_);
  head.pass.number = ++last_pass_;
  live_passes_.insert(head.pass.number);
  head.floor = *live_passes_.begin();
  ended_[head.pass.root].raise(head.floor);
  return head;
}

void Registry::add(const std::shared_ptr<Coordinator>& coordinator) {
  const std::scoped_lock lock(mutex_);
  coordinators_.emplace(coordinator->id(), coordinator);
}

std::shared_ptr<Coordinator> Registry::coordinator(const PassId& id) const {
  const std::scoped_lock lock(mutex_);
  const auto found = coordinators_.find(id);
  return found == coordinators_.end() ? nullptr : found->second.lock();
}

void Registry::add(const std::shared_ptr<Pass>& pass) {
  const std::scoped_lock lock(mutex_);
  record_locked(*pass);
  passes_.emplace(pass->id(), pass);
}

std::shared_ptr<Pass> Registry::find_pass(const PassId& id) const {
  const std::scoped_lock lock(mutex_);
  const auto found = passes_.find(id);
  return found == passes_.end() ? nullptr : found->second;
}

bool Registry::has_ended(const PassId& id) const {
  const std::scoped_lock lock(mutex_);
  const auto ended = ended_.find(id.root);
  return ended != ended_.end() && ended->second.contains(id.number);
}

std::shared_ptr<Pass> Registry::find_or_make_pass(const PassHead& head) {
  if (auto pass = find_pass(head.pass)) return pass;
  const auto context = find(head.context);
  if (!context) {
    if (has_ended(head.pass)) return nullptr;
    fail(ErrorKind::kInvalidArgument, "autograd: ", name_of(self()), " has no context ",
         head.context, ": it was released, or never came there");
  }
  require_worker(head.pass.root);
  auto made = std::make_shared<Pass>(context, head);
  const std::scoped_lock lock(mutex_);
  EndedNumbers& ended = ended_[head.pass.root];
  ended.raise(head.floor);
  if (ended.contains(head.pass.number)) return nullptr;
  if (passes_.size() >= kMostAtOnce) {
    fail(ErrorKind::kResource, "autograd: there are ", kMostAtOnce,
         " backward passes here at once");
  }
  const auto [place, fresh] = passes_.emplace(head.pass, std::move(made));
  if (fresh) record_locked(*place->second);
  return place->second;
}

void Registry::record_locked(Pass& pass) noexcept {
  if (session_)
    pass.record().begins(session_->agent().record(), pass.id(),
                         pass.id().root == self_.load(std::memory_order_relaxed));
}

std::shared_ptr<Pass> Registry::end_pass(const PassId& id) {
  const std::uint64_t here = self_.load(std::memory_order_relaxed);  // known: there is a pass
  std::shared_ptr<Pass> pass;
  const std::scoped_lock lock(mutex_);
  ended_[id.root].add(id.number);
  if (id.root == here) live_passes_.erase(id.number);
  coordinators_.erase(id);
  const auto found = passes_.find(id);
  if (found == passes_.end()) return nullptr;
  pass = std::move(found->second);
  passes_.erase(found);
  return pass;
}

void Registry::keep_abort_reply(const PassId& id, const AbortReply& reply) {
  const std::scoped_lock lock(mutex_);
  abort_replies_.emplace_back(id, reply);
  if (abort_replies_.size() > kMostAbortReplies) abort_replies_.pop_front();
}

AbortReply Registry::abort_reply(const PassId& id) const {
  const std::scoped_lock lock(mutex_);
  const auto found = std::find_if(abort_replies_.begin(), abort_replies_.end(),
                                  [&](const auto& each) { return each.first == id; });
  return found == abort_replies_.end() ? AbortReply() : found->second;
}

std::size_t Registry::passes() const {
  const std::scoped_lock lock(mutex_);
  return passes_.size();
}

std::vector<std::shared_ptr<Pass>> Registry::passes_of(ContextId id) const {
  std::vector<std::shared_ptr<Pass>> result;
  const std::scoped_lock lock(mutex_);
  for (const auto& [pass_id, pass] : passes_) {
    if (pass->context().id() == id) result.push_back(pass);
  }
  return result;
}

bool Registry::runs_are_short() const {
  return average_run_.load(std::memory_order_relaxed) < kShortRun.count();
}

void Registry::ran(std::chrono::nanoseconds time) {
  // One that was long is long at once.
  const std::int64_t before = average_run_.load(std::memory_order_relaxed);
  const bool at_once = time > 10 * kShortRun;
  average_run_.store(at_once ? time.count() : (7 * before + time.count()) / 8,
                     std::memory_order_relaxed);
}

}  // namespace convoy::autograd::detail
