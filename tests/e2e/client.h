// tests/e2e/client.h: short ways to call a daemon from a test or from the process that it kills.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"

#include "fp8kvd/v1/kv.grpc.pb.h"

namespace fp8kvd::testing {

inline constexpr int kLayers = 2;
inline constexpr int kQRowBytes = 4 * 64 * 2;
inline constexpr int kKvRowBytes = 2 * 64 * 2;

inline std::unique_ptr<v1::DecodeAttention::Stub> Connect(const std::string& address) {
  return v1::DecodeAttention::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

inline std::string Repeat(uint16_t bf16, int64_t bytes) {
  std::string rows;
  rows.reserve(bytes);
  for (int64_t i = 0; i < bytes / 2; ++i) {
    rows += static_cast<char>(bf16 & 0xFF);
    rows += static_cast<char>(bf16 >> 8);
  }
  return rows;
}

inline v1::CreateSequencesRequest CreateRequest(int count, uint64_t ttl_ms,
                                                const std::string& model = "m") {
  v1::CreateSequencesRequest request;
  request.set_model(model);
  request.set_count(count);
  request.set_ttl_ms(ttl_ms);
  return request;
}

// n tokens of one layer whose V rows hold `value` throughout; K is the same everywhere, so
// attention is the mean of V.
inline v1::AppendRequest ChunkOf(const v1::Handle& handle, int layer, uint64_t pos, int n,
                                 uint16_t value, const std::string& model = "m") {
  v1::AppendRequest request;
  request.set_model(model);
  *request.mutable_handle() = handle;
  request.set_layer(layer);
  request.set_pos(pos);
  request.set_n(n);
  request.set_k(Repeat(0x3F80, int64_t{n} * kKvRowBytes));
  request.set_v(Repeat(value, int64_t{n} * kKvRowBytes));
  return request;
}

inline v1::DecodeRequest StepOf(const std::vector<v1::Handle>& handles, int layer, uint64_t pos,
                                uint16_t value, const std::string& model = "m") {
  v1::DecodeRequest request;
  request.set_model(model);
  request.set_layer(layer);
  for (const v1::Handle& handle : handles) {
    *request.add_handles() = handle;
    request.add_positions(pos);
  }
  const auto items = static_cast<int64_t>(handles.size());
  request.set_q(Repeat(0x3F80, items * kQRowBytes));
  request.set_k(Repeat(0x3F80, items * kKvRowBytes));
  request.set_v(Repeat(value, items * kKvRowBytes));
  return request;
}

}  // namespace fp8kvd::testing
