#include "server/ops/notify.h"

#include <chrono>
#include <cstdlib>

#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

using std::chrono::milliseconds;

// How far apart a daemon says that it lives, where systemd tells it so.
milliseconds EveryWith(const char* watchdog_us) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): one thread
  setenv("WATCHDOG_USEC", watchdog_us, /*overwrite=*/1);
  return Notifier().AliveEvery(milliseconds(5000));
}

TEST(Notifier, SaysThatWeLiveThriceInAWatchdogsTime) {
  EXPECT_EQ(EveryWith("3000000"), milliseconds(1000));
  EXPECT_EQ(EveryWith("60000000"), milliseconds(5000)) << "the status page wants a look more often";
}

TEST(Notifier, DoesNotSpinForAWatchdogThatIsTooShort) {
  for (const char* us : {"1", "999", "2999", "3000"}) EXPECT_EQ(EveryWith(us), milliseconds(1));
}

TEST(Notifier, WithoutAWatchdogTakesTheTimeItIsGiven) {
  for (const char* us : {"0", "-5", "soon", ""}) EXPECT_EQ(EveryWith(us), milliseconds(5000));
}

}  // namespace
}  // namespace fp8kvd::ops
