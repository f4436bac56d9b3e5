#include "simulated.h"

#include <utility>

#include "agent/agent.h"
#include "agent/letters.h"
#include "base/concat.h"
#include "convoy/autograd.h"
#include "rpc/serve.h"
#include "rpc/session_impl.h"

namespace convoy::autograd::test {
namespace {

// All workers are this process: they have the same functions, in this order.
const std::vector<agent::Handler>& functions() {
  static const auto* const all = new std::vector<agent::Handler>(rpc::detail::exported_handlers());
  return *all;
}

}  // namespace

SimulatedWorkers::SimulatedWorkers(transport::World& world, const std::vector<int>& threads,
                                   Send send)
    : world_(world), send_(std::move(send)) {
  std::vector<agent::Member> members;
  for (int rank = 0; rank < static_cast<int>(threads.size()); ++rank) {
    auto& hooks = *hooks_.emplace_back(std::make_unique<agent::test::Hooks>());
    hooks.send = [this, rank](transport::Remote& remote, const transport::Letter& letter) {
      return ask(rank, remote, letter);
    };
    const auto impl = rpc::detail::SessionImpl::make_apart(
        {.rank = rank, .threads = threads[static_cast<std::size_t>(rank)]},
        [&](agent::AgentOptions& options) {
          options.make_endpoint = [this, &hooks, name = options.name](transport::Inbox& inbox) {
            return std::make_unique<agent::test::HookedEndpoint>(
                inbox, hooks, [&](transport::Inbox& inner) {
                  auto endpoint = world_.join(inner, name);
                  endpoints_.push_back(endpoint.get());
                  return endpoint;
                });
          };
          options.start_thread = [this](std::function<void()> run) {
            world_.start(std::move(run));
          };
        });
    members.push_back({concat("worker", rank), impl->agent().address()});
    sessions_.push_back(std::make_unique<rpc::Session>(impl));
  }
  const Id session = Id::random();
  for (const auto& each : sessions_) each->impl()->agent().admit(session, members);
}

std::string_view SimulatedWorkers::function_of(int from, int to, const transport::Letter& letter) {
  const auto type = static_cast<agent::LetterType>(letter.kind);
  const bool answer = type == agent::LetterType::kReply || type == agent::LetterType::kError;
  if (!answer && type != agent::LetterType::kCall) return {};
  std::vector<std::byte> head(letter.head.size());
  letter.head.write(head);
  if (answer) {
    const auto reply = agent::decode_head<agent::ReplyHead>(head, "reply");
    const auto found = calls_.find({to, from, reply.number});
    return found == calls_.end() ? std::string_view() : found->second;
  }
  const auto call = agent::decode_head<agent::CallHead>(head, "call");
  return calls_[{from, to, call.number}] = functions().at(call.function).key.name;
}

std::optional<transport::SendResult> SimulatedWorkers::ask(int from, transport::Remote& remote,
                                                           const transport::Letter& letter) {
  if (passing_) return std::nullopt;
  const int to = remote.name().back() - '0';
  return send_({from, to, function_of(from, to, letter), letter.reply, remote, letter});
}

void SimulatedWorkers::send_after(std::chrono::nanoseconds delay, const Sending& sending) {
  const auto kept = std::make_shared<transport::KeptLetter>(sending.letter);
  world_.call_after(delay, [this, kept, &remote = sending.remote] {
    if (remote.lost()) return;
    passing_ = true;
    static_cast<void>(remote.try_send(kept->letter(), nullptr));
    passing_ = false;
  });
}

void SimulatedWorkers::crash(int rank) {
  crashed_ = rank;
  world_.crash(*endpoints_[static_cast<std::size_t>(rank)]);
}

std::size_t SimulatedWorkers::passes() const {
  std::size_t count = 0;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != crashed_) count += stats(*sessions_[static_cast<std::size_t>(rank)]).passes;
  }
  return count;
}

bool SimulatedWorkers::is_empty() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == crashed_) continue;
    const auto now = stats(*sessions_[static_cast<std::size_t>(rank)]);
    if (now.contexts != 0 || now.passes != 0) return false;
  }
  return true;
}

}  // namespace convoy::autograd::test
