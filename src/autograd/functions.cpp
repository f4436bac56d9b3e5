#include "autograd/functions.h"

#include "autograd/coordinator.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {

std::vector<Ports> expand(const PassHead& head, std::uint32_t batch,
                          const std::vector<Ports>& ports) {
  const auto pass = Registry::here().find_or_make_pass(head);
  if (!pass) fail(ErrorKind::kCancelled, "autograd: this backward pass has ended");
  return pass->expand(batch, ports);
}
CONVOY_RPC(expand);

rpc::Future<GradientReply> take_gradient(const PassHead& head, std::uint64_t message,
                                         const std::vector<at::Tensor>& gradients) {
  Registry& registry = Registry::here();
  // With discovery behind it a pass is known here, or over.
  const auto pass = head.fast ? registry.find_or_make_pass(head) : registry.find_pass(head.pass);
  if (!pass) {
    if (!registry.has_ended(head.pass)) {
      fail(ErrorKind::kInvalidArgument, "autograd: nobody has asked for message ", message,
           " of context ", head.context, " in this backward pass");
    }
    return Pass::nothing_for_root();
  }
  const bool from_root = agent::Request::current()->caller().id == head.pass.root;
  auto answer = from_root ? pass->answer_for_root(message, gradients) : Pass::nothing_for_root();
  pass->deliver(message, gradients);
  return answer;
}
CONVOY_RPC(take_gradient);

void pass_done(const PassId& pass, WorkerId worker, const std::vector<WorkerId>& engaged) {
  if (const auto root = Registry::here().coordinator(pass)) root->done(worker, engaged);
}
CONVOY_RPC(pass_done);

void pass_failed(const PassId& pass, const PassError& error) {
  if (const auto root = Registry::here().coordinator(pass)) root->failed(error);
}
CONVOY_RPC(pass_failed);

void participant_lost(const PassId& pass, WorkerId worker, const std::string& why) {
  if (const auto root = Registry::here().coordinator(pass)) root->participant_lost(worker, why);
}
CONVOY_RPC(participant_lost);

void commit(const PassHead& head) {
  Registry& registry = Registry::here();
  const auto pass = registry.find_pass(head.pass);
  if (!pass) return;
  // In this order: until then whoever wants the gradients waits for them.
  pass->commit();
  registry.end_pass(head.pass);
}
CONVOY_RPC(commit);

AbortReply abort_pass(const PassHead& head, const std::string& why) {
  const auto pass = Registry::here().end_pass(head.pass);
  return pass ? pass->abort(why) : AbortReply();
}
CONVOY_RPC(abort_pass);

void release_context(ContextId context, std::uint64_t floor) {
  agent::Request& request = *agent::Request::current();
  Registry::here().release(context, floor, request.caller().id);
}
CONVOY_RPC(release_context);

bool context_lives(ContextId context, WorkerId who) {
  const auto found = Registry::here().find(context);
  return found && found->know(who);
}
CONVOY_RPC(context_lives);

ContextReport report_context(ContextId context) {
  Registry& registry = Registry::here();
  const auto found = registry.find(context);
  ContextReport report = found ? found->report() : ContextReport();
  report.worker = registry.self();
  for (const auto& pass : registry.passes_of(context)) report.passes.push_back(pass->report());
  return report;
}
CONVOY_RPC(report_context);

}  // namespace convoy::autograd::detail
