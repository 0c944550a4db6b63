// tests/e2e/calls.h: calls of a test to its daemon.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/e2e/client.h"

namespace fp8kvd::testing {

inline std::vector<v1::Handle> Create(v1::DecodeAttention::Stub* stub, int count,
                                      const std::string& model = "m") {
  grpc::ClientContext context;
  v1::CreateSequencesResponse response;
  const grpc::Status status =
      stub->CreateSequences(&context, CreateRequest(count, 0, model), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return {response.handles().begin(), response.handles().end()};
}

inline grpc::Status Decode(v1::DecodeAttention::Stub* stub, const v1::DecodeRequest& request,
                           v1::DecodeResponse* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return stub->Decode(&context, request, response);
}

}  // namespace fp8kvd::testing
