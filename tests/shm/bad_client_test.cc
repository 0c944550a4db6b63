// What a client that lies, dies or rewrites its requests can do: to itself, and to nobody else.
#include <fcntl.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/shm/rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// A client that breaks the contract of shared_memory.h in one way.
struct Lie {
  const char* name;
  std::function<void(RawClient&, shm::Request)> tell;
  const char* reason;
};

void Jump(RawClient& client, uint32_t by) {
  client.SetRequestsTail(std::atomic_ref<uint32_t>(client.head().requests_tail.value).load() + by);
}

// Pushes the request with one field set to a lie.
template <typename Field>
std::function<void(RawClient&, shm::Request)> With(Field shm::Request::*field, uint64_t value) {
  return [field, value](RawClient& client, shm::Request request) {
    request.*field = static_cast<Field>(value);
    client.Push(request);
  };
}

constexpr uint64_t kDataBytes = 1 << 20;  // of a RawClient's session

const Lie kLies[] = {
    {"Kind", With(&shm::Request::kind, 7), "kind is 7"},
    {"HeadTooLong", With(&shm::Request::head_bytes, shm::kHeadBytesMax + 1), "head_bytes is"},
    {"HeadOutside", With(&shm::Request::head_at, kDataBytes), "head lies at"},
    {"QOutside", With(&shm::Request::q_at, kDataBytes - 1), "q lies at"},
    {"KOverflows", With(&shm::Request::k_at, ~uint64_t{7}), "k lies at"},
    {"VTooLong", With(&shm::Request::v_bytes, ~uint64_t{0}), "v lies at"},
    {"ReplyIntoNowhere", With(&shm::Request::reply_at, uint64_t{1} << 40), "reply lies at"},
    {"TailJumps", [](RawClient& client, const shm::Request&) { Jump(client, 100'000); },
     "requests_tail stands"},
    {"TailStepsBack", [](RawClient& client, const shm::Request&) { Jump(client, ~0U); },
     "requests_tail stands"},
    {"RepliesHeadJumps",
     [](RawClient& client, const shm::Request& request) {
       client.Set(client.head().replies_head, 55);
       client.Push(request);
     },
     "replies_head"},
};

class LyingClient : public ::testing::TestWithParam<Lie> {};

TEST_P(LyingClient, LosesItsSessionAndHurtsNobody) {
  ShmRig rig;
  const std::vector<v1::Handle> handles = rig->Create(2);
  RawClient other(*rig);
  std::vector<uint64_t> history;
  ASSERT_TRUE(rig.Steps(other, handles[0], 0, history));
  RawClient liar(*rig);
  ASSERT_EQ(liar.layout().data_bytes, kDataBytes);
  GetParam().tell(liar, liar.Place(rig->Step({handles[1]}, 0, {1})));
  const std::string farewell = liar.socket().HearFarewell();
  EXPECT_THAT(farewell, StartsWith("INVALID_ARGUMENT: "));
  EXPECT_THAT(farewell, HasSubstr(GetParam().reason));
  EXPECT_THAT(farewell, HasSubstr("the session ends, open another"));
  EXPECT_EQ(liar.socket().Hear(), "");  // and nothing more
  EXPECT_TRUE(Eventually([&] { return rig->shm->stats().sessions == 1; }));
  EXPECT_EQ(rig->shm->stats().ended_for_lies_total, 1U);
  EXPECT_TRUE(rig.Steps(other, handles[0], 1, history));
  RawClient again(*rig);  // may come again
  std::vector<uint64_t> none;
  EXPECT_TRUE(rig.Steps(again, handles[1], 0, none));
}

INSTANTIATE_TEST_SUITE_P(By, LyingClient, ::testing::ValuesIn(kLies),
                         [](const auto& lie) { return std::string(lie.param.name); });

TEST(LyingClients, MoreRequestsThanEntriesAreALie) {
  ShmRig rig;
  RawClient client(*rig);
  const v1::Handle handle = rig->Create(1)[0];
  const shm::Request request = client.Place(rig->Step({handle}, 0, {1}));
  // Replies are never taken, so each one keeps its entry.
  for (uint32_t i = 0; i < client.layout().entries; ++i) client.entry(i) = request;
  client.SetRequestsTail(client.layout().entries);
  std::atomic_ref<uint32_t> answered(client.head().replies_tail.value);
  EXPECT_TRUE(Eventually([&] { return answered.load() == client.layout().entries; }));
  client.Push(request);
  EXPECT_THAT(client.socket().HearFarewell(), HasSubstr("entries for all three"));
}

TEST(LyingClients, CannotChangeTheMemorysSizeOrSeals) {
  ShmRig rig;
  const RawClient client(*rig);
  const auto size = static_cast<off_t>(client.layout().memory_bytes);
  EXPECT_NE(ftruncate(client.memory_fd(), 0), 0);
  EXPECT_NE(ftruncate(client.memory_fd(), size + 4096), 0);
  EXPECT_NE(fcntl(client.memory_fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  EXPECT_EQ(lseek(client.memory_fd(), 0, SEEK_END), size);
}

TEST(LyingClients, PunchedHolesAreZeros) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  const auto size = static_cast<off_t>(client.layout().memory_bytes);
  client.Push(client.Place(rig->Step({handle}, 0, {1})));
  ASSERT_TRUE(client.Wait().has_value());
  EXPECT_EQ(fallocate(client.memory_fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size), 0);
  client.socket().Ring();
  EXPECT_THAT(client.socket().HearFarewell(), StartsWith("INVALID_ARGUMENT"));  // indices jumped
}

// Known fault: a region that changes while a request uses it.
TEST(RewritingClient, IsAnsweredWithWhatTheServerTook) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1)[0];
  RawClient client(*rig);
  rig->backend.Close();
  const shm::Request request = client.Place(rig->Step({handle}, 0, {7}));
  client.Push(request);
  // From then on the server reads nothing of it.
  std::atomic_ref<uint32_t> taken(client.head().requests_head.value);
  ASSERT_TRUE(Eventually([&] { return taken.load() == 1; }));
  // Everything becomes another request: the entry, the head, the rows.
  std::memset(client.data(), 0xFF, request.reply_at);
  client.entry(0).reply_at = ~uint64_t{0};
  client.entry(0).kind = shm::Kind::kAppend;
  rig->backend.Open();
  const std::optional<shm::Reply> reply = client.Wait();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->out_at, request.reply_at);
  EXPECT_TRUE(rig->IsAnswer(client.Decoded(*reply), 0, 500007, {7}));
}

