// The helper thread under the load of several tenants: who has turns, who is refused.
#include "server/rpc/helper_thread.h"

#include <algorithm>
#include <deque>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::testing {
namespace {

using ::testing::ElementsAre;

constexpr cache::TenantId kA{0};
constexpr cache::TenantId kB{1};
constexpr cache::TenantId kC{2};

// Writes its name for each piece.
class Job final : public rpc::HelperThread::Task {
 public:
  Job(std::string name, int pieces, std::vector<std::string>* order)
      : name_(std::move(name)), pieces_(pieces), order_(order) {}
  bool Continue() override {
    order_->push_back(name_);
    return --pieces_ > 0;
  }

 private:
  const std::string name_;
  int pieces_;
  std::vector<std::string>* const order_;
};

// Holds the thread until it is let go, so that everything else waits at once.
class Gate final : public rpc::HelperThread::Task {
 public:
  bool Continue() override {
    entered_.set_value();
    let_go_.get_future().wait();
    return false;
  }
  void WaitUntilEntered() { entered_.get_future().wait(); }
  void LetGo() { let_go_.set_value(); }

 private:
  std::promise<void> entered_;
  std::promise<void> let_go_;
};

class Helper {
 public:
  explicit Helper(int32_t tenants) {
    thread_.emplace(tenants);
    EXPECT_TRUE(thread_->Run(&gate_, kA));
    gate_.WaitUntilEntered();
  }
  bool Add(const std::string& name, int pieces, cache::TenantId tenant) {
    jobs_.emplace_back(name, pieces, &order_);
    return thread_->Run(&jobs_.back(), tenant);
  }
  // All pieces in their order, once everything is done.
  std::vector<std::string> Finish() {
    gate_.LetGo();
    thread_.reset();
    return order_;
  }
  const rpc::HelperThread& thread() const { return *thread_; }

 private:
  std::vector<std::string> order_;
  std::deque<Job> jobs_;
  Gate gate_;
  std::optional<rpc::HelperThread> thread_;
};

TEST(HelperThread, OneShortTaskPassesAHeavyLoadOfAnotherTenant) {
  Helper helper(2);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(helper.Add("heavy", 500, kA));
  ASSERT_TRUE(helper.Add("short", 1, kB));
  const std::vector<std::string> order = helper.Finish();
  ASSERT_EQ(order.size(), 4001U);
  // The gate was a's turn, so b is next; one piece of a's would be allowed.
  EXPECT_EQ(std::find(order.begin(), order.end(), "short") - order.begin(), 0);
}

TEST(HelperThread, TenantsThatAlwaysWaitHaveAlikeTurns) {
  Helper helper(3);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(helper.Add("a", 60, kA));  // many
  ASSERT_TRUE(helper.Add("b", 300, kB));                             // one
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(helper.Add("c", 100, kC));
  const std::vector<std::string> order = helper.Finish();
  ASSERT_EQ(order.size(), 900U);
  for (size_t n = 3; n <= order.size(); n += 3) {
    for (const std::string name : {"a", "b", "c"}) {
      const auto end = order.begin() + static_cast<int64_t>(n);
      ASSERT_EQ(std::count(order.begin(), end, name), static_cast<int64_t>(n / 3)) << n;
    }
  }
}

TEST(HelperThread, TurnsThatOneDoesNotUseAreTheOthers) {
  Helper helper(3);
  ASSERT_TRUE(helper.Add("a", 4, kA));
  ASSERT_TRUE(helper.Add("c", 2, kC));
  EXPECT_THAT(helper.Finish(), ElementsAre("c", "a", "c", "a", "a", "a"));
}

TEST(HelperThread, WithinATenantTheOldestGoesFirst) {
  Helper helper(1);
  ASSERT_TRUE(helper.Add("first", 2, kA));
  ASSERT_TRUE(helper.Add("second", 1, kA));
  EXPECT_THAT(helper.Finish(), ElementsAre("first", "first", "second"));
}

// Takes the room for its pieces, and gives it back after the last.
class RoomJob final : public rpc::HelperThread::Task {
 public:
  RoomJob(std::string name, int pieces, std::vector<std::string>* order)
      : name_(std::move(name)), pieces_(pieces), order_(order) {}
  bool Continue() override {
    if (!thread->TakeRoom(this)) return true;
    order_->push_back(name_);
    if (--pieces_ > 0) return true;
    thread->GiveRoomBack();
    return false;
  }
  rpc::HelperThread* thread = nullptr;

 private:
  const std::string name_;
  int pieces_;
  std::vector<std::string>* const order_;
};

TEST(HelperThread, OneTaskHasTheRoomAndTheOthersGoOnBesideIt) {
  std::vector<std::string> order;
  RoomJob first("first", 3, &order);
  RoomJob second("second", 2, &order);
  Job small("small", 2, &order);
  Gate gate;
  {
    rpc::HelperThread thread(4);
    first.thread = second.thread = &thread;
    ASSERT_TRUE(thread.Run(&gate, kA));
    gate.WaitUntilEntered();
    ASSERT_TRUE(thread.Run(&first, kB));
    ASSERT_TRUE(thread.Run(&second, kC));
    ASSERT_TRUE(thread.Run(&small, cache::TenantId{3}));
    gate.LetGo();
  }
  EXPECT_THAT(order, ElementsAre("first", "small", "first", "small", "first", "second", "second"));
}

TEST(HelperThread, ATenantThatHasAllItsPlacesLeavesAnothersFree) {
  for (const int32_t tenants : {1, 2, 3, 64}) {
    Helper helper(tenants);
    const size_t most = helper.thread().tasks_per_tenant_max();
    EXPECT_EQ(most, tenants < 8 ? 16U / static_cast<size_t>(tenants) : 2U);
    for (size_t i = 0; i < most; ++i) EXPECT_TRUE(helper.Add("a", 1, kA)) << i;
    EXPECT_FALSE(helper.Add("a", 1, kA));
    if (tenants > 1) {
      EXPECT_TRUE(helper.Add("b", 1, kB));
    }
    EXPECT_EQ(helper.Finish().size(), most + (tenants > 1 ? 1 : 0));
  }
}

// A job of a call is handed in anew as soon as it says that it is done.
class Again final : public rpc::HelperThread::Task {
 public:
  explicit Again(rpc::HelperThread* thread) : thread_(thread) {}
  bool Continue() override {
    if (++times_ == 1000) {
      done.set_value();
    } else {
      EXPECT_TRUE(thread_->Run(this, kB));
    }
    return false;
  }
  std::promise<void> done;

 private:
  rpc::HelperThread* const thread_;
  int times_ = 0;
};

TEST(HelperThread, ATaskMayBeHandedInAgainBeforeItsEndIsNoticed) {
  rpc::HelperThread thread(64);
  Again first(&thread);
  Again second(&thread);
  ASSERT_TRUE(thread.Run(&first, kB));
  ASSERT_TRUE(thread.Run(&second, kB));
  first.done.get_future().wait();
  second.done.get_future().wait();
}

}  // namespace
}  // namespace fp8kvd::testing
