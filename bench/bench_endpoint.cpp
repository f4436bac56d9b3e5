// Letters between processes: one round of every case of letters.h, as a line of JSON.
//
//   bench_endpoint convoy   an endpoint of ours; its large letters are lent (one copy, by the
//   sender)
//                           and placed (one copy, by the receiver, into memory that it names)
//   bench_endpoint small    the same without large ones
//   bench_endpoint ring     the limit: a bare ring of letters each way and a doorbell each
//   bench_endpoint futex    the limit asleep: two wake-ups
//   bench_endpoint memcpy   the limit of large letters: one copy into warm huge pages
//   bench_endpoint unix     a socket pair
//   bench_endpoint deaths [idle]   how long it takes until lost() is called for a killed process:
//                           one of three that send without a pause (or are idle); milliseconds
//   bench_endpoint star     one process and 63 others: megabytes of memory that endpoints cost
//                           them together, and milliseconds of processor time in an idle second
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <semaphore>
#include <span>
#include <string_view>

#include "letters.h"
#include "os/futex.h"
#include "os/process.h"
#include "os/segment.h"
#include "os/wait.h"
#include "transport/shm/shm_endpoint.h"
#include "warm_memory.h"

namespace bench {
namespace {

using convoy::ChildProcess;
using convoy::Deadline;
using convoy::Error;
using convoy::Segment;
using convoy::UniqueFd;
using convoy::transport::Address;
using convoy::transport::Arrival;
using convoy::transport::Endpoint;
using convoy::transport::Inbox;
using convoy::transport::Letter;
using convoy::transport::LetterKind;
using convoy::transport::Piece;
using convoy::transport::Remote;
using convoy::transport::SendResult;

constexpr LetterKind kEcho = 1;
constexpr LetterKind kQuit = 2;
constexpr std::array<std::byte, kLetterBytes> kLetter{};
constexpr std::span<const std::byte> kHead(kLetter);

[[noreturn]] void die(const char* why) {
  std::fprintf(stderr, "bench_endpoint: %s\n", why);
  std::exit(1);
}

// Made once: a clock takes as long as a letter.
Deadline limit() {
  static const Deadline limit = Deadline::after(std::chrono::minutes(5));
  return limit;
}

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    text += pair;
  }
  return text;
}
std::string from_hex(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

ChildProcess start_child(const std::vector<std::string>& words, int descriptor = -1) {
  std::vector<std::string> arguments = {"/proc/self/exe"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  std::vector<int> inherited;
  if (descriptor >= 0) inherited.push_back(descriptor);
  return ChildProcess::spawn({.arguments = arguments, .inherited = inherited});
}

// --- convoy -----------------------------------------------------------------------------------

void send(Endpoint& endpoint, Remote& to, const Letter& letter) {
  for (;;) {
    const SendResult result = to.try_send(letter);
    if (result == SendResult::kSent) return;
    if (result == SendResult::kLost) die("the other side is gone");
    endpoint.poll(Endpoint::Serve::kReplies);
  }
}

// Answers every letter.
class EchoInbox : public Inbox {
 public:
  explicit EchoInbox(bool places) {
    if (places) memory_ = std::make_unique<WarmMemory>(kLargeBytes);
  }

  std::span<std::byte> place(Remote&, const Arrival&, std::size_t,
                             std::size_t bytes) noexcept override {
    if (!memory_ || bytes > kLargeBytes) return {};
    return {memory_->data(), bytes};
  }
  void arrived(Remote& from, Arrival&& letter) noexcept override {
    if (letter.kind == kQuit) return end();
    while (from.try_send({.kind = kEcho, .reply = true, .head = kHead}) ==
           SendResult::kWouldBlock) {
    }
  }
  void lost(Remote&, const Error&) noexcept override { end(); }

  std::atomic<bool> quit{false};
  std::atomic<Endpoint*> waiting{nullptr};  // whom the end must wake

 private:
  void end() noexcept {
    quit.store(true);
    if (Endpoint* const endpoint = waiting.load()) endpoint->wake();
  }

  std::unique_ptr<WarmMemory> memory_;
};

// Counts answers, and knows who came.
class CountingInbox : public Inbox {
 public:
  void arrived(Remote& from, Arrival&& letter) noexcept override {
    if (letter.reply) {
      answers.fetch_add(1, std::memory_order_release);
      return;
    }
    greeter.store(&from);
    if (Endpoint* const endpoint = waiting.load()) endpoint->wake();
  }
  void lost(Remote&, const Error&) noexcept override {}

  std::atomic<std::uint64_t> answers{0};
  std::atomic<Remote*> greeter{nullptr};
  std::atomic<Endpoint*> waiting{nullptr};  // whom a greeting, which is no reply, must wake
};

void serve_letters(const std::string& address, bool places) {
  EchoInbox inbox(places);
  const auto endpoint = convoy::shm::make_shm_endpoint(inbox);
  inbox.waiting.store(endpoint.get());
  Remote& client = endpoint->remote(Address::decode(from_hex(address)));
  send(*endpoint, client, {.kind = kEcho, .head = kHead});
  endpoint->wait(limit(), [&] { return inbox.quit.load(); });
}

class EndpointPipe {
 public:
  explicit EndpointPipe(const char* mode)
      : source_(kLargeBytes), stays_(std::string_view(mode) == "placed") {
    endpoint_ = convoy::shm::make_shm_endpoint(inbox_);
    inbox_.waiting.store(endpoint_.get());
    child_ = start_child({"serve_letters", to_hex(endpoint_->address().encode()), mode});
    if (!endpoint_->wait(limit(), [&] { return inbox_.greeter.load() != nullptr; })) {
      die("nobody came");
    }
    server_ = inbox_.greeter.load();
  }
  ~EndpointPipe() {
    bench::send(*endpoint_, *server_, {.kind = kQuit});
    child_.wait(limit());
  }
  EndpointPipe(const EndpointPipe&) = delete;
  EndpointPipe& operator=(const EndpointPipe&) = delete;

  void send() {
    if (sent_++ == taken_) attention_.emplace(*endpoint_);
    bench::send(*endpoint_, *server_, {.kind = kEcho, .head = kHead});
  }
  void receive() {
    ++taken_;
    const auto ready = [this] { return inbox_.answers.load(std::memory_order_acquire) >= taken_; };
    if (!ready() && !endpoint_->wait(limit(), ready)) die("no answer");
    if (sent_ == taken_) attention_.reset();
  }
  void send_large() {
    ++sent_;
    const Piece piece{.bytes = {source_.data(), kLargeBytes}, .stays = stays_};
    bench::send(*endpoint_, *server_, {.kind = kEcho, .pieces = {&piece, 1}});
  }

 private:
  CountingInbox inbox_;
  WarmMemory source_;
  const bool stays_;
  std::unique_ptr<Endpoint> endpoint_;
  ChildProcess child_;
  Remote* server_ = nullptr;
  std::uint64_t sent_ = 0, taken_ = 0;
  std::optional<Endpoint::Attention> attention_;  // while an answer is awaited
};

void run_convoy() {
  EndpointPipe lent("lent");
  EndpointPipe placed("placed");
  for (auto* const pipe : {&lent, &placed}) {  // warms up
    for (int i = 0; i < 2; ++i) pipe->send_large(), pipe->receive();
  }
  auto cases = letter_cases(lent);
  cases.back().name = "large_lent";
  cases.push_back(letter_cases(placed).back());
  cases.back().name = "large_placed";
  print_medians(cases);
}

void run_small() {
  EndpointPipe pipe("lent");
  auto cases = letter_cases(pipe);
  cases.pop_back();
  print_medians(cases);
}

// --- limits and a plain socket ----------------------------------------------------------------

// One direction of the bare ring: what any endpoint has at least to do for a letter.
struct BareRing {
  static constexpr std::size_t kLetters = 256;
  struct alignas(64) Slot {
    std::uint64_t words[8];
  };
  alignas(64) std::atomic<std::uint64_t> doorbell{0};  // a bit for each sender
  alignas(64) std::atomic<std::uint64_t> written{0};
  alignas(64) std::atomic<std::uint64_t> taken{0};
  Slot slots[kLetters];

  void put(std::uint64_t number) {
    while (number - taken.load(std::memory_order_acquire) >= kLetters) convoy::cpu_relax();
    slots[number % kLetters].words[0] = number;
    written.store(number + 1, std::memory_order_release);
    doorbell.fetch_or(1, std::memory_order_release);
  }
  // False: `quit` was set first.
  bool take(std::uint64_t number, const std::atomic<std::uint32_t>& quit) {
    while (written.load(std::memory_order_acquire) <= number) {
      while (doorbell.load(std::memory_order_relaxed) == 0) {
        if (quit.load(std::memory_order_relaxed) != 0) return false;
        convoy::cpu_relax();
      }
      doorbell.exchange(0, std::memory_order_acquire);
    }
    if (slots[number % kLetters].words[0] != number) die("a letter was lost");
    taken.store(number + 1, std::memory_order_release);
    return true;
  }
};

struct BareRings {
  BareRing to_server, to_client;
  alignas(64) std::atomic<std::uint32_t> quit{0};
  alignas(64) std::atomic<std::uint32_t> ping{0};  // for the futexes
  alignas(64) std::atomic<std::uint32_t> pong{0};
};

// As Segment::create() rounds.
std::size_t whole_pages(std::size_t bytes) {
  const std::size_t page = convoy::page_size();
  return (bytes + page - 1) / page * page;
}
BareRings& rings_in(const Segment& segment) {
  return *std::launder(reinterpret_cast<BareRings*>(segment.data()));
}
Segment adopt_rings(int descriptor) {
  return Segment::adopt(UniqueFd(descriptor), whole_pages(sizeof(BareRings)));
}

void serve_ring(int descriptor) {
  const Segment segment = adopt_rings(descriptor);
  BareRings& rings = rings_in(segment);
  for (std::uint64_t n = 0; rings.to_server.take(n, rings.quit); ++n) rings.to_client.put(n);
}

void serve_futex(int descriptor) {
  const Segment segment = adopt_rings(descriptor);
  BareRings& rings = rings_in(segment);
  for (std::uint32_t n = 0;; ++n) {
    while (rings.ping.load() == n) convoy::futex_wait(rings.ping, n, limit());
    if (rings.quit.load() != 0) return;
    rings.pong.store(n + 1);
    convoy::futex_wake(rings.pong);
  }
}

class RingPipe {
 public:
  RingPipe() : segment_(Segment::create(sizeof(BareRings), "bench", Segment::Warm::kYes)) {
    new (segment_.data()) BareRings;
    child_ = start_child({"serve_ring", std::to_string(segment_.fd())}, segment_.fd());
  }
  ~RingPipe() {
    rings_in(segment_).quit.store(1);
    child_.wait(limit());
  }
  RingPipe(const RingPipe&) = delete;
  RingPipe& operator=(const RingPipe&) = delete;

  void send() { rings_in(segment_).to_server.put(sent_++); }
  void receive() { rings_in(segment_).to_client.take(taken_++, rings_in(segment_).quit); }

 private:
  Segment segment_;
  ChildProcess child_;
  std::uint64_t sent_ = 0, taken_ = 0;
};

void run_futex() {
  const auto segment = Segment::create(sizeof(BareRings), "bench", Segment::Warm::kYes);
  auto& rings = *new (segment.data()) BareRings;
  auto child = start_child({"serve_futex", std::to_string(segment.fd())}, segment.fd());
  std::uint32_t n = 0;
  print_medians({{"round_trip_asleep", 200, true, [&] {
                    const auto start = Clock::now();
                    rings.ping.store(n + 1);
                    convoy::futex_wake(rings.ping);
                    while (rings.pong.load() == n) convoy::futex_wait(rings.pong, n, limit());
                    ++n;
                    return microseconds_since(start);
                  }}});
  rings.quit.store(1);
  rings.ping.store(n + 1);
  convoy::futex_wake(rings.ping);
  child.wait(limit());
}

void run_memcpy() {
  const WarmMemory from(kLargeBytes), to(kLargeBytes);
  print_medians({{"large", 7, false, [&] {
                    const auto start = Clock::now();
                    std::memcpy(to.data(), from.data(), kLargeBytes);
                    return microseconds_since(start);
                  }}});
}

class SocketPipe {
 public:
  SocketPipe() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) die("socketpair");
    fd_ = UniqueFd(ends[0]);
    const UniqueFd theirs(ends[1]);
    child_ = start_child({"serve_socket", std::to_string(theirs.get())}, theirs.get());
  }
  explicit SocketPipe(int fd) : fd_(fd) {}
  ~SocketPipe() {
    fd_.reset();
    if (child_.pid() > 0) child_.wait(limit());
  }
  SocketPipe(const SocketPipe&) = delete;
  SocketPipe& operator=(const SocketPipe&) = delete;

  // A letter says how many bytes follow it.
  void send() { put({}); }
  void receive() {
    if (!take()) die("the other side is gone");
  }
  void send_large() {
    if (!source_) source_ = std::make_unique<WarmMemory>(kLargeBytes);
    put({source_->data(), kLargeBytes});
  }
  bool take() {
    std::uint64_t more = 0;
    if (!read_all(std::as_writable_bytes(std::span(&more, 1)))) return false;
    if (more != 0 && !target_) target_ = std::make_unique<WarmMemory>(kLargeBytes);
    return more == 0 || read_all({target_->data(), more});
  }

 private:
  void put(std::span<const std::byte> large) {
    const std::uint64_t more = large.size();
    write_all(std::as_bytes(std::span(&more, 1)));
    write_all(large);
  }
  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) die("send");
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }
  bool read_all(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }

  UniqueFd fd_;
  ChildProcess child_;
  std::unique_ptr<WarmMemory> source_, target_;
};

