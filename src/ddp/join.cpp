#include "convoy/join.h"

#include "base/log.h"
#include "ddp/join_context.h"

namespace convoy {

std::optional<JoinStep> Joinable::notify_join_context() {
  const auto context = join_.lock();
  if (!context || !context->is_live()) return std::nullopt;
  return context->notify(*this);
}

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options) {
  if (!options.enable) return;
  context_ = std::make_shared<JoinContext>(std::move(joinables), options);
  context_->start();
}

Join::~Join() {
  if (!context_ || !context_->is_live()) return;
  log_warn("a Join ends without finish(): its group is aborted, so that nobody waits");
  context_->drop();
}

void Join::finish() {
  if (context_) context_->finish();
}

void Join::abandon(const std::string& why) noexcept {
  if (context_) context_->abandon(why);
}

}  // namespace convoy
