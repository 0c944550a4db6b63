// tests/rpc/bad_calls.h: requests that are right but for what a test spoils, and what a refusal
// must look like.
#pragma once

#include <cstring>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/rpc/world.h"

namespace fp8kvd::testing {

inline void ExpectRefusal(int code, const std::string& message, int wanted_code,
                          const std::string& wanted_text) {
  EXPECT_EQ(code, wanted_code) << message;
  EXPECT_THAT(message, ::testing::HasSubstr(wanted_text));
  const size_t advice = message.rfind("; ");
  EXPECT_TRUE(advice != std::string::npos && advice + 5 < message.size())
      << "says nothing about what to do: " << message;
}

inline void SetBf16(std::string* rows, int64_t index, uint16_t value) {
  std::memcpy(rows->data() + index * 2, &value, 2);
}

struct BadCall {
  const char* name;
  std::function<grpc::Status(World&, grpc::ClientContext*)> send;
  grpc::StatusCode code;
  const char* text;
};
class BadCalls : public ::testing::TestWithParam<BadCall> {};  // bad_requests_test.cc has its test

using Stub = v1::DecodeAttention::Stub;
inline constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;

template <typename Spoil>
auto Decode(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::DecodeRequest request = world.rig.Step({world.good[0], world.bad}, 10, {71, 72});
    spoil(&request);
    v1::DecodeResponse response;
    return world.rig.stub->Decode(context, request, &response);
  };
}

template <typename Spoil>
auto Append(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext*) {
    v1::AppendRequest request = world.rig.Chunk(world.bad, 10, Ids(4, 2000), 0);
    spoil(&request);
    return world.rig.Append({request});
  };
}

template <typename Spoil>
auto Create(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::CreateSequencesRequest request;
    request.set_model("m");
    spoil(&request);
    v1::CreateSequencesResponse response;
    return world.rig.stub->CreateSequences(context, request, &response);
  };
}

template <typename Spoil>
auto Fork(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::ForkSequencesRequest request;
    *request.mutable_parent() = world.good[0];
    spoil(&request);
    v1::ForkSequencesResponse response;
    return world.rig.stub->ForkSequences(context, request, &response);
  };
}

template <typename Spoil>
auto Truncate(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::TruncateSequencesRequest request;
    *request.add_handles() = world.good[0];
    request.add_seq_lens(3);
    spoil(&request);
    v1::TruncateSequencesResponse response;
    return world.rig.stub->TruncateSequences(context, request, &response);
  };
}

template <typename Spoil>
auto Plan(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::PlanPrecisionRequest request;
    request.set_model("m");
    spoil(&request);
    v1::PlanPrecisionResponse response;
    return world.rig.stub->PlanPrecision(context, request, &response);
  };
}

template <typename Spoil>
auto Measure(Spoil spoil) {
  return [spoil](World& world, grpc::ClientContext* context) {
    v1::MeasureKvErrorRequest request;
    request.set_kv_heads(1);
    request.set_head_dim(64);
    request.set_k(std::string(128, '\x3F'));
    request.set_v(std::string(128, '\x3F'));
    spoil(&request);
    v1::MeasureKvErrorResponse response;
    return world.rig.stub->MeasureKvError(context, request, &response);
  };
}

template <typename Request, typename Response>
auto Handles(grpc::Status (v1::DecodeAttention::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
             int count) {
  return [method, count](World& world, grpc::ClientContext* context) {
    Request request;
    for (int i = 0; i < count; ++i) *request.add_handles() = world.good[0];
    Response response;
    return (world.rig.stub.get()->*method)(context, request, &response);
  };
}

inline std::string NameOf(const ::testing::TestParamInfo<BadCall>& bad) { return bad.param.name; }

}  // namespace fp8kvd::testing