template <class Pipe>
void run_pipe() {
  Pipe pipe;
  pipe.send(), pipe.receive();
  if constexpr (requires { pipe.send_large(); }) {
    for (int i = 0; i < 2; ++i) pipe.send_large(), pipe.receive();
  }
  print_medians(letter_cases(pipe));
}

// --- a star -----------------------------------------------------------------------------------

constexpr int kLeaves = 63;

// Tells over the line that it is ready; the end of the line ends it.
void be_leaf(int line, const std::string& address) {
  CountingInbox inbox;
  std::unique_ptr<Endpoint> endpoint;
  if (!address.empty()) {
    endpoint = convoy::shm::make_shm_endpoint(inbox);
    send(*endpoint, endpoint->remote(Address::decode(from_hex(address))),
         {.kind = kEcho, .head = kHead});
    if (!endpoint->wait(limit(), [&] { return inbox.answers.load() == 1; })) die("no answer");
  }
  const char ready = 'r';
  if (::write(line, &ready, 1) != 1) die("write");
  char end = 0;
  static_cast<void>(!::read(line, &end, 1));
}

double value_after(const std::string& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(word)) return std::stod(line.substr(word.size()));
  }
  die(("no " + word + " in " + file).c_str());
}

// utime and stime, in milliseconds.
double processor_ms(int pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  text = text.substr(text.rfind(')') + 2);
  double ticks = 0;
  std::size_t at = 0;
  for (int field = 0; field < 13; ++field) {
    if (field >= 11) ticks += std::atof(text.c_str() + at);
    at = text.find(' ', at) + 1;
  }
  return ticks * 1000 / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

struct StarCost {
  double megabytes = 0;
  double idle_ms = 0;
};

StarCost star(bool with_endpoints) {
  EchoInbox inbox(false);
  std::unique_ptr<Endpoint> hub;
  if (with_endpoints) hub = convoy::shm::make_shm_endpoint(inbox);
  const std::string address = hub ? to_hex(hub->address().encode()) : "";
  std::vector<ChildProcess> leaves;
  std::vector<UniqueFd> lines;
  for (int i = 0; i < kLeaves; ++i) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) die("socketpair");
    lines.emplace_back(ends[0]);
    const UniqueFd theirs(ends[1]);
    leaves.push_back(start_child({"be_leaf", std::to_string(theirs.get()), address}, theirs.get()));
  }
  for (const UniqueFd& line : lines) {
    char ready = 0;
    if (::read(line.get(), &ready, 1) != 1) die("a leaf ended");
  }
  std::vector<int> pids = {::getpid()};
  for (const auto& leaf : leaves) pids.push_back(leaf.pid());
  StarCost cost;
  for (const int pid : pids) cost.idle_ms -= processor_ms(pid);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  for (const int pid : pids) cost.idle_ms += processor_ms(pid);
  for (const int pid : pids) {
    cost.megabytes += value_after("/proc/" + std::to_string(pid) + "/smaps_rollup", "Pss:") / 1024;
  }
  lines.clear();
  for (auto& leaf : leaves) leaf.wait(limit());
  return cost;
}

