#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "base/id.h"
#include "convoy/deadline.h"
#include "convoy/error.h"

// Letters between many processes. An Endpoint is one party: it has an Address that others find it
// by (through a store, say), a Remote for each other party, and an Inbox that takes what arrives.
// There are three kinds: processes of one host (transport/shm/shm_endpoint.h), parties of a
// simulated world with a time of its own (transport/simulation.h), and a faulty one around either
// (transport/faulty.h). docs/internals/endpoint.md has the protocol.
namespace convoy::transport {

// Names one endpoint for ever: a process that comes back has another one.
struct Address {
  Id id;
  std::string where;  // how it is reached; what this means is the affair of the kind of endpoint

  std::string encode() const;
  static Address decode(const std::string& text);  // throws kInvalidArgument

  friend bool operator==(const Address&, const Address&) = default;
};

// What letters are for is the affair of those who send them. Faults are chosen by it.
using LetterKind = std::uint16_t;

// The bytes of a letter that are written straight to where they travel. Refers to what it was made
// of: use it up at once.
class Head {
 public:
  Head() = default;
  // Copied.
  Head(std::span<const std::byte> bytes) : bytes_(bytes.size()), data_(bytes.data()) {}
  // write(span) fills a span of that many bytes.
  template <class Writer>
  Head(std::size_t bytes, Writer& write)
      : bytes_(bytes),
        writer_(&write),
        write_([](void* writer, std::span<std::byte> to) { (*static_cast<Writer*>(writer))(to); }) {
  }

  std::size_t size() const { return bytes_; }
  void write(std::span<std::byte> to) const {
    if (write_) {
      write_(writer_, to);
    } else if (bytes_ != 0) {
      std::memcpy(to.data(), data_, bytes_);
    }
  }

 private:
  std::size_t bytes_ = 0;
  const std::byte* data_ = nullptr;
  void* writer_ = nullptr;
  void (*write_)(void*, std::span<std::byte>) = nullptr;
};

// Something larger that goes with a letter.
struct Piece {
  std::span<const std::byte> bytes = {};
  // The bytes stay as they are until the letter's `on_sent`: the receiver may read them where they
  // are, which is one copy in all. Otherwise they are copied before try_send() returns.
  bool stays = false;
};

struct Letter {
  // Of head; larger things are pieces.
  static constexpr std::size_t kMostHead = 8192;
  static constexpr std::size_t kMostPieces = 256;

  LetterKind kind = 0;
  // Any thread that waits at the receiver may be given it. Others go to the thread that serves.
  bool reply = false;
  Head head = {};
  std::span<const Piece> pieces = {};
};

// The pieces that stay are free again: nullptr if the receiver has them, else why it has not.
using Sent = std::function<void(const Error* lost)>;

enum class SendResult {
  kSent,
  kWouldBlock,  // no credit: Inbox::room() tells when to try again
  kLost,        // Inbox::lost() was called, or will be
};

// A piece as it arrived.
struct Part {
  enum class Where {
    kPlaced,  // where Inbox::place() said
    kLent,    // in the sender's memory, which is ours to read while `hold` lives
    kOwned,   // in memory of its own, which lives as long as `hold`
  };

  std::span<const std::byte> bytes = {};
  Where where = Where::kPlaced;
  std::shared_ptr<const void> hold = nullptr;
};

// A letter as it arrived. Parts may be kept, and outlive the endpoint; `head` is there only for the
// time of the call.
struct Arrival {
  LetterKind kind = 0;
  bool reply = false;
  std::span<const std::byte> head = {};
  std::vector<Part> parts = {};
  // Whether threads that sleep in wait() look at what they wait for, when arrived() of a reply has
  // returned. arrived() sets it to false if that concerns none of them: it saves their wake-up.
  bool wakes = true;
};

// Another endpoint, as seen from here. Made and owned by the Endpoint, and there until that is
// destroyed, also when it is lost. All methods may be called from any thread, also in an Inbox.
class Remote {
 public:
  Remote(const Remote&) = delete;
  Remote& operator=(const Remote&) = delete;

  const Address& address() const { return address_; }
  // For messages: "pid 123".
  const std::string& name() const { return name_; }

  // Never blocks; nothing was done unless it returns kSent. `on_sent` is called once, and only
  // then: here if no piece stays, otherwise on a thread that polls. Throws kInvalidArgument for a
  // letter that could never go (its size), kResource without memory, kUnsupported in a forked
  // child.
  virtual SendResult try_send(const Letter& letter, Sent on_sent = nullptr) = 0;
  virtual bool lost() const = 0;
  // Ends the connection. Both sides hear lost(); what was sent before may still arrive.
  virtual void cut() noexcept = 0;

  // Whatever the owner of the endpoint wants to find again here.
  std::atomic<void*> user{nullptr};

 protected:
  Remote(Address address, std::string name)
      : address_(std::move(address)), name_(std::move(name)) {}
  virtual ~Remote() = default;

 private:
  const Address address_;
  const std::string name_;
};

// Takes what arrives; implemented by who receives. It must outlive the endpoint.
//
// Threads: replies (place and arrived) come on any thread that polls, several at a time. Everything
// else comes on the thread that serves, one call at a time; a call that sleeps in wait() or has
// called hand_over() does not count. No lock of the endpoint is held: calls may send, and wait. A
// call that takes long keeps letters waiting, unless it hands over.
//
// Order: letters of one remote that are no replies and have no large piece arrive in the order in
// which they were sent. Replies have no order, since several threads take them, and letters with
// large pieces arrive when these are here. A reply's call must be short: it is made by a thread
// that waits for something else, perhaps. The last call for a remote is lost().
class Inbox {
 public:
  virtual ~Inbox() = default;

