#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "convoy/rpc_error.h"

namespace convoy::agent::test {

using transport::Part;
using transport::Piece;

// A function of text to text, or one that answers by itself.
struct TestFunction {
  std::string name;
  std::function<void(RequestRef)> run;
  std::string signature = "text";
};
// What it throws is the error of the call.
TestFunction function(const std::string& name,
                      const std::function<std::string(Request&, const std::string&)>& body);
// "echo": its argument.
TestFunction echo();

std::string text_of(std::span<const std::byte> bytes);
FunctionId id_of(const std::string& name, const std::string& signature = "text");

// A call whose result is text, and pieces. Kept by whoever waits.
class TextCall final : public Call {
 public:
  std::optional<Failure> failure;
  std::string text;
  std::vector<Part> parts;
  std::function<void(TextCall&)> then;  // in ended()

  // Throws RemoteError.
  std::string result() const;
  bool under_way() const { return !over(); }

 private:
  void ended(Outcome&& outcome) noexcept override;
};

void start(Agent& agent, TextCall& call, WorkerId to, const std::string& name,
           const std::string& argument = "", const CallOptions& options = {});
std::string sync(Agent& agent, WorkerId to, const std::string& name,
                 const std::string& argument = "", const CallOptions& options = {});

// An agent with functions.
class TestAgent {
 public:
  TestAgent(AgentOptions options, std::vector<TestFunction> functions);

  Agent& operator*() { return *agent_; }
  Agent* operator->() { return agent_.get(); }
  void reset() { agent_.reset(); }
  static Handler handler_of(TestFunction& function);

 private:
  std::deque<TestFunction> functions_;
  std::unique_ptr<Agent> agent_;
};

// So many agents in this process, which have met.
class Session {
 public:
  Session(int size, const std::vector<TestFunction>& functions,
          const std::function<void(AgentOptions&)>& choose = nullptr);

  Agent& operator[](std::size_t rank) { return **agents_[rank]; }
  std::size_t size() const { return agents_.size(); }
  void end(std::size_t rank) { agents_[rank]->reset(); }

 private:
  std::vector<std::unique_ptr<TestAgent>> agents_;
};

// The text of the Error of this kind that `function` throws.
std::string error_text(ErrorKind kind, const std::function<void()>& function);

void admit(const std::vector<Agent*>& agents);

}  // namespace convoy::agent::test