// --- deaths -----------------------------------------------------------------------------------

// Answers, and counts who came and who was lost.
class DeathInbox : public Inbox {
 public:
  void arrived(Remote& from, Arrival&& letter) noexcept override {
    if (letter.kind == kQuit) ready.release();  // the first one
    static_cast<void>(from.try_send({.kind = kEcho, .reply = true, .head = kHead}));
  }
  void lost(Remote&, const Error&) noexcept override {
    when = Clock::now();
    lost_one.release();
  }

  std::counting_semaphore<> ready{0};
  std::counting_semaphore<> lost_one{0};
  Clock::time_point when;
};

// Sends without a pause until it is killed, or until the other is gone.
void send_for_ever(const std::string& address, bool busy) {
  CountingInbox inbox;
  const auto endpoint = convoy::shm::make_shm_endpoint(inbox);
  Remote& hub = endpoint->remote(Address::decode(from_hex(address)));
  send(*endpoint, hub, {.kind = kQuit, .head = kHead});
  while (!hub.lost()) {
    if (busy) {
      static_cast<void>(hub.try_send({.kind = kEcho, .head = kHead}));
      endpoint->poll(Endpoint::Serve::kReplies);
    } else {
      endpoint->wait(Deadline::after(std::chrono::seconds(1)), [&] { return hub.lost(); });
    }
  }
}

