// What the server keeps of messages that were answered.
#include <malloc.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "server/rpc/tensor_jobs.h"
#include "tests/rpc/rig.h"
#include "tests/translate/catalog.h"

namespace fp8kvd::testing {
namespace {

// In use, by the client of this process too; 0 under a sanitizer's malloc.
int64_t HeapBytes() { return static_cast<int64_t>(mallinfo2().uordblks); }

TEST(Memory, OfARefusedMessagesItemsIsGivenBackThoughItsStreamStaysOpen) {
  using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;
  constexpr int kStreams = 100;
  ServerRig rig;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<Stream>> streams;
  v1::DecodeResponse reply;
  for (int i = 0; i < kStreams; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(rig.stub->DecodeStream(contexts.back().get()));
    ASSERT_TRUE(streams.back()->Write(v1::DecodeRequest()));
    ASSERT_TRUE(streams.back()->Read(&reply));
  }
  v1::DecodeRequest many;  // five bytes an item, whose rows are missing
  many.set_model("m");
  for (int i = 0; i < 1024; ++i) {
    many.add_handles();
    many.add_positions(0);
    many.add_q_lens(64);
  }
  const int64_t before = HeapBytes();
  for (const std::unique_ptr<Stream>& stream : streams) {
    ASSERT_TRUE(stream->Write(many));
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.error().code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_LT(HeapBytes() - before, kStreams * 16 * 1024);
  for (const std::unique_ptr<Stream>& stream : streams) {
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

// Known fault: tiny messages amplify memory. Who sends them chooses their pieces.
TEST(Memory, OfARefusedChunksPiecesIsGivenBack) {
  v1::AppendRequest chunk;
  chunk.set_model("plain");
  chunk.set_layer(99);
  chunk.mutable_handle()->set_seq_id(3);
  chunk.set_k(std::string(2000, 'k'));
  const std::string bytes = chunk.SerializeAsString();
  std::vector<translate::Piece> pieces;
  for (const char& byte : bytes) pieces.emplace_back(reinterpret_cast<const uint8_t*>(&byte), 1);
  const translate::Catalog catalog = translate::SmallCatalog();
  const int64_t before = HeapBytes();
  translate::AppendMessage message;
  EXPECT_TRUE(absl::IsInvalidArgument(message.Check(catalog, pieces)));
  EXPECT_LT(HeapBytes() - before, 4096) << "of " << pieces.size() * sizeof(translate::Piece);
}

// Slices are as small as their sender likes, and each takes more than it holds.
TEST(Memory, OfAMessageInTinySlicesIsGivenBack) {
  const int64_t before = HeapBytes();
  rpc::MessageSlices slices;
  {
    const std::vector<grpc::Slice> tiny(50'000, grpc::Slice(std::string(32, 'x')));
    grpc::ByteBuffer message(tiny.data(), tiny.size());
    ASSERT_TRUE(slices.Take(&message));
  }
  EXPECT_EQ(slices.pieces().size(), 50'000U);
  slices.Drop();
  EXPECT_LT(HeapBytes() - before, 64 * 1024);
}

TEST(Memory, OfMeasuredRowsIsGivenBack) {
  constexpr int kCalls = 8;
  constexpr int64_t kRowsBytes = int64_t{2} << 20;
  ServerRigOptions options;
  options.server.message_bytes_max = 16 << 20;
  ServerRig rig(options);
  const auto measure = [&rig](int64_t bytes) {
    v1::MeasureKvErrorRequest request;
    request.set_kv_heads(1);
    request.set_head_dim(64);
    request.set_k(std::string(bytes, '\x3F'));
    request.set_v(std::string(bytes, '\x3F'));
    grpc::ClientContext context;
    v1::MeasureKvErrorResponse response;
    EXPECT_TRUE(rig.stub->MeasureKvError(&context, request, &response).ok());
  };
  const auto measure_at_once = [&](int64_t bytes) {
    std::vector<std::thread> callers;
    for (int i = 0; i < kCalls; ++i) callers.emplace_back([&] { measure(bytes); });
    for (std::thread& caller : callers) caller.join();
    EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() == 0; }));
  };
  measure(kRowsBytes);  // what the connection itself grows by
  const int64_t before = HeapBytes();
  measure_at_once(kRowsBytes);
  EXPECT_LT(HeapBytes() - before, kCalls * kRowsBytes);  // half of what they sent
}

}  // namespace
}  // namespace fp8kvd::testing
