// The pipelined stream: order, bounds, and what happens when the connection breaks under it.
#include "client/cc/decode_stream.h"

#include <memory>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/client.h"
#include "tests/client/fake_server.h"

namespace fp8kvd::client {
namespace {

using testing::ElementsAre;

class Stream : public testing::Test {
 protected:
  void Open(int32_t in_flight_max) { stream_ = client_->OpenDecodeStream(in_flight_max).value(); }

  // Element 0 of q, and so of out, is the request's id.
  absl::Status Send(uint64_t id) {
    const std::vector<uint16_t> q = {static_cast<uint16_t>(id)};
    return stream_->Send(id, {.q = q});
  }

  std::vector<uint64_t> Receive(int count) {
    std::vector<uint64_t> ids;
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<StreamReply> reply = stream_->Receive();
      if (!reply.ok()) {
        ADD_FAILURE() << reply.status();
        break;
      }
      EXPECT_EQ(reply->reply.out_bf16,
                std::vector<uint16_t>{static_cast<uint16_t>(reply->request_id)});
      ids.push_back(reply->request_id);
    }
    return ids;
  }

  FakeServer server_;
  std::unique_ptr<Client> client_ = Client::Connect({.target = server_.target(),
                                                     .timeout_ms = 10'000,
                                                     .retries_max = 2,
                                                     .backoff_ms_min = 1,
                                                     .backoff_ms_max = 2})
                                        .value();
  std::unique_ptr<DecodeStream> stream_;
};

TEST_F(Stream, RepliesInAnyOrderKeepTheirRequest) {
  server_.replies_backwards = true;
  Open(8);
  for (uint64_t id = 0; id < 8; ++id) ASSERT_TRUE(Send(id).ok());
  EXPECT_THAT(Receive(8), ElementsAre(3, 2, 1, 0, 7, 6, 5, 4));
  EXPECT_EQ(server_.streams(), 1);
}

TEST_F(Stream, OneMoreThanTheBoundIsRefusedUntilAReplyIsTaken) {
  Open(2);
  ASSERT_TRUE(Send(1).ok());
  ASSERT_TRUE(Send(2).ok());
  EXPECT_EQ(Send(3).code(), absl::StatusCode::kResourceExhausted);
  Receive(1);
  EXPECT_TRUE(Send(3).ok());
  Receive(2);
}

TEST_F(Stream, AnIdInFlightIsRefused) {
  server_.replies_backwards = true;  // keeps the first unanswered
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  EXPECT_EQ(Send(1).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(Stream, ReceivingFromAnEmptyOneIsAnError) {
  Open(4);
  EXPECT_EQ(stream_->Receive().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(Stream, ABreakSendsEverythingUnansweredAgainInItsOrder) {
  server_.messages_until_break = 3;
  server_.replies_backwards = true;  // nothing is answered before the break
  Open(8);
  for (uint64_t id = 10; id < 18; ++id) ASSERT_TRUE(Send(id).ok());
  const std::vector<uint64_t> ids = Receive(8);
  EXPECT_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), 8U);
  EXPECT_EQ(server_.streams(), 2);
  const std::vector<uint64_t> heard = server_.stream_ids();
  ASSERT_EQ(heard.size(), 3U + 8U);
  EXPECT_THAT(std::vector<uint64_t>(heard.begin() + 3, heard.end()),
              ElementsAre(10, 11, 12, 13, 14, 15, 16, 17));
}

TEST_F(Stream, ABreakWhileSendingLosesAndRepeatsNothing) {
  server_.messages_until_break = 50;
  Open(4);
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < 200; ++id) {
    ASSERT_TRUE(Send(id).ok());
    for (const uint64_t got : Receive(1)) ids.push_back(got);
  }
  ASSERT_EQ(ids.size(), 200U);
  EXPECT_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), 200U);
  EXPECT_EQ(server_.streams(), 2);
}

TEST_F(Stream, EndsWithTheServersErrorWhenTheRetriesAreUsedUp) {
  server_.decode_stream_refuses = true;
  Open(4);
  ASSERT_TRUE(Send(1).ok());
  EXPECT_EQ(stream_->Receive().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_.streams(), 3);
  EXPECT_EQ(Send(2).code(), absl::StatusCode::kUnavailable);
}

TEST_F(Stream, MayBeDroppedWithRequestsUnanswered) {
  server_.replies_backwards = true;
  Open(8);
  ASSERT_TRUE(Send(1).ok());
  stream_.reset();  // returns
}

TEST_F(Stream, ABoundOfZeroIsRefused) {
  EXPECT_EQ(client_->OpenDecodeStream(0).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace fp8kvd::client
