#include "team.h"

#include <cstring>
#include <thread>

#include "base/concat.h"
#include "base/error.h"

namespace convoy::rref::test {

using agent::Request;
using agent::RequestRef;
using agent::test::TestAgent;
using agent::test::TextCall;

namespace {

struct CreateFields {
  CreationHead head;
  std::int64_t number = 0;
};

template <class T>
std::string as_text(std::span<const T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

template <class T>
std::vector<T> from_text(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

void reply_text(Request& request, const std::string& text) {
  request.reply({.body = std::as_bytes(std::span(text))});
}

void refuse(Request& request, const Failure& failure) {
  request.fail(failure.kind, failure.remote_type, failure.text);
}

}  // namespace

Worker::Worker(const agent::AgentOptions& options)
    : agent_(std::make_unique<TestAgent>(
          options,
          std::vector<agent::test::TestFunction>{
              {"create", [this](const RequestRef& request) { serve_create(request); }},
              {"keep", [this](const RequestRef& request) { serve_keep(request); }},
              {"fetch", [this](const RequestRef& request) { serve_fetch(request); }}})),
      refs_(**agent_) {}

Worker::~Worker() {
  agent_->reset();
  kept_.lock()->clear();
}

void Worker::met_all() {
  for (const agent::Worker& other : agent().workers()) refs_.met(other.id);
}

Value Worker::value(int number) {
  ++alive;
  return {std::shared_ptr<int>(new int(number),
                               [this](const int* value) {
                                 delete value;
                                 --alive;
                               }),
          4};
}

// --- functions ---

void Worker::serve_create(const RequestRef& request) {
  const auto fields = from_text<CreateFields>(request->body()).at(0);
  try {
    const Ref ref = refs_.begin(request->caller().id, fields.head);
    if (in_function) in_function();
    if (fields.number < 0) {
      refs_.set_failure(ref,
                        {ErrorKind::kRemote, "there is no such value", "", "std::domain_error"});
    } else {
      refs_.set_value(ref, value(static_cast<int>(fields.number)));
    }
    reply_text(*request, "");
  } catch (const Error& error) {
    request->fail(error.kind(), "", error.what());
  }
}

void Worker::serve_keep(const RequestRef& request) {
  const auto refs = std::make_shared<std::vector<Ref>>();
  try {
    for (const Passed& each : from_text<Passed>(request->body())) {
      refs->push_back(refs_.take(request->caller().id, each));
    }
  } catch (const Error& error) {
    request->fail(error.kind(), "", error.what());
    return;
  }
  if (in_function) in_function();
  refs_.when_settled(*refs, [this, refs, request](const Failure* failure) {
    if (failure) return refuse(*request, *failure);
    if (keeps.load()) {
      auto kept = kept_.lock();
      for (Ref& ref : *refs) kept->push_back(std::move(ref));
    }
    reply_text(*request, "");
  });
}

void Worker::serve_fetch(const RequestRef& request) {
  const auto id = from_text<RRefId>(request->body()).at(0);
  refs_.when_value(request->caller().id, id, [request](const Value* value, const Failure* failure) {
    if (failure) return refuse(*request, *failure);
    reply_text(*request, std::to_string(*static_cast<const int*>(value->object.get())));
  });
}

// --- calls ---

Ref Worker::create(std::size_t owner, int value, const agent::CallOptions& options) {
  const auto creation = refs_.create(static_cast<WorkerId>(owner));
  const CreateFields fields{creation.head, value};
  TextCall call;
  agent::test::start(agent(), call, static_cast<WorkerId>(owner), "create",
                     as_text(std::span<const CreateFields>(&fields, 1)), options);
  agent().wait(call);
  refs_.creation_ended(creation.ref, call.failure ? &*call.failure : nullptr);
  return creation.ref;
}

void Worker::give(std::size_t to, const std::vector<Ref>& refs, const agent::CallOptions& options) {
  const auto receiver = static_cast<WorkerId>(to);
  std::vector<Passed> passed;
  TextCall call;
  try {
    for (const Ref& ref : refs) passed.push_back(refs_.pass(ref, receiver));
    agent::test::start(agent(), call, receiver, "keep", as_text(std::span<const Passed>(passed)),
                       options);
  } catch (...) {
    refs_.passed(receiver, passed, Passage::kNotSent);
    throw;
  }
  agent().wait(call);
  refs_.passed(receiver, passed, call.failure ? Passage::kUnknown : Passage::kDelivered);
  static_cast<void>(call.result());
}

std::vector<Ref> Worker::kept() { return std::exchange(*kept_.lock(), {}); }

int Worker::fetch(const Ref& ref) {
  return std::stoi(agent::test::sync(agent(), ref.id().owner, "fetch",
                                     as_text(std::span<const RRefId>(&ref.id(), 1))));
}

void Worker::act(std::vector<Ref>& held, Random& random, bool faulty) {
  const std::size_t to = random.below(agent().workers().size());
  try {
    switch (random.below(5)) {
      case 0: held.push_back(create(to, 1)); break;
      case 1:
        if (!held.empty()) give(to, {held[random.below(held.size())]});
        break;
      case 2:
        for (Ref& ref : kept()) held.push_back(std::move(ref));
        break;
      case 3:
        if (!held.empty()) {
          const Ref& ref = held[random.below(held.size())];
          if (!ref.is_owner()) {
            EXPECT_EQ(fetch(ref), 1);
          }
        }
        break;
      default:
        if (held.size() > 3) held.erase(held.begin(), held.begin() + 2);
        break;
    }
  } catch (const Error& error) {
    EXPECT_TRUE(faulty) << error.what();
  }
}

bool Worker::is_empty() {
  kept();
  const DebugInfo info = refs_.debug_info();
  return alive.load() == 0 && info.num_forks + info.num_owner_rrefs + info.num_pending_users == 0;
}

// --- Team ---

Team::Team(std::size_t size, const std::function<void(agent::AgentOptions&)>& choose) {
  std::vector<agent::Agent*> agents;
  for (std::size_t worker = 0; worker < size; ++worker) {
    agent::AgentOptions options{.name = concat("worker", worker),
                                .rank = static_cast<WorkerId>(worker)};
    options.call_timeout = std::chrono::seconds(60);
    if (choose) choose(options);
    workers_.push_back(std::make_unique<Worker>(options));
    agents.push_back(&workers_.back()->agent());
  }
  agent::test::admit(agents);
  for (const auto& worker : workers_) worker->met_all();
}

Team::~Team() {
  for (const auto& worker : workers_) worker->end();
}

void Team::shutdown_all(std::chrono::seconds timeout) {
  std::vector<std::thread> threads;
  for (const auto& worker : workers_) {
    threads.emplace_back([&worker = *worker, timeout] {
      EXPECT_NO_THROW(worker.agent().shutdown(Deadline::after(timeout)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool Team::becomes_empty() {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  while (!deadline.expired()) {
    bool empty = true;
    for (const auto& worker : workers_) empty = worker->is_empty() && empty;
    if (empty) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace convoy::rref::test
