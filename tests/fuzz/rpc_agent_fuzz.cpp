// What a worker of the same session may do to another: any letters, in any order. Nonsense loses
// that worker, with an error, and nothing else; every call of ours ends once; every call of its
// runs once at most.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/letters.h"
#include "base/log.h"
#include "convoy/error.h"
#include "transport/simulation.h"

namespace {

using namespace convoy;
using namespace convoy::agent;
using transport::Arrival;
using transport::Letter;
using transport::LetterKind;
using transport::Remote;
using transport::World;

void require(bool condition) {
  if (!condition) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  bool empty() const { return left_.empty(); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    bytes = std::min(bytes, left_.size());
    if (bytes != 0) std::memcpy(&value, left_.data(), bytes);
    left_ = left_.subspan(bytes);
    return value;
  }
  std::span<const std::byte> bytes(std::size_t count) {
    count = std::min(count, left_.size());
    const auto taken = std::as_bytes(left_.first(count));
    left_ = left_.subspan(count);
    return taken;
  }

 private:
  std::span<const std::uint8_t> left_;
};

// Remembers which calls it was asked, to answer them rightly or not.
class Attacker final : public transport::Inbox {
 public:
  std::deque<ReplyHead> asked;
  Remote* victim = nullptr;

  void arrived(Remote& from, Arrival&& arrival) noexcept override {
    victim = &from;
    if (static_cast<LetterType>(arrival.kind) != LetterType::kCall) return;
    const auto head = decode_head<CallHead>(arrival.head, "call");
    asked.push_back({.slot = head.slot, .number = head.number});
  }
  void lost(Remote&, const Error&) noexcept override {}
};

class Asked final : public Call {
 public:
  int ends = 0;
  bool started = false;

