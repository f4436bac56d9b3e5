#pragma once

#include <memory>
#include <string>

#include "convoy/deadline.h"
#include "convoy/store.h"
#include "store/server.h"

namespace convoy {

// How ranks of one host meet that have nothing in common but the name of their job: rank 0 serves a
// store at a Unix socket whose path all of them can work out. The folder is the user's own (0700)
// and checked before it is trusted; the kernel tells the user of the other end besides.

// The folder, made if it is missing: convoy-<uid> in $XDG_RUNTIME_DIR or the temporary folder.
// Throws kInvalidArgument if somebody else owns it or may enter it.
std::string job_folder();

// A store, and its server where this process is that.
struct ServedStore {
  std::unique_ptr<StoreServer> server;  // unlink() when all have met
  std::shared_ptr<Store> store;
};

// Rank 0. Replaces a socket that a killed job left behind; kInvalidArgument if somebody listens
// there.
ServedStore serve_job_socket(const std::string& job);
// The others; waits for rank 0.
ServedStore connect_job_socket(const std::string& job, const Deadline& deadline);

// Names a job by the process that started its ranks here: the nearest one above this that looks
// like MPI's (ranks may be started by a shell), or the parent.
std::string job_of_parent();

}  // namespace convoy
