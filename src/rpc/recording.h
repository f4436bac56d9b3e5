#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "agent/request.h"

// Where distributed autograd meets calls: the layer above implements these interfaces, calls use
// them. A message that is sent in a context has a trailer behind its values, and the tensors in it
// that require grad get a history on the other side.
namespace convoy::rpc::detail {

class SessionImpl;
struct Body;

// Behind the values of a message. docs/internals/wire.md has the bytes.
struct RecordTrailer {
  static constexpr std::uint32_t kMagic = 0x47415643;  // "CVAG"

  std::uint32_t magic = kMagic;
  std::uint32_t tensors = 0;  // that require grad, in the order of the message
  std::uint64_t context = 0;
  std::uint64_t message = 0;  // what the sender calls it; 0: there are no such tensors
};
static_assert(sizeof(RecordTrailer) == 24);

// What the layer above has behind it.
inline constexpr std::size_t kMostTrailerTail = 2048;
using TrailerTail = c10::SmallVector<std::byte, 104>;

// A context, as calls see it. Thread-safe.
class Recorder {
 public:
  virtual ~Recorder() = default;

  // A message to that worker is about to go; these tensors of it require grad. False: it is not
  // recorded.
  virtual bool sends(std::uint32_t worker, const std::vector<at::Tensor>& tensors,
                     std::string_view function, bool reply, RecordTrailer& trailer,
                     TrailerTail& tail) = 0;
  // It did not go.
  virtual void forget(const RecordTrailer& trailer) noexcept = 0;
  // What it records goes on, on this thread: a continuation, or a coroutine.
  virtual void resumes() noexcept = 0;
  // Whose calls it records: the address of a SessionImpl.
  virtual const void* session() const noexcept = 0;
};

// The contexts of a session. Thread-safe.
class Recordings {
 public:
  virtual ~Recordings() = default;

  // A message came: gives its tensors a history. What records for its handler, or for nobody if it
  // is a reply; nullptr also if the context was released, or cannot be: the tensors are left as
  // they are then. kInvalidArgument: the tail is none.
  virtual std::shared_ptr<Recorder> came(std::uint32_t from, const RecordTrailer& trailer,
                                         std::span<const std::byte> tail,
                                         const std::vector<at::Tensor>& tensors,
                                         std::string_view function, bool reply) = 0;
};

// Set by src/autograd before main().
using MakeRecordings = std::unique_ptr<Recordings> (*)(SessionImpl& session);
bool set_recordings(MakeRecordings make);
std::unique_ptr<Recordings> make_recordings(SessionImpl& session);

// --- The context of a thread ------------------------------------------------------------------

// What a thread was told by a RecorderScope; otherwise its calls go with the request whose handler
// it runs.
struct RecorderHere {
  bool told = false;
  std::shared_ptr<Recorder> recorder = nullptr;  // told, and nullptr: calls are not recorded
};
RecorderHere recorder_state();
std::shared_ptr<Recorder> current_recorder();
// This thread goes on with what another one began, or with what it was doing before. False: that is
// not recorded.
bool tell_resumed() noexcept;

class RecorderScope {
 public:
  explicit RecorderScope(std::shared_ptr<Recorder> recorder)
      : RecorderScope(RecorderHere{true, std::move(recorder)}) {}
  explicit RecorderScope(RecorderHere state);
  RecorderScope(const RecorderScope&) = delete;
  RecorderScope& operator=(const RecorderScope&) = delete;
  ~RecorderScope();

 private:
  RecorderHere before_;
};

// --- Messages ---------------------------------------------------------------------------------

// What is written behind the values of a message, if anything.
class Recorded {
 public:
  Recorded() = default;
  // A call that this thread makes.
  Recorded(const SessionImpl& session, std::uint32_t worker, const Body& body,
           std::string_view function);
  // A reply.
  Recorded(agent::Request& request, const Body& body);

  std::span<const std::byte> bytes() const { return {bytes_.data(), bytes_.size()}; }
  void forget() const noexcept {
    if (recorder_) recorder_->forget(trailer_);
  }

 private:
  void record(const std::shared_ptr<Recorder>& recorder, std::uint32_t worker, const Body& body,
              std::string_view function, bool reply);

  std::shared_ptr<Recorder> recorder_;
  RecordTrailer trailer_;
  TrailerTail bytes_;
};

// What a request has, whose message had a trailer.
struct AttachedRecorder {
  std::shared_ptr<Recorder> recorder;
  std::uint32_t caller = 0;
  std::string_view function = {};  // lives as long as the process
};

// kInvalidArgument for what is no trailer of so many tensors. The rest is its tail.
RecordTrailer decode_trailer(std::span<const std::byte>& bytes, std::size_t tensors);

}  // namespace convoy::rpc::detail
