#include "bench/rpc_echo.h"

#include <unistd.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/grpcpp.h"

#include "fp8kvd/v1/kv.grpc.pb.h"
#include "server/malloc_options.h"

namespace fp8kvd::bench {
namespace {

using grpc::ByteBuffer;

// All methods raw, as the daemon has them: no synchronous ones, whose threads would poll too.
class Service final : public v1::DecodeAttention::Service {
 public:
  Service() {
    for (int i = 0; i < kMethods; ++i) MarkMethodRaw(i);
  }
  template <typename... Args>
  void RequestAppend(Args... args) {
    RequestAsyncClientStreaming(2, args...);
  }
  template <typename... Args>
  void RequestDecode(Args... args) {
    RequestAsyncUnary(3, args...);
  }
  template <typename... Args>
  void RequestDecodeStream(Args... args) {
    RequestAsyncBidiStreaming(4, args...);
  }

 private:
  static constexpr int kMethods = 14;  // in the order of the proto
};

class Tag {
 public:
  virtual ~Tag() = default;
  virtual void Ready(bool ok) = 0;
};

// The reply to a decode of 64/8 heads, d128: q is 16 KiB of an item's 20 KiB, and so is out.
ByteBuffer ReplyTo(const ByteBuffer& message) {
  static auto* const replies = new std::map<size_t, ByteBuffer>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  ByteBuffer& reply = (*replies)[message.Length() / (20 << 10)];
  if (!reply.Valid()) {
    const grpc::Slice slice(std::string((message.Length() / (20 << 10)) * (16 << 10) + 16, 'o'));
    reply = ByteBuffer(&slice, 1);
  }
  return reply;
}

struct Queue {
  Service* service;
  grpc::ServerCompletionQueue* queue;
};

class Unary final : public Tag {
 public:
  explicit Unary(Queue queue) : queue_(queue), writer_(&context_) {
    queue_.service->RequestDecode(&context_, &message_, &writer_, queue_.queue, queue_.queue, this);
  }
  void Ready(bool ok) override {
    if (!ok || finishing_) {
      delete this;
      return;
    }
    new Unary(queue_);
    finishing_ = true;
    writer_.Finish(ReplyTo(message_), grpc::Status::OK, this);
  }

 private:
  const Queue queue_;
  grpc::ServerContext context_;
  ByteBuffer message_;
  grpc::ServerAsyncResponseWriter<ByteBuffer> writer_;
  bool finishing_ = false;
};

// Reads on while it writes: replies wait in a queue.
class Stream {
 public:
  explicit Stream(Queue queue)
      : queue_(queue),
        stream_(&context_),
        arrived_(this, &Stream::Arrived),
        read_(this, &Stream::Read),
        written_(this, &Stream::Written),
        finished_(this, &Stream::Finished) {
    queue_.service->RequestDecodeStream(&context_, &stream_, queue_.queue, queue_.queue, &arrived_);
  }

 private:
  class Event final : public Tag {
   public:
    Event(Stream* stream, void (Stream::*member)(bool)) : stream_(stream), member_(member) {}
    void Ready(bool ok) override { (stream_->*member_)(ok); }

   private:
    Stream* const stream_;
    void (Stream::*const member_)(bool);
  };

  void Arrived(bool ok) {
    if (!ok) {
      delete this;
      return;
    }
    new Stream(queue_);
    stream_.Read(&message_, &read_);
  }
  void Read(bool ok) {
    if (ok) {
      replies_.push_back(ReplyTo(message_));
      stream_.Read(&message_, &read_);
    } else {
      read_all_ = true;
    }
    Go();
  }
  void Written(bool) {
    replies_.pop_front();
    writing_ = false;
    Go();
  }
  void Go() {
    if (writing_) return;
    if (!replies_.empty()) {
      writing_ = true;
      stream_.Write(replies_.front(), &written_);
    } else if (read_all_) {
      stream_.Finish(grpc::Status::OK, &finished_);
    }
  }
  void Finished(bool) { delete this; }

  const Queue queue_;
  grpc::ServerContext context_;
  grpc::ServerAsyncReaderWriter<ByteBuffer, ByteBuffer> stream_;
  ByteBuffer message_;
  std::deque<ByteBuffer> replies_;
  bool writing_ = false;
  bool read_all_ = false;
  Event arrived_;
  Event read_;
  Event written_;
  Event finished_;
};

class Upload final : public Tag {
 public:
  explicit Upload(Queue queue) : queue_(queue), reader_(&context_) {
    queue_.service->RequestAppend(&context_, &reader_, queue_.queue, queue_.queue, this);
  }
  void Ready(bool ok) override {
    if (finishing_ || (!ok && !arrived_)) {
      delete this;
    } else if (!arrived_) {
      arrived_ = true;
      new Upload(queue_);
      reader_.Read(&message_, this);
    } else if (ok) {
      reader_.Read(&message_, this);
    } else {
      finishing_ = true;
      const grpc::Slice slice(std::string(16, 'o'));
      reader_.Finish(ByteBuffer(&slice, 1), grpc::Status::OK, this);
    }
  }

 private:
  const Queue queue_;
  grpc::ServerContext context_;
  ByteBuffer message_;
  grpc::ServerAsyncReader<ByteBuffer, ByteBuffer> reader_;
  bool arrived_ = false;
  bool finishing_ = false;
};

}  // namespace

void ServeEcho(int pollers, const std::function<void(int port)>& until_stopped) {
  TuneMalloc();
  Service service;
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(64 << 20);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 2048);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  std::vector<std::unique_ptr<grpc::ServerCompletionQueue>> queues;
  queues.reserve(pollers);
  for (int i = 0; i < pollers; ++i) queues.push_back(builder.AddCompletionQueue());
  [[maybe_unused]] const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  std::vector<std::thread> threads;
  for (const auto& queue : queues) {
    for (int i = 0; i < 4; ++i) {
      new Unary({&service, queue.get()});
      new Stream({&service, queue.get()});
      new Upload({&service, queue.get()});
    }
    threads.emplace_back([raw = queue.get()] {
      void* tag = nullptr;
      bool ok = false;
      while (raw->Next(&tag, &ok)) static_cast<Tag*>(tag)->Ready(ok);
    });
  }
  until_stopped(port);
  _exit(0);  // the floor has no life after the measurement
}

}  // namespace fp8kvd::bench