TEST(RewritingClient, NeverBringsABadValueToTheDevice) {
  ShmRig rig;
  const v1::Handle handle = rig->Create(1, 2000)[0];
  RawClient client(*rig);
  const shm::Request first = client.Place(rig->Step({handle}, 0, {7}));
  std::atomic<bool> is_over{false};
  std::thread rewriter([&] {  // the rows flicker between good ones and NaN
    auto* const rows = reinterpret_cast<uint16_t*>(client.data() + first.k_at);
    for (uint16_t bits = 0; !is_over; bits ^= 0x7FFF) {
      for (uint64_t i = 0; i < first.k_bytes / 2; ++i) {
        std::atomic_ref<uint16_t>(rows[i]).store(bits, std::memory_order_relaxed);
      }
    }
  });
  uint64_t committed = 0;
  for (int i = 0; i < 500; ++i) {
    v1::DecodeRequest head = rig->Step({handle}, committed, {7});
    head.clear_q();
    head.clear_k();
    head.clear_v();
    const std::string bytes = head.SerializeAsString();
    shm::Request request = first;
    std::memcpy(client.data() + first.head_at, bytes.data(), bytes.size());
    request.head_bytes = bytes.size();
    request.reply_at += 1024;  // the head grows with the position
    client.Push(request);
    const std::optional<shm::Reply> reply = client.Wait();
    ASSERT_TRUE(reply.has_value());
    const v1::DecodeResponse response = client.Decoded(*reply);
    if (response.item_errors_size() == 0) {
      ++committed;
    } else {
      EXPECT_THAT(response.item_errors(0).error().message(), HasSubstr("values must be finite"));
    }
  }
  is_over = true;
  rewriter.join();
  EXPECT_EQ(rig->backend.nonfinite_rows(), 0);
}

TEST(DyingClient, LeavesNothingBehind) {
  ServerRigOptions options = ShmRig::Options();
  options.engine.launches_inflight_max = 1;
  ShmRig rig(options);
  const std::vector<v1::Handle> handles = rig->Create(9);
  RawClient other(*rig);
  std::vector<uint64_t> history;
  ASSERT_TRUE(rig.Steps(other, handles[8], 0, history));
  {
    RawClient client(*rig);
    rig->backend.Close();
    const int64_t decodes = rig->backend.decodes();
    for (uint64_t i = 0; i < 4; ++i) {
      client.Push(client.Place(rig->Step({handles[i]}, 0, {1}), PlaceOf(2 * i)));
      // The first step alone begins: it holds the device, and what comes behind it waits.
      ASSERT_TRUE(Eventually([&] { return rig->backend.decodes() > decodes; }));
      client.Push(client.Place(rig->Chunk(handles[4 + i], 0, Ids(30, 1), 0), PlaceOf(2 * i + 1)));
    }
    std::atomic_ref<uint32_t> taken(client.head().requests_head.value);
    ASSERT_TRUE(Eventually([&] { return taken.load() == 8; }));
    // Four steps and two appends.
    ASSERT_TRUE(Eventually([&] { return rig->engine->staging().slots_used() == 6; }));
  }  // hangs up
  // Its second append, in a slot, and those behind it never began.
  EXPECT_TRUE(Eventually([&] { return rig->engine->staging().slots_used() <= 5; }));
  rig->backend.Open();
  EXPECT_TRUE(Eventually([&] { return rig->shm->stats().sessions == 1; }));
  EXPECT_TRUE(Eventually([&] { return rig->engine->staging().slots_used() == 0; }));
  // An engine publishes its counts after it has answered.
  EXPECT_TRUE(Eventually([&] { return rig->engine->stats().requests_cancelled_total > 0; }));
  EXPECT_TRUE(rig.Steps(other, handles[8], 1, history));
}

}  // namespace
}  // namespace fp8kvd::testing
