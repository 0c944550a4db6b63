#include "server/shm/loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "config/base/check.h"
#include "proto/fp8kvd/v1/shared_lines.h"
#include "server/shm/session.h"

namespace fp8kvd::shm {
namespace {

// Turns of a busy loop between two looks at the sockets: a hang-up is seen within some of them.
constexpr int kTurnsBetweenLooks = 64;
// A request waits for a staging slot: about a slice of another one's append.
constexpr int kSlotWaitMs = 2;
constexpr int kSleepMsMax = 1000;
constexpr int kEventsMax = 64;

}  // namespace

Loop::Loop(const Parts* parts)
    : parts_(parts),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      bell_(eventfd(0, EFD_CLOEXEC)),
      watch_(parts->fleet) {
  FP8KVD_CHECK(epoll_ >= 0 && bell_ >= 0);
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  FP8KVD_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, bell_, &event) == 0);
  thread_ = std::thread([this] { Run(); });
}

Loop::~Loop() {
  FP8KVD_CHECK(!thread_.joinable() && posted_.load() == nullptr);
  close(bell_);
  close(epoll_);
}

void Loop::Adopt(std::unique_ptr<Session> session) {
  sessions_count_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    adopted_.push_back(std::move(session));
  }
  RingSelf();
}

void Loop::Post(Posted* posted) {
  Posted* before = posted_.load(std::memory_order_relaxed);
  do {
    posted->next_ = before;
  } while (!posted_.compare_exchange_weak(before, posted));
  if (is_asleep_.exchange(false)) RingSelf();
}

void Loop::Drain() {
  State open = State::kOpen;
  state_.compare_exchange_strong(open, State::kDraining);
  RingSelf();
}

void Loop::Stop() {
  state_ = State::kStopping;
  RingSelf();
  if (thread_.joinable()) thread_.join();
}

void Loop::RingSelf() const {
  const uint64_t one = 1;
  FP8KVD_CHECK(write(bell_, &one, sizeof(one)) == sizeof(one));
}

void Loop::Run() {
  engine::TimeUs worked_at = parts_->clock->NowUs();
  int turns = 0;
  while (state_ != State::kStopping || sessions_count_ > 0) {
    if (Turn()) {
      worked_at = parts_->clock->NowUs();
      if (++turns % kTurnsBetweenLooks == 0) Look(/*timeout_ms=*/0);
    } else if (!sessions_.empty() && parts_->clock->NowUs() - worked_at < parts_->spin_us) {
      Pause();
    } else {
      Sleep();
      worked_at = parts_->clock->NowUs();
    }
  }
}

bool Loop::Turn() {
  watch_.LookOn();
  bool has_worked = TakePosted();
  for (const std::unique_ptr<Session>& session : sessions_) has_worked |= session->Work();
  return has_worked;
}

bool Loop::HasWork() const {
  return posted_.load() != nullptr ||
         std::any_of(sessions_.begin(), sessions_.end(),
                     [](const auto& session) { return session->HasWork(); });
}

bool Loop::TakePosted() {
  if (posted_.load(std::memory_order_relaxed) == nullptr) return false;
  Posted* newest = posted_.exchange(nullptr, std::memory_order_acquire);
  Posted* oldest = nullptr;
  while (newest != nullptr) {
    Posted* const next = newest->next_;
    newest->next_ = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    Posted* const next = oldest->next_;  // OnPosted may post it again
    oldest->OnPosted();
    oldest = next;
  }
  return true;
}

void Loop::Sleep() {
  Tidy();
  watch_.LookAway();
  for (const std::unique_ptr<Session>& session : sessions_) session->Sleep();
  is_asleep_.store(true);
  const auto waits_for_slot = [](const auto& session) { return session->waits_for_slot(); };
  const bool is_short = std::any_of(sessions_.begin(), sessions_.end(), waits_for_slot);
  Look(HasWork() ? 0 : is_short ? kSlotWaitMs : kSleepMsMax);
  is_asleep_.store(false);
  for (const std::unique_ptr<Session>& session : sessions_) session->Wake();
}

void Loop::Look(int timeout_ms) {
  epoll_event events[kEventsMax];
  const int count = epoll_wait(epoll_, events, kEventsMax, timeout_ms);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr != nullptr) {
      static_cast<Session*>(events[i].data.ptr)->OnSocket();
      continue;
    }
    uint64_t rings = 0;
    FP8KVD_CHECK(read(bell_, &rings, sizeof(rings)) == sizeof(rings));
    TakeAdopted();
  }
  Tidy();
}

void Loop::TakeAdopted() {
  std::vector<std::unique_ptr<Session>> adopted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    adopted.swap(adopted_);
  }
  for (std::unique_ptr<Session>& session : adopted) {
    epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.ptr = session.get()}};
    FP8KVD_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, session->socket(), &event) == 0);
    sessions_.push_back(std::move(session));
  }
}

// Sessions that shall end do, those that are over go.
void Loop::Tidy() {
  const State state = state_;
  for (const std::unique_ptr<Session>& session : sessions_) {
    if (state == State::kStopping || (state == State::kDraining && session->is_idle())) {
      session->EndForDrain();
    }
  }
  const size_t before = sessions_.size();
  std::erase_if(sessions_, [](const auto& session) { return session->is_over(); });
  sessions_count_.fetch_sub(static_cast<int64_t>(before - sessions_.size()));
}

void Loop::Forget(int socket) const { (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, socket, nullptr); }

}  // namespace fp8kvd::shm
