#include "rpc/recording.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "convoy/detail/rpc_values.h"
#include "rpc/session_impl.h"

namespace convoy::rpc::detail {
namespace {

constinit std::atomic<MakeRecordings> recordings_maker{nullptr};

thread_local bool recorder_told = false;
// Used only where the flag is set: without contexts no thread has one.
std::shared_ptr<Recorder>& recorder_here() {
  thread_local std::shared_ptr<Recorder> here;
  return here;
}

}  // namespace

bool set_recordings(MakeRecordings make) {
  recordings_maker.store(make);
  return true;
}

std::unique_ptr<Recordings> make_recordings(SessionImpl& session) {
  const MakeRecordings make = recordings_maker.load();
  return make ? make(session) : nullptr;
}

RecorderHere recorder_state() {
  return recorder_told ? RecorderHere{true, recorder_here()} : RecorderHere{};
}

std::shared_ptr<Recorder> current_recorder() {
  if (recorder_told) return recorder_here();
  agent::Request* const request = agent::Request::current();
  if (!request || !request->attached()) return nullptr;
  return static_cast<AttachedRecorder*>(request->attached().get())->recorder;
}

RecorderScope::RecorderScope(RecorderHere state) {
  before_.told = std::exchange(recorder_told, state.told);
  if (before_.told || state.told) {
    before_.recorder = std::exchange(recorder_here(), std::move(state.recorder));
  }
}

RecorderScope::~RecorderScope() {
  const bool told = std::exchange(recorder_told, before_.told);
  if (told || before_.told) recorder_here() = std::move(before_.recorder);
}

bool tell_resumed() noexcept {
  const auto recorder = current_recorder();
  if (recorder) recorder->resumes();
  return recorder != nullptr;
}

void Recorded::record(const std::shared_ptr<Recorder>& recorder, std::uint32_t worker,
                      const Body& body, std::string_view function, bool reply) {
  bytes_.resize(sizeof trailer_);
  if (!recorder->sends(worker, body.tensors->with_grad(), function, reply, trailer_, bytes_)) {
    bytes_.clear();
    return;
  }
  std::memcpy(bytes_.data(), &trailer_, sizeof trailer_);
  recorder_ = recorder;
}

Recorded::Recorded(const SessionImpl& session, std::uint32_t worker, const Body& body,
                   std::string_view function) {
  const auto recorder = current_recorder();
  if (!recorder || recorder->session() != &session) return;
  record(recorder, worker, body, function, /*reply=*/false);
}

Recorded::Recorded(agent::Request& request, const Body& body) {
  if (!request.attached() || body.tensors->with_grad().empty()) return;
  const auto& attached = *static_cast<AttachedRecorder*>(request.attached().get());
  record(attached.recorder, attached.caller, body, attached.function, /*reply=*/true);
}

RecordTrailer decode_trailer(std::span<const std::byte>& bytes, std::size_t tensors) {
  RecordTrailer trailer;
  if (bytes.size() >= sizeof trailer && bytes.size() <= sizeof trailer + kMostTrailerTail) {
    std::memcpy(&trailer, bytes.data(), sizeof trailer);
    bytes = bytes.subspan(sizeof trailer);
    if (trailer.magic == RecordTrailer::kMagic && trailer.tensors == tensors &&
        (trailer.message == 0) == (tensors == 0)) {
      return trailer;
    }
  }
  fail(ErrorKind::kInvalidArgument, "malformed value of a call: there is more behind it");
}

}  // namespace convoy::rpc::detail