void run_deaths(bool busy) {
  constexpr int kDeaths = 200;
  constexpr std::size_t kSenders = 3;
  DeathInbox inbox;
  const auto hub = convoy::shm::make_shm_endpoint(inbox);
  const std::string address = to_hex(hub->address().encode());
  std::vector<ChildProcess> senders;
  const auto start = [&] {
    senders.push_back(start_child({"send_for_ever", address, busy ? "busy" : "idle"}));
    inbox.ready.acquire();
  };
  while (senders.size() < kSenders) start();
  std::vector<double> times;
  for (int i = 0; i < kDeaths; ++i) {
    const auto killed = Clock::now();
    ::kill(senders.front().pid(), SIGKILL);
    inbox.lost_one.acquire();
    times.push_back(std::chrono::duration<double, std::milli>(inbox.when - killed).count());
    senders.front().wait(limit());
    senders.erase(senders.begin());
    start();
  }
  for (const auto& sender : senders) ::kill(sender.pid(), SIGKILL);
  for (auto& sender : senders) sender.wait(limit());
  std::sort(times.begin(), times.end());
  std::printf("{\"median_ms\": %.1f, \"p99_ms\": %.1f, \"most_ms\": %.1f}\n", times[kDeaths / 2],
              times[kDeaths * 99 / 100], times.back());
}

