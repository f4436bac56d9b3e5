// DistributedDataParallel in a Join. Rounds are its steps, announced when they begin: whether a
// backward is reduced is known only then. Buffers are synchronised at the end of each round instead
// of before the next forward, so that one message a step is enough.
#include "base/error.h"
#include "convoy/ddp.h"
#include "ddp/join_context.h"
#include "ddp/reducer_join.h"

namespace convoy {

class DdpJoinHook final : public JoinBuffersHook {
 public:
  DdpJoinHook(DdpCore& core, std::unique_ptr<Reducer::Impl::JoinPort> port)
      : core_(core), part_(ReducerAccess::impl(core.reducer()), std::move(port)) {}
  ~DdpJoinHook() override { core_.join_.reset(); }
  DdpJoinHook(const DdpJoinHook&) = delete;
  DdpJoinHook& operator=(const DdpJoinHook&) = delete;

  void pre_hook() override { part_.leave(); }
  void main_hook(const JoinStep& step) override { part_.shadow(step); }
  void buffers_hook(const JoinStep& step) override { core_.sync_buffers_from(step.live.front()); }
  void post_hook(const JoinEnd& end) override {
    std::vector<at::Tensor> all = core_.reducer().parameters();
    if (core_.options_.forward_sync_buffers) {
      for (const auto& [name, buffer] : core_.buffers()) all.push_back(buffer);
    }
    broadcast_coalesced(core_.group_, all, {.root = end.last_joiner});
  }

 private:
  DdpCore& core_;
  const ReducerInJoin part_;
};

std::shared_ptr<JoinContext> DdpCore::join() const {
  auto context = join_.lock();
  if (context && !context->is_live()) context.reset();
  return context;
}

std::unique_ptr<JoinHook> DdpCore::join_hook(const Joinable& self, const JoinOptions& options) {
  if (!others_.empty()) {
    fail(ErrorKind::kInvalidArgument, "join: a model with parameter_groups cannot be joined: ",
         "their ranks do not know of each other's inputs");
  }
  auto port = std::make_unique<Reducer::Impl::JoinPort>();
  const auto context = JoinContext::of(group_);
  const bool syncs = options_.forward_sync_buffers && !context->throws_early();
  port->announce = [weak = std::weak_ptr(context), &self] {
    const auto join = weak.lock();
    if (!join->throws_early()) return join->notify(self);
    return JoinStep{.live = join->everybody()};  // told before forward: nobody is missing
  };
  port->finish = [this, syncs](const JoinStep& step) {
    if (syncs) sync_buffers_from(step.live.front());
  };
  port->defers = [group = group_] { return has_sync_batch_norms(group); };
  port->divides_by_live = !options.divide_by_initial_world_size;
  auto hook = std::make_unique<DdpJoinHook>(*this, std::move(port));
  join_ = context;
  join_self_ = &self;
  if (syncs) sync_buffers_from(0);  // for the first forward
  return hook;
}

}  // namespace convoy
