#include "client/cc/decode_stream.h"

#include <utility>

#include "client/cc/stream_impl.h"

namespace fp8kvd::client {

DecodeStream::DecodeStream(std::shared_ptr<Core> core, int32_t in_flight_max)
    : impl_(core->options().transport == Transport::kGrpc
                ? Impl::OverGrpc(std::move(core), in_flight_max)
                : Impl::OverSharedMemory(std::move(core), in_flight_max)) {}
DecodeStream::~DecodeStream() = default;

absl::Status DecodeStream::Send(uint64_t request_id, const DecodeArgs& args) {
  return impl_->Send(request_id, args);
}

absl::StatusOr<StreamReply> DecodeStream::Receive() { return impl_->Receive(); }

}  // namespace fp8kvd::client
