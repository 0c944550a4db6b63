// tests/rpc/world.h: a server with two models and some sequences, as tests of bad input want it.
#pragma once

#include <vector>

#include "gtest/gtest.h"

#include "tests/rpc/rig.h"

namespace fp8kvd::testing {

// Two models, and a sequence of each with ten tokens in both layers.
class World {
 public:
  static ServerRigOptions Options() {
    ServerRigOptions options;
    options.models.push_back(ModelSpec{.name = "w", .windows = {32, 32}, .pages = 8});
    options.cache.seqs_max = 64;
    return options;
  }
  World() : rig(Options()) {
    good = rig.Create(2);
    bad = rig.Create(1)[0];
    freed = rig.Create(1)[0];
    other = rig.Create(1, 0, "w")[0];
    for (const v1::Handle& handle : {good[0], good[1], bad}) {
      EXPECT_TRUE(rig.Append({rig.Chunk(handle, 0, Ids(10, 1000), 0),
                              rig.Chunk(handle, 0, Ids(10, 1000), 1)})
                      .ok());
    }
    grpc::ClientContext context;
    v1::FreeSequencesRequest request;
    *request.add_handles() = freed;
    v1::FreeSequencesResponse response;
    EXPECT_TRUE(rig.stub->FreeSequences(&context, request, &response).ok());
  }

  ServerRig rig;
  std::vector<v1::Handle> good;
  v1::Handle bad;
  v1::Handle freed;
  v1::Handle other;  // of the model "w"
};

}  // namespace fp8kvd::testing
