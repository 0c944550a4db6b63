// server/engine/placement.h: which device gets new sequences: the one with most room.
//
// Room of a device is told in sequences: how many of the configured length its scarcest layer group
// still takes. A live sequence counts with the pages that it has or has reserved, and with those of
// the configured length at least: one that was just made will grow, and a hundred of them that
// still have nothing must not all go to one place.
// Promises: the same rooms give the same devices; among equals the first. A device without pages
//   for the reservation is passed over while another has them.
// Threads: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace fp8kvd::engine {

// Of one model on one device.
struct DeviceRoom {
  struct Group {
    int64_t pages_total = 0;
    int64_t pages_left = 0;  // neither held nor reserved
  };
  int64_t seqs = 0;     // live
  bool is_out = false;  // takes none
  std::vector<Group> groups;
};

// Pages of one sequence in a layer group.
struct SeqPages {
  int64_t reserved = 0;  // from the start
  int64_t typical = 1;   // of the configured length, 1 at least
};

// The device of each of `count` sequences, one after the other, counting those before; empty where
// every device is out.
std::vector<int32_t> PlaceSeqs(std::vector<DeviceRoom> devices, absl::Span<const SeqPages> pages,
                               int32_t count);

}  // namespace fp8kvd::engine
