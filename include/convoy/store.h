#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/deadline.h"

namespace convoy {

// The key-value store through which the processes of a job find each other. Keys and values are
// bytes. Thread-safe: a call that waits does not block calls of other threads on the same object.
//
// All methods throw Error: kTimeout at the deadline (the text names the missing keys), kPeerLost if
// the server is gone, kResource if a limit of the server is reached (nothing was changed),
// kInvalidArgument for invalid arguments, kUnsupported in a forked child of the process that made
// the object. Methods without a Deadline wait for the server's answer only, at most timeout(). A
// call that need not wait succeeds even if its deadline has passed.
class Store {
 public:
  // A value and the number of its last change. The store numbers all changes, so a key that is
  // erased and set again never has an old number.
  struct Versioned {
    std::optional<std::string> value = std::nullopt;  // nullopt: the key does not exist
    std::uint64_t version = 0;                        // 0: the key does not exist
  };

  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

  virtual ~Store() = default;

  virtual void set(const std::string& key, std::string_view value) = 0;
  // Waits until the key exists.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  // Waits until all keys exist.
  virtual void wait(std::span<const std::string> keys, const Deadline& deadline) = 0;
  // True if all keys exist.
  virtual bool check(std::span<const std::string> keys) = 0;
  // Adds to a decimal number (0 if the key is missing) and returns the sum. Throws kInvalidArgument
  // if the value is not a number.
  virtual std::int64_t add(const std::string& key, std::int64_t delta) = 0;
  // Appends to the value (empty if the key is missing).
  virtual void append(const std::string& key, std::string_view value) = 0;
  // Sets the key to `desired` if it holds `expected`, or if it is missing and `expected` is empty.
  // Returns the value afterwards; if the key is still missing, returns `expected`.
  virtual std::string compare_set(const std::string& key, std::string_view expected,
                                  std::string_view desired) = 0;
  // True if the key existed.
  virtual bool erase(const std::string& key) = 0;
  // The existing keys that begin with `prefix`, sorted.
  virtual std::vector<std::string> keys(const std::string& prefix) = 0;
  // Waits until the key's version differs from `since` (0: until the key exists). Returns value and
  // version. A loop of watches always sees the last state, but may skip states in between.
  virtual Versioned watch(const std::string& key, std::uint64_t since,
                          const Deadline& deadline) = 0;

  // How long a method without a Deadline waits for the server.
  virtual std::chrono::milliseconds timeout() const = 0;

  // get() within timeout().
  std::string get(const std::string& key) { return get(key, Deadline::after(timeout())); }
  // Blocks until `count` callers (this one included) have called barrier() with this key. A key can
  // be used once; it makes the keys <key>/count, <key>/arrived and <key>/open. Throws
  // kInvalidArgument for callers beyond `count`, and for all callers if their counts differ. If one
  // caller's deadline passes, all callers get kTimeout, also those that come later: none passes
  // alone.
  void barrier(const std::string& key, int count, const Deadline& deadline);
};

// A store inside this process, for ranks that are threads, and for tests.
std::shared_ptr<Store> make_local_store();

// The same store with a name space: each key gets `prefix` + "/" in front.
std::shared_ptr<Store> with_prefix(std::shared_ptr<Store> store, const std::string& prefix);

// The store that `convoy run` serves to this rank, over an inherited connection. Every call returns
// the same object; nullptr in a process that `convoy run` did not start. Throws kPeerLost if the
// process has a rank's environment but not its connection (a child of a rank), kInvalidArgument
// while another process uses the connection. Thread-safe.
std::shared_ptr<Store> launcher_store();

// Connects to a server on a Unix socket of this user. Blocks until the deadline at most.
std::shared_ptr<Store> connect_store(const std::string& socket_path, const Deadline& deadline);

}  // namespace convoy