  // Where this piece of a letter shall land, in memory that lives until arrived() or lost(): as
  // many bytes. An empty span leaves it to the endpoint (Part::where). Not asked for empty pieces.
  virtual std::span<std::byte> place(Remote&, const Arrival&, std::size_t /*piece*/,
                                     std::size_t /*bytes*/) noexcept {
    return {};
  }
  virtual void arrived(Remote&, Arrival&&) noexcept = 0;
  // It is gone, or the connection to it: by name, with the cause. Also while nobody sends.
  virtual void lost(Remote&, const Error&) noexcept = 0;
  // Somebody whom this endpoint did not ask for has made a connection. Before anything of it.
  virtual void joined(Remote&) noexcept {}
  // A letter that was refused with kWouldBlock may go now.
  virtual void room(Remote&) noexcept {}
};

// One party. All methods may be called from any thread. A forked child cannot use it (kUnsupported)
// and does not disturb it.
class Endpoint {
 public:
  using Clock = Deadline::Clock;
  using TimerId = std::uint64_t;

  enum class Serve {
    kReplies,  // what any thread may take
    kAll,      // by one thread at a time, and not where the endpoint has a thread that serves
  };

  virtual ~Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // This thread sends something and will wait() for the answer at once: made before it sends, ended
  // after the wait. An answer that comes before the thread is in wait() then wakes no other thread
  // of this endpoint. Until it waits, what comes from others stays where it is: it must not stop in
  // between. Needed for nothing else. Only the outermost one of a thread counts.
  class Attention {
   public:
    explicit Attention(Endpoint& endpoint) noexcept : endpoint_(endpoint) {
      endpoint.begin_attention(*this);
    }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;
    ~Attention() {
      if (notes.began) endpoint_.end_attention(*this);
    }

    // The endpoint's own.
    struct Notes {
      bool began = false;
      bool covered = false;
      bool quick = false;
      std::uint32_t number = 0;
      std::shared_ptr<void> ring = nullptr;
    };
    Notes notes;

   private:
    Endpoint& endpoint_;
  };

  virtual const Address& address() const = 0;

  // The endpoint of this address; connects at its first call, which may wait a moment. Throws
  // kPeerLost if there is none (any more), kUnsupported if it cannot be reached from here,
  // kTimeout.
  virtual Remote& remote(const Address& address) = 0;

  // Moves letters along; does not wait. True if it did anything.
  virtual bool poll(Serve serve) = 0;
  // Until ready() or the deadline (by now()). Meanwhile this thread takes replies: no other thread
  // needs to run for one to arrive. Whoever makes ready() true outside of an Inbox's calls for
  // replies and losses must wake() after it. False: the deadline passed and ready() is false.
  virtual bool wait(const Deadline& deadline, FunctionRef<bool()> ready) = 0;
  // The same without taking anything: for what no reply brings, and what may take long. A thread in
  // wait() is in the way of calls of others: it finds their letters, and has to hand them over.
  virtual bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) {
    return wait(deadline, ready);
  }
  // Threads in wait() and wait_aside() look at ready() again. Costs nothing while none sleeps.
  virtual void wake() noexcept = 0;
  // The call of the inbox in which the thread that serves is will not return soon: another thread
  // serves from now on, and does not wait for its end. From any thread. wait() does it by itself,
  // before it sleeps, where it is called by the thread that serves. Nothing happens where no thread
  // of the endpoint serves.
  virtual void hand_over() noexcept {}

  // The endpoint's time; in a simulation it is not that of the machine.
  virtual Clock::time_point now() const = 0;
  // Runs on the thread that serves, not before that time.
  virtual TimerId call_at(Clock::time_point when, std::function<void()> function) = 0;
  // False: it has run, or runs just now.
  virtual bool cancel(TimerId id) = 0;

 protected:
  Endpoint() = default;

  // See Attention.
  virtual void begin_attention(Attention&) noexcept {}
  virtual void end_attention(Attention&) noexcept {}
};

// Throws kInvalidArgument for a letter that no endpoint takes.
void check_letter(const Letter& letter, std::size_t most_bytes);
// Of all pieces.
std::size_t piece_bytes(const Letter& letter);

// A letter with all its bytes, for those who must keep one.
class KeptLetter {
 public:
  explicit KeptLetter(const Letter& letter);
  KeptLetter(const KeptLetter&) = delete;
  KeptLetter& operator=(const KeptLetter&) = delete;

  // Valid as long as this object.
  Letter letter() const { return {kind_, reply_, std::span<const std::byte>(head_), pieces_}; }
  LetterKind kind() const { return kind_; }
  bool reply() const { return reply_; }
  std::span<const std::byte> head() const { return head_; }
  std::span<const Piece> pieces() const { return pieces_; }

 private:
  LetterKind kind_;
  bool reply_;
  std::vector<std::byte> head_;
  std::vector<std::vector<std::byte>> data_;
  std::vector<Piece> pieces_;
};

// Memory of its own with a copy of these bytes: Part::Where::kOwned.
Part owned_part(std::span<const std::byte> bytes);

}  // namespace convoy::transport