void run_star() {
  const StarCost without = star(false);
  const StarCost with = star(true);
  std::printf("{\"star_megabytes\": %.2f, \"star_idle_ms\": %.1f}\n",
              with.megabytes - without.megabytes, with.idle_ms);
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  const std::string side = argc > 1 ? argv[1] : "";
  const std::string first = argc > 2 ? argv[2] : "";
  const std::string second = argc > 3 ? argv[3] : "";
  if (side == "convoy") {
    run_convoy();
  } else if (side == "small") {
    run_small();
  } else if (side == "ring") {
    run_pipe<RingPipe>();
  } else if (side == "futex") {
    run_futex();
  } else if (side == "memcpy") {
    run_memcpy();
  } else if (side == "unix") {
    run_pipe<SocketPipe>();
  } else if (side == "star") {
    run_star();
  } else if (side == "deaths") {
    run_deaths(first != "idle");
  } else if (side == "send_for_ever") {
    send_for_ever(first, second == "busy");
  } else if (side == "serve_letters") {
    serve_letters(first, second == "placed");
  } else if (side == "serve_ring") {
    serve_ring(std::stoi(first));
  } else if (side == "serve_futex") {
    serve_futex(std::stoi(first));
  } else if (side == "serve_socket") {
    SocketPipe client(std::stoi(first));
    while (client.take()) client.send();
  } else if (side == "be_leaf") {
    be_leaf(std::stoi(first), second);
  } else {
    std::fprintf(stderr, "usage: bench_endpoint convoy|small|ring|futex|memcpy|unix|star|deaths\n");
    return 2;
  }
  return 0;
}
