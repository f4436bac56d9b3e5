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

Team::Team(std::size_t size, const std::function<void(agent::AgentOptions&)>& choose) {
  std::vector<agent::Agent*> agents;
  for (std::size_t worker = 0; worker < size; ++worker) {
    agent::AgentOptions options{.name = concat("worker", worker),
                                .rank = static_cast<WorkerId>(worker)};
    options.call_timeout = std::chrono::seconds(60);
    if (choose) choose(options);
    auto& member = *members_.emplace_back(std::make_unique<Member>());
    member.agent = std::make_unique<TestAgent>(
        options, std::vector<agent::test::TestFunction>{
                     {"create", [this](const RequestRef& request) { serve_create(request); }},
                     {"keep", [this](const RequestRef& request) { serve_keep(request); }},
                     {"fetch", [this](const RequestRef& request) { serve_fetch(request); }}});
    member.refs = std::make_unique<Refs>(**member.agent);
    agents.push_back(&**member.agent);
  }
  agent::test::admit(agents);
  for (const auto& member : members_) {
    for (std::size_t worker = 0; worker < size; ++worker) {
      member->refs->met(static_cast<WorkerId>(worker));
    }
  }
}

Team::~Team() {
  for (const auto& member : members_) member->agent->reset();
  for (const auto& member : members_) member->kept.lock()->clear();
}

Team::Member& Team::of(const Request& request) { return *members_[request.agent().self().id]; }

Value Team::value(int number) {
  ++alive;
  return {std::shared_ptr<int>(new int(number),
                               [this](const int* value) {
                                 delete value;
                                 --alive;
                               }),
          4};
}

void Team::serve_create(const RequestRef& request) {
  Refs& refs = *of(*request).refs;
  const auto fields = from_text<CreateFields>(request->body()).at(0);
  try {
    const Ref ref = refs.begin(request->caller().id, fields.head);
    if (fields.number < 0) {
      refs.set_failure(ref,
                       {ErrorKind::kRemote, "there is no such value", "", "std::domain_error"});
    } else {
      refs.set_value(ref, value(static_cast<int>(fields.number)));
    }
    reply_text(*request, "");
  } catch (const Error& error) {
    request->fail(error.kind(), "", error.what());
  }
}

void Team::serve_keep(const RequestRef& request) {
  Member& member = of(*request);
  const auto refs = std::make_shared<std::vector<Ref>>();
  try {
    for (const Passed& each : from_text<Passed>(request->body())) {
      refs->push_back(member.refs->take(request->caller().id, each));
    }
  } catch (const Error& error) {
    request->fail(error.kind(), "", error.what());
    return;
  }
  member.refs->when_settled(*refs, [&member, refs, request](const Failure* failure) {
    if (failure) return refuse(*request, *failure);
    {
      auto kept = member.kept.lock();
      for (Ref& ref : *refs) kept->push_back(std::move(ref));
    }
    reply_text(*request, "");
  });
}

void Team::serve_fetch(const RequestRef& request) {
  const auto id = from_text<RRefId>(request->body()).at(0);
  of(*request).refs->when_value(id, [request](const Value* value, const Failure* failure) {
    if (failure) return refuse(*request, *failure);
    reply_text(*request, std::to_string(*static_cast<const int*>(value->object.get())));
  });
}

Ref Team::create(std::size_t creator, std::size_t owner, int value,
                 const agent::CallOptions& options) {
  Refs& refs = (*this)[creator];
  const auto creation = refs.create(static_cast<WorkerId>(owner));
  const CreateFields fields{creation.head, value};
  TextCall call;
  agent::test::start(agent(creator), call, static_cast<WorkerId>(owner), "create",
                     as_text(std::span<const CreateFields>(&fields, 1)), options);
  agent(creator).wait(call);
  refs.creation_ended(creation.ref, call.failure ? &*call.failure : nullptr);
  return creation.ref;
}

void Team::give(std::size_t from, std::size_t to, const std::vector<Ref>& refs,
                const agent::CallOptions& options) {
  const auto receiver = static_cast<WorkerId>(to);
  std::vector<Passed> passed;
  for (const Ref& ref : refs) passed.push_back((*this)[from].pass(ref, receiver));
  TextCall call;
  try {
    agent::test::start(agent(from), call, receiver, "keep",
                       as_text(std::span<const Passed>(passed)), options);
  } catch (...) {
    (*this)[from].passed(receiver, passed, Passage::kNotSent);
    throw;
  }
  agent(from).wait(call);
  (*this)[from].passed(receiver, passed, call.failure ? Passage::kUnknown : Passage::kDelivered);
  static_cast<void>(call.result());
}

std::vector<Ref> Team::kept(std::size_t worker) {
  return std::exchange(*members_[worker]->kept.lock(), {});
}

int Team::fetch(std::size_t worker, const Ref& ref) {
  return std::stoi(agent::test::sync(agent(worker), ref.id().owner, "fetch",
                                     as_text(std::span<const RRefId>(&ref.id(), 1))));
}

void Team::shutdown_all(std::chrono::seconds timeout) {
  std::vector<std::thread> threads;
  for (std::size_t worker = 0; worker < size(); ++worker) {
    threads.emplace_back([this, worker, timeout] {
      EXPECT_NO_THROW(agent(worker).shutdown(Deadline::after(timeout)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool Team::becomes_empty() {
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  for (std::size_t worker = 0; worker < size(); ++worker) {
    for (;;) {
      const DebugInfo info = (*this)[worker].debug_info();
      if (info.num_forks + info.num_owner_rrefs + info.num_pending_users == 0) break;
      if (deadline.expired()) return false;
      std::this_thread::yield();
    }
  }
  while (alive.load() != 0 && !deadline.expired()) std::this_thread::yield();
  return alive.load() == 0;
}

}  // namespace convoy::rref::test
