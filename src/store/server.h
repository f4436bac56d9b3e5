#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "convoy/store.h"

namespace convoy {

// What one server holds at most. Beyond a limit a request gets a kResource answer, and a connection
// is refused; nothing that is there is lost.
struct StoreLimits {
  std::size_t key_bytes = 4096;
  std::size_t value_bytes = std::size_t{64} << 20;
  // Keys and values together. As much again is allowed for waiting requests, and for requests that
  // have come in part together with replies that have not been fetched.
  std::size_t total_bytes = std::size_t{1} << 30;
  std::size_t keys = std::size_t{1} << 20;
  std::size_t clients = 4096;
  std::size_t waiting_per_client = 1024;
  std::size_t keys_per_request = 16384;
};

// Serves a store over Unix sockets from a thread of its own. Bytes that are no request close the
// connection they came on and nothing else. Methods may be called from any thread.
class StoreServer {
 public:
  explicit StoreServer(const StoreLimits& limits = {});
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  // Ends all connections: clients get kPeerLost.
  ~StoreServer();

  // A connected client end, close-on-exec; a child inherits it (SpawnOptions::inherited) and finds
  // it by store_environment(). Nothing has a name that could be left behind.
  UniqueFd connect();
  // Also listens at folder/name (folder 0700, socket 0600, only this user's processes are
  // accepted). Returns the path. One path at a time.
  std::string listen(const std::string& folder, const std::string& name);
  // Stops listening and removes that path, once everybody has met; connections stay.
  void unlink();

  // What a client's append() does, by whoever serves the store; if the store is full, nothing.
  void append(const std::string& key, const std::string& value);

  struct Stats {
    std::size_t clients = 0;
    std::size_t keys = 0;
    std::size_t bytes = 0;     // of keys and values
    std::size_t waiting = 0;   // requests
    std::size_t buffered = 0;  // bytes of requests that have come in part and of unsent replies
    std::size_t rejected = 0;  // connections closed for garbage, wrong user or too many clients
  };
  Stats stats();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Environment variable that tells a rank which inherited descriptor is its store connection.
inline constexpr const char* kStoreFdVariable = "CONVOY_STORE_FD";
// "CONVOY_STORE_FD=7:123456": number and inode, so that a process to which the variable came
// without the descriptor (a grandchild) does not take another socket for it.
std::string store_environment(int fd);

}  // namespace convoy
