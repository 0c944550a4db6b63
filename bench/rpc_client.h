// bench/rpc_client.h: rpc_bench's client, the same code and the same bytes to either server.
#pragma once

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

#include "config/base/check.h"
#include "fp8kvd/v1/kv.grpc.pb.h"

namespace fp8kvd::bench {

using SteadyTime = std::chrono::steady_clock;

inline constexpr int kQHeads = 64;
inline constexpr int kKvHeads = 8;
inline constexpr int kHeadDim = 128;
inline constexpr int kChunkTokens = 256;  // 1 MiB of K and V
inline constexpr int64_t kChunkBytes = int64_t{kChunkTokens} * kKvHeads * kHeadDim * 2 * 2;

struct Target {
  const char* name;
  std::string address;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::DecodeAttention::Stub> stub;  // of the daemon: both get its handles
};

// A connection of its own, without a bound on replies.
inline std::shared_ptr<grpc::Channel> Dial(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

inline Target Connect(const char* name, const std::string& address) {
  auto channel = Dial(address);
  return {name, address, channel, v1::DecodeAttention::NewStub(channel)};
}

inline grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

inline std::vector<v1::Handle> Create(v1::DecodeAttention::Stub* daemon, int count) {
  grpc::ClientContext context;
  v1::CreateSequencesRequest request;
  request.set_count(count);
  v1::CreateSequencesResponse response;
  const grpc::Status status = daemon->CreateSequences(&context, request, &response);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.error_message().c_str());
  FP8KVD_CHECK(status.ok());
  return {response.handles().begin(), response.handles().end()};
}

inline void Free(v1::DecodeAttention::Stub* daemon, const std::vector<v1::Handle>& handles) {
  grpc::ClientContext context;
  v1::FreeSequencesRequest request;
  for (const v1::Handle& handle : handles) *request.add_handles() = handle;
  v1::FreeSequencesResponse response;
  FP8KVD_CHECK(daemon->FreeSequences(&context, request, &response).ok());
}

// Steps first .. first + count - 1 of the sequences, ready to send.
inline std::vector<grpc::ByteBuffer> Steps(const std::vector<v1::Handle>& handles, int count,
                                           int first = 0) {
  v1::DecodeRequest request;
  const size_t items = handles.size();
  request.set_q(std::string(items * kQHeads * kHeadDim * 2, '\x3F'));
  request.set_k(std::string(items * kKvHeads * kHeadDim * 2, '\x3E'));
  request.set_v(std::string(items * kKvHeads * kHeadDim * 2, '\x3D'));
  for (const v1::Handle& handle : handles) *request.add_handles() = handle;
  std::vector<grpc::ByteBuffer> steps;
  for (int step = 0; step < count; ++step) {
    request.clear_positions();
    for (size_t i = 0; i < items; ++i) request.add_positions(first + step);
    request.set_request_id(step + 1);
    steps.push_back(ToBytes(request));
  }
  return steps;
}

inline std::vector<grpc::ByteBuffer> Chunks(const v1::Handle& handle, int count) {
  v1::AppendRequest request;
  *request.mutable_handle() = handle;
  request.set_n(kChunkTokens);
  request.set_k(std::string(kChunkBytes / 2, '\x3F'));
  request.set_v(std::string(kChunkBytes / 2, '\x3E'));
  std::vector<grpc::ByteBuffer> chunks;
  for (int i = 0; i < count; ++i) {
    request.set_pos(int64_t{i} * kChunkTokens);
    chunks.push_back(ToBytes(request));
  }
  return chunks;
}

// One client thread with a completion queue of its own.
class Client {
 public:
  explicit Client(const Target& target) : stub_(target.channel) {}
  ~Client() {
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // One call after the other; latencies in microseconds are appended.
  void Unary(const std::vector<grpc::ByteBuffer>& messages, std::vector<double>* us) {
    for (const grpc::ByteBuffer& message : messages) {
      grpc::ClientContext context;
      grpc::ByteBuffer reply;
      grpc::Status status;
      const auto begin = SteadyTime::now();
      auto call = stub_.PrepareUnaryCall(&context, kDecode, message, &queue_);
      call->StartCall();
      call->Finish(&reply, &status, this);
      FP8KVD_CHECK(Next());
      us->push_back(std::chrono::duration<double, std::micro>(SteadyTime::now() - begin).count());
      FP8KVD_CHECK(status.ok());
    }
  }

  // All messages over one stream, at most `inflight` unanswered; messages per second.
  double Bidi(const std::vector<grpc::ByteBuffer>& messages, size_t inflight) {
    grpc::ClientContext context;
    auto stream = stub_.PrepareCall(&context, kDecodeStream, &queue_);
    stream->StartCall(this);
    FP8KVD_CHECK(Next());
    int write_tag = 0;
    int read_tag = 0;
    grpc::ByteBuffer reply;
    size_t sent = 0;
    size_t answered = 0;
    bool writing = false;
    const auto begin = SteadyTime::now();
    stream->Read(&reply, &read_tag);
    while (answered < messages.size()) {
      if (!writing && sent < messages.size() && sent - answered < inflight) {
        stream->Write(messages[sent], &write_tag);
        writing = true;
        ++sent;
      }
      void* tag = nullptr;
      bool ok = false;
      FP8KVD_CHECK(queue_.Next(&tag, &ok) && ok);
      if (tag == &write_tag) {
        writing = false;
      } else if (++answered < messages.size()) {
        stream->Read(&reply, &read_tag);
      }
    }
    const std::chrono::duration<double> elapsed = SteadyTime::now() - begin;
    if (writing) FP8KVD_CHECK(Next());
    stream->WritesDone(this);
    FP8KVD_CHECK(Next());
    grpc::Status status;
    stream->Finish(&status, this);
    FP8KVD_CHECK(Next() && status.ok());
    return static_cast<double>(messages.size()) / elapsed.count();
  }

  // Over one stream, each message after the reply to the one before; latencies are appended.
  void BidiOneByOne(const std::vector<grpc::ByteBuffer>& messages, std::vector<double>* us) {
    grpc::ClientContext context;
    auto stream = Open(&context);
    for (const grpc::ByteBuffer& message : messages) {
      grpc::ByteBuffer reply;
      const auto begin = SteadyTime::now();
      stream->Write(message, this);
      FP8KVD_CHECK(Next());
      stream->Read(&reply, this);
      FP8KVD_CHECK(Next());
      us->push_back(std::chrono::duration<double, std::micro>(SteadyTime::now() - begin).count());
    }
    Close(stream.get());
  }

  // Bytes of K and V per second.
  double Upload(const std::vector<grpc::ByteBuffer>& chunks) {
    grpc::ClientContext context;
    auto stream = stub_.PrepareCall(&context, kAppend, &queue_);
    stream->StartCall(this);
    FP8KVD_CHECK(Next());
    const auto begin = SteadyTime::now();
    for (const grpc::ByteBuffer& chunk : chunks) {
      stream->Write(chunk, this);
      FP8KVD_CHECK(Next());
    }
    stream->WritesDone(this);
    FP8KVD_CHECK(Next());
    grpc::ByteBuffer reply;
    stream->Read(&reply, this);
    FP8KVD_CHECK(Next());
    const std::chrono::duration<double> elapsed = SteadyTime::now() - begin;
    grpc::Status status;
    stream->Finish(&status, this);
    FP8KVD_CHECK(Next() && status.ok());
    return static_cast<double>(chunks.size()) * kChunkBytes / elapsed.count();
  }

  // Opens a stream that stays open.
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> Open(grpc::ClientContext* context) {
    auto stream = stub_.PrepareCall(context, kDecodeStream, &queue_);
    stream->StartCall(this);
    FP8KVD_CHECK(Next());
    return stream;
  }
  void Close(grpc::GenericClientAsyncReaderWriter* stream) {
    stream->WritesDone(this);
    FP8KVD_CHECK(Next());
    grpc::Status status;
    stream->Finish(&status, this);
    FP8KVD_CHECK(Next() && status.ok());
  }

 private:
  static constexpr char kDecode[] = "/fp8kvd.v1.DecodeAttention/Decode";
  static constexpr char kDecodeStream[] = "/fp8kvd.v1.DecodeAttention/DecodeStream";
  static constexpr char kAppend[] = "/fp8kvd.v1.DecodeAttention/Append";

  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
};

}  // namespace fp8kvd::bench
