#include "support.h"

#include <algorithm>

#include "base/concat.h"
#include "os/flight_recorder.h"
#include "support/leak_oracle.h"
#include "transport/shm/fabric.h"

namespace convoy::agent::test {
namespace {

using convoy::test::Holding;
using convoy::test::HoldingKind;
using convoy::test::LeakOracle;

// The Fabric and the flight record live as long as the process; what the Fabric holds for peers
// goes when its thread comes by.
[[maybe_unused]] const bool kAgentsRegistered = [] {
  LeakOracle::warm_up([] {
    shm::Fabric::instance();
    flight::Recorder::instance();
  });
  LeakOracle::ignore([](const Holding& holding) {
    if (holding.kind != HoldingKind::kDescriptor) return false;
    const auto held = shm::Fabric::instance().descriptors();
    return std::find(held.begin(), held.end(), static_cast<int>(holding.number)) != held.end();
  });
  return true;
}();

}  // namespace

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

FunctionId id_of(const std::string& name, const std::string& signature) {
  return declare_function({name, signature, hash_text(signature)});
}

TestFunction function(const std::string& name,
                      const std::function<std::string(Request&, const std::string&)>& body) {
  return {name, [body](const RequestRef& request) {
            try {
              const std::string result = body(*request, text_of(request->body()));
              request->reply({.body = std::as_bytes(std::span(result))});
            } catch (const Error& error) {
              request->fail(ErrorKind::kRemote, "convoy::Error", error.what());
            } catch (const std::exception& error) {
              request->fail(ErrorKind::kRemote, "std::runtime_error", error.what());
            }
          }};
}

TestFunction echo() {
  return function("echo", [](Request&, const std::string& text) { return text; });
}

std::string TextCall::result() const {
  if (!failure) return text;
  throw rpc::RemoteError(failure->kind, failure->text, failure->worker, failure->remote_type);
}

void TextCall::ended(Outcome&& outcome) noexcept {
  if (outcome.failure) failure = *outcome.failure;
  text = text_of(outcome.body);
  parts = std::move(outcome.parts);
  if (then) then(*this);
  mark_over();
}

void start(Agent& agent, TextCall& call, WorkerId to, const std::string& name,
           const std::string& argument, const CallOptions& options) {
  agent.start(call, to, id_of(name), {.body = std::as_bytes(std::span(argument))}, options);
}

std::string sync(Agent& agent, WorkerId to, const std::string& name, const std::string& argument,
                 const CallOptions& options) {
  TextCall call;
  start(agent, call, to, name, argument, options);
  agent.wait(call);
  return call.result();
}

Handler TestAgent::handler_of(TestFunction& function) {
  return {.key = {function.name, function.signature, hash_text(function.signature)},
          .run =
              [](void* data, RequestRef request) noexcept {
                static_cast<TestFunction*>(data)->run(std::move(request));
              },
          .data = &function};
}

TestAgent::TestAgent(AgentOptions options, std::vector<TestFunction> functions)
    : functions_(std::make_move_iterator(functions.begin()),
                 std::make_move_iterator(functions.end())) {
  for (TestFunction& function : functions_) options.handlers.push_back(handler_of(function));
  agent_ = std::make_unique<Agent>(options);
}

std::string error_text(ErrorKind kind, const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), to_string(kind)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void admit(const std::vector<Agent*>& agents) {
  const Id session = Id::random();
  std::vector<Member> members;
  for (std::size_t i = 0; i < agents.size(); ++i) {
    members.push_back({concat("worker", i), agents[i]->address()});
  }
  for (Agent* const agent : agents) agent->admit(session, members);
}

Session::Session(int size, const std::vector<TestFunction>& functions,
                 const std::function<void(AgentOptions&)>& choose) {
  std::vector<Agent*> agents;
  for (int rank = 0; rank < size; ++rank) {
    AgentOptions options{.name = concat("worker", rank), .rank = static_cast<WorkerId>(rank)};
    options.call_timeout = std::chrono::seconds(30);
    if (choose) choose(options);
    agents_.push_back(std::make_unique<TestAgent>(options, functions));
    agents.push_back(&**agents_.back());
  }
  admit(agents);
}

}  // namespace convoy::agent::test
