#pragma once

namespace convoy {

// A forked child of a rank must not keep the rank's sockets alive: its peers would not see the
// rank's death. Every socket of ours is registered here; in a child made by fork() a pthread_atfork
// handler puts /dev/null in the place of each, so the numbers stay valid (their owners close them
// as always) and the sockets do not. Descriptors are close-on-exec besides.
//
// register/unregister: thread-safe, lock-free, and must bracket the life of the descriptor.
void register_fork_closed(int fd);
void unregister_fork_closed(int fd) noexcept;

// Counts forks that this process is the child of: 0 in a process that was executed. State made
// before a fork (threads, connections) is not usable in the child; compare generations to notice.
unsigned fork_generation() noexcept;

}  // namespace convoy
