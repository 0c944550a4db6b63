// server/shm/ring.h: the server's side of the two rings of a session, over memory that somebody
// hostile writes to all the time.
//
// Promises: a request is copied to private memory before anything of it is looked at, each word of
//   it read once; every place that Take gives out lies inside the data area. What the server writes
//   is never read back: its own indices are private, the shared ones are copies for the client.
//   There is always room for the reply to a request that was taken.
// Does not manage: what a request says beyond its places (server/translate); bells (session.h).
// Threads: one. Cost: O(1), no memory.
// Errors: INVALID_ARGUMENT where the client breaks the contract of shared_memory.h; after that the
//   ring is of no use and its session ends.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "proto/fp8kvd/v1/shared_memory.h"

namespace fp8kvd::shm {

class Ring {
 public:
  Ring(const Welcome& layout, uint8_t* memory);

  // True: *request was taken. False: there is none.
  absl::StatusOr<bool> Take(Request* request);
  // Makes visible that they were.
  void PublishTaken();
  // Whether Take would do something.
  bool HasWork() const;

  // One for each request taken. Publish makes it visible.
  void Put(const Reply& reply);
  void Publish();

  // A part of the data area, of a request that Take gave.
  uint8_t* Data(uint64_t at) const { return data_ + at; }

  // Announces that the server looks no more until its bell rings; then HasWork must be asked again.
  void Sleep();
  void Wake();
  // Whether the client wants its bell, once for each time that it said so. After Publish.
  bool TakeClientSleeps();

  uint32_t inflight() const { return requests_head_ - replies_tail_; }

 private:
  absl::Status Check(const Request& request) const;

  Head* const head_;
  Request* const requests_;
  Reply* const replies_;
  uint8_t* const data_;
  const uint64_t data_bytes_;
  const uint32_t entries_;
  uint32_t requests_head_ = 0;  // taken
  uint32_t replies_tail_ = 0;   // put
};

}  // namespace fp8kvd::shm
