// The cases of letters.h over ZeroMQ's ipc://, two processes: one round, as a line of JSON.
#include <unistd.h>
#include <zmq.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "letters.h"
#include "os/process.h"

namespace bench {
namespace {

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "bench_zmq: %s: %s\n", what, zmq_strerror(zmq_errno()));
  std::exit(1);
}

class ZmqPipe {
 public:
  ZmqPipe(const std::string& address, bool binds) : context_(zmq_ctx_new()) {
    socket_ = zmq_socket(context_, ZMQ_PAIR);
    const int none = 0;
    zmq_setsockopt(socket_, ZMQ_SNDHWM, &none, sizeof none);
    zmq_setsockopt(socket_, ZMQ_RCVHWM, &none, sizeof none);
    const int done =
        binds ? zmq_bind(socket_, address.c_str()) : zmq_connect(socket_, address.c_str());
    if (done != 0) die(address.c_str());
  }
  ~ZmqPipe() {
    zmq_close(socket_);
    zmq_ctx_term(context_);
  }
  ZmqPipe(const ZmqPipe&) = delete;
  ZmqPipe& operator=(const ZmqPipe&) = delete;

  void send() {
    const std::uint64_t letter = 0;
    if (zmq_send(socket_, &letter, kLetterBytes, 0) < 0) die("send");
  }
  void send_quit() {
    if (zmq_send(socket_, "q", 1, 0) < 0) die("send");
  }
  void receive() { static_cast<void>(take()); }
  void send_large() {
    if (large_.empty()) large_.assign(kLargeBytes, 'x');
    if (zmq_send(socket_, large_.data(), large_.size(), 0) < 0) die("send");
  }
  std::size_t take() {
    zmq_msg_t message;
    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, socket_, 0) < 0) die("receive");
    const std::size_t bytes = zmq_msg_size(&message);
    zmq_msg_close(&message);
    return bytes;
  }

 private:
  void* const context_;
  void* socket_;
  std::string large_;
};

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  if (argc > 1) {
    ZmqPipe pipe(argv[1], false);
    while (pipe.take() != 1) pipe.send();
    return 0;
  }
  std::string folder = (std::getenv("TMPDIR") ? std::string(std::getenv("TMPDIR")) : "/tmp") +
                       "/convoy-bench-zmq.XXXXXX";
  if (!::mkdtemp(folder.data())) return 1;
  const std::string path = folder + "/socket";
  {
    ZmqPipe pipe("ipc://" + path, true);
    auto child = convoy::ChildProcess::spawn({.arguments = {"/proc/self/exe", "ipc://" + path}});
    pipe.send(), pipe.receive();
    for (int i = 0; i < 2; ++i) pipe.send_large(), pipe.receive();
    print_medians(letter_cases(pipe));
    pipe.send_quit();
    child.wait(convoy::Deadline::after(std::chrono::minutes(1)));
  }
  ::unlink(path.c_str());
  ::rmdir(folder.c_str());
  return 0;
}
