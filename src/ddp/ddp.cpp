#include "convoy/ddp.h"

#include "ddp/ddp_core_impl.h"

namespace convoy {

DdpCore::DdpCore(std::shared_ptr<torch::nn::Module> module, ProcessGroup group,
                 const DdpOptions& options)
    : DdpCore(view_of(std::move(module)), std::move(group), options) {}
DdpCore::DdpCore(std::shared_ptr<DdpModule> module, ProcessGroup group, const DdpOptions& options)
    : impl_(std::make_unique<Impl>(std::move(module), std::move(group), options)) {}
DdpCore::~DdpCore() = default;
DdpCore::DdpCore(DdpCore&&) noexcept = default;
DdpCore& DdpCore::operator=(DdpCore&&) noexcept = default;

void DdpCore::before_forward() { impl_->before_forward(); }
void DdpCore::after_forward(const std::vector<at::Tensor*>& outputs) {
  impl_->after_forward(outputs);
}
void DdpCore::forward_failed() { impl_->forward_failed(); }
void DdpCore::forward_failed(const std::string& why) { impl_->forward_failed(why); }
void DdpCore::sync_buffers() { impl_->sync_buffers(); }
void DdpCore::set_buffer_hook(BufferHook hook, BufferSync when) {
  impl_->set_buffer_hook(std::move(hook), when);
}
std::unique_ptr<JoinHook> DdpCore::join_hook(const Joinable& self, const JoinOptions& options) {
  return impl_->join_hook(self, options);
}
Reducer& DdpCore::reducer() { return impl_->reducer(); }
const Reducer& DdpCore::reducer() const { return impl_->reducer(); }
const DdpOptions& DdpCore::options() const { return impl_->options(); }
void DdpCore::sync_gradients() { impl_->sync_gradients(); }
void DdpCore::update_process_group(ProcessGroup group) {
  impl_->update_process_group(std::move(group));
}
void DdpCore::set_reduce(GradReduce reduce) { impl_->set_reduce(reduce); }
void DdpCore::set_static_graph() { impl_->set_static_graph(); }
void DdpCore::set_sample_rate(std::uint64_t rate) { impl_->set_sample_rate(rate); }
DdpStats DdpCore::stats() const { return impl_->stats(); }
std::optional<at::ScalarType> DdpCore::input_type() const { return impl_->input_type(); }
void DdpCore::restore_parameters() const { impl_->restore_parameters(); }

}  // namespace convoy