 private:
  void ended(Outcome&& outcome) noexcept override {
    ++ends;
    if (outcome.failure) require(!outcome.failure->text.empty());
    for (const Part& part : outcome.parts) {
      if (!part.bytes.empty()) require(part.bytes.data() != nullptr);
    }
    mark_over();
  }
};

// The body of calls that are made here; inputs do not have it. How often each number ran.
struct Body {
  static constexpr std::uint64_t kSecret = 0x9e37'79b9'7f4a'7c15;
  std::uint64_t secret = kSecret;
  std::uint64_t number = 0;
};
std::map<std::uint64_t, int> ran;

void count(const RequestRef& request) {
  Body body;
  if (request->body().size() != sizeof body) return;
  std::memcpy(&body, request->body().data(), sizeof body);
  if (body.secret == Body::kSecret) require(++ran[body.number] == 1);
}

// Function 0 echoes, function 1 answers when it is asked the next time, 2 never answers.
void echo(void*, RequestRef taken) noexcept {
  const RequestRef request = std::move(taken);
  count(request);
  std::vector<Piece> pieces;
  for (const Part& part : request->parts()) pieces.push_back({part.bytes});
  request->reply({.body = request->body(), .pieces = pieces});
}
void later(void* data, RequestRef request) noexcept {
  count(request);
  auto& kept = *static_cast<RequestRef*>(data);
  if (kept) kept->fail(ErrorKind::kRemote, "type", "later");
  kept = std::move(request);
}
void never(void*, RequestRef taken) noexcept {
  const RequestRef request = std::move(taken);
  count(request);
}

Hello hello_of(const Id& session, Input& input) {
  return {.session = session,
          .worker = 1,
          .name = "attacker",
          .asks = input.number(1) % 2 == 0,
          .knows = true,
          .table = {{"called", "void()", 1}}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool quiet = (set_log_level(LogLevel::kOff), true);
  static_cast<void>(quiet);
  Input input(data, size);
  ran.clear();
  RequestRef kept;
  World world({.seed = input.number(1)});
  Attacker attacker;
  const auto endpoint = world.join(attacker, "attacker");
  const FunctionId called = declare_function({"called", "void()", 1});
  std::deque<Asked> calls;
  {
    Agent victim(
        {.name = "victim",
         .handlers = {{{"echo", "void()", 1}, &echo},
                      {{"later", "void()", 2}, &later, &kept},
                      {{"never", "void()", 3}, &never}},
         .make_endpoint = [&](transport::Inbox& inbox) { return world.join(inbox, "victim"); },
         .start_thread = [&](std::function<void()> run) { world.start(std::move(run)); }});
    const Id session{};
    const Member members[] = {{"victim", victim.address()}, {"attacker", endpoint->address()}};
    victim.admit(session, members);
    Remote& to = endpoint->remote(victim.address());
    const auto send = [&](LetterType type, bool reply, std::span<const std::byte> head,
                          std::span<const Piece> pieces = {}) {
      to.try_send({static_cast<LetterKind>(type), reply, head, pieces});
    };
    const auto greet = [&] {
      const Hello hello = hello_of(session, input);
      const std::string head = encode_hello(hello);
      const std::string table = encode_table(hello.table);
      const Piece piece{std::as_bytes(std::span(table))};
      send(LetterType::kHello, false, std::as_bytes(std::span(head)), {&piece, 1});
    };
    if (input.number(1) % 8 != 0) greet();
    while (!input.empty()) {
      switch (input.number(1) % 8) {
        case 0: {
          const auto type = static_cast<LetterType>(input.number(1) % 10);
          const bool reply = input.number(1) % 2 == 1;
          const auto head = input.bytes(input.number(1));
          std::vector<Piece> pieces(input.number(1) % 4);
          for (Piece& piece : pieces) piece.bytes = input.bytes(input.number(1));
          send(type, reply, head, pieces);
          break;
        }
        case 1: greet(); break;
        case 2: {
          const CallHead head{.function = static_cast<std::uint32_t>(input.number(1) % 4),
                              .number = input.number(1),
                              .remaining = input.number(1) % 2 == 0 ? kNoLimit : input.number(4),
                              .slot = static_cast<std::uint32_t>(input.number(1)),
                              .behind = static_cast<std::uint32_t>(input.number(1))};
          const Body body{.number = head.number};
          std::array<std::byte, sizeof head + sizeof body> bytes;
          std::memcpy(bytes.data(), &head, sizeof head);
          std::memcpy(bytes.data() + sizeof head, &body, sizeof body);
          const Piece piece{input.bytes(input.number(1))};
          send(LetterType::kCall, false, bytes, std::span(&piece, input.number(1) % 2));
          break;
        }
        case 3: {
          Asked& call = calls.emplace_back();
          try {
            call.started = true;
            victim.start(call, 1, called, {.body = input.bytes(input.number(1))},
                         {.timeout = std::chrono::microseconds(input.number(2))});
          } catch (const Error&) {
            call.started = false;
          }
          break;
        }
        case 4: {
          if (attacker.asked.empty()) break;
          ReplyHead head = attacker.asked.front();
          const std::uint64_t how = input.number(1);
          if (how % 2 == 0) attacker.asked.pop_front();
          if (how % 16 == 15) head.slot += 1;
          if (how % 32 == 16) head.number += 1;
          const std::string error = encode_error({.kind = 5, .type = "type", .text = "text"});
          std::vector<std::byte> bytes(sizeof head);
          std::memcpy(bytes.data(), &head, sizeof head);
          const bool fails = how % 4 == 0;
          const auto body = fails ? std::as_bytes(std::span(error)) : input.bytes(how % 64);
          bytes.insert(bytes.end(), body.begin(), body.end());
          send(fails ? LetterType::kError : LetterType::kReply, true, bytes);
          break;
        }
        case 5: {
          const CancelHead head{.number = input.number(1), .floor = input.number(1)};
          send(LetterType::kCancel, false, std::as_bytes(std::span(&head, 1)));
          break;
        }
        case 6: {
          const std::size_t which = input.number(1);
          if (which < calls.size() && calls[which].started) victim.cancel(calls[which]);
          break;
        }
        default: world.run([] { return false; }, input.number(1)); break;
      }
    }
    world.run([] { return false; }, 2000);
    world.crash(*endpoint);
    world.run_out();
    for (const Asked& call : calls) require(call.ends == (call.started ? 1 : 0) && call.over());
    kept = {};
  }
  return 0;
}
