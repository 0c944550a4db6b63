// tests/rpc/storm.h: clients that come and go at once.
#pragma once

#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/rpc/rig.h"

namespace fp8kvd::testing {

// Four clients at once, each with random numbers of its own, take so many rounds. Nothing is open
// or held afterwards; the sanitizers and the rig's end look, too.
template <typename Round>
void Storm(const ServerRig& rig, int rounds, const Round& round) {
  std::vector<std::thread> clients;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    clients.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < rounds; ++i) round(seed, random);
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(Eventually([&] { return rig.server->calls_open() == 0; }));
  EXPECT_TRUE(Eventually([&] { return rig.engine->staging().slots_used() == 0; }));
}

}  // namespace fp8kvd::testing
