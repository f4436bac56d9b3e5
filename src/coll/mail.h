#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "coll/control.h"
#include "coll/messages.h"
#include "convoy/deadline.h"
#include "convoy/error.h"
#include "transport/shm/fabric.h"

namespace convoy::coll {

class Engine;

// The point-to-point messages of one rank of a group. Every ordered pair of ranks has a ring of
// letters in shared memory. Small messages travel in the letter or beside it, and are done for the
// sender when they are written. Of large ones the letter tells the place: the receiver copies from
// there and answers. Private data comes through a bounce block that the sender fills while the
// receiver empties it.
//
// Letters are always taken out of the ring, wanted or not, so no order of sends and receives can
// block another. All methods may be called from any thread; whoever waits moves everybody's
// messages along, and a thread does so for asynchronous ones.
class Mail final : public Messages {
 public:
  // `keep` gives what the thread must keep alive: the engine, and this.
  Mail(Engine& engine, std::function<std::shared_ptr<void>()> keep);
  ~Mail() override;
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  bool try_send(const Transfer& send) override;
  bool try_receive(Transfer& receive) override;
  void run(std::span<Transfer> transfers) override;
  void start(std::span<const std::shared_ptr<Transfer>> transfers) override;
  bool wait(const Transfer& transfer, const Deadline& deadline) override;
  bool is_done(const Transfer& transfer) override;
  void settle() override;
  void close() override;

 private:
  using Lock = Callbacks::Lock;
  // A letter out of the ring.
  struct Received {
    std::uint64_t number;
    Letter::Header header;
    std::array<std::byte, Letter::kBodyBytes> body;
    std::vector<std::byte> data;  // of a payload that nobody was waiting for
  };
  // A large message that is being copied.
  struct Arriving {
    Transfer* receive;
    Received letter;
    std::byte* from;  // nullptr: its memory is still on its way here
  };
  struct Peer {
    std::uint64_t written = 0;                      // letters to it
    std::uint64_t seen_taken = 0;                   // of those, taken out when last looked at
    std::uint64_t taken = 0;                        // letters from it
    std::deque<Transfer*> outgoing;                 // sends that are not in the ring yet
    std::deque<Received> answers;                   // likewise
    std::map<std::uint64_t, Transfer*> unanswered;  // large sends, by their letter's number
    std::deque<Received> unexpected;
    std::list<Arriving> arriving;
  };

  void post(Transfer& transfer);
  bool progress();
  void mark_used();
  bool take_letters(int rank);
  void took(int rank, std::uint64_t number);
  bool write_letters(int rank);
  bool fill_bounces(int rank);
  bool copy_arriving(int rank);
  std::byte* find_memory(int rank, const Received& letter) const;
  bool has_room(int rank);
  bool has_answers() const;  // that wait for room
  bool has_backlog() const;  // that, or sends, or memory that is on its way
  void write(int rank, const Letter::Header& header, std::span<const std::byte> body);
  void write_send(int rank, Transfer& send);
  void handle_answer(int rank, const Received& letter);
  void receive_letter(int rank, Received letter, const std::byte* payload);
  void deliver(Transfer& receive, int rank, Received letter, const std::byte* data);
  bool deliver_unexpected(Transfer& receive);
  void answer(int rank, const Received& letter, Letter::Kind kind, const Transfer& receive);
  void finish(Transfer& transfer, const std::exception_ptr& failure = nullptr);
  void release_bounce(Transfer& transfer);
  void ring(int rank) noexcept;

  void check_trouble();
  void fail_those_with(int rank, const std::exception_ptr& error);
  void fail_all(const std::exception_ptr& error);
  void break_group(ErrorKind kind, const std::string& cause);
  void check_deadlines();
  Deadline next_deadline() const;

  template <class Done>
  bool wait_for(Lock& lock, const Deadline& deadline, int spins, const Done& done);
  void start_worker();
  void work();
  std::string describe(const Transfer& transfer) const;
  std::exception_ptr error(const Transfer& transfer, ErrorKind kind, const std::string& text) const;

  Engine& engine_;
  const std::function<std::shared_ptr<void>()> keep_;
  const int rank_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable started_;
  // Guarded by mutex_:
  std::vector<Peer> peers_;
  std::list<Transfer*> pending_;   // all
  std::list<Transfer*> receives_;  // that wait for a message, in the order in which they were made
  std::size_t asynchronous_ = 0;   // of the pending ones
  Callbacks callbacks_;
  std::vector<shm::Block> spare_;  // bounce blocks
  std::size_t unexpected_bytes_ = 0;
  std::exception_ptr stopped_;  // why nothing is accepted any more
  int last_any_ = 0;            // whose unexpected messages were looked at last
  bool closing_ = false;
  std::thread worker_;
};

}  // namespace convoy::coll
