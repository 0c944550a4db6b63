// tests/kernels/run_case.h: runs a case of cases.h on a device with everything poisoned that the
// kernels must not read, and judges the answer. Free of GoogleTest and absl.
//
// Poison: all bytes of the pool that no visible token needs are 0xFF (e4m3, bf16 and fp32 NaN),
// page 0 and the other layers included; table entries that no visible token needs are INT32_MAX;
// outputs hold NaN with guard bytes around them. The device runs before the reference does, so that
// a recycled buffer cannot already hold the answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/cases.h"
#include "tests/kernels/judge.h"

namespace fp8kvd::kernels::cases {

// What a case needs of a device. Errors are texts; an empty one means that all went well.
class Device {
 public:
  virtual ~Device() = default;

  virtual int64_t BlockBytes(Precision precision, int32_t head_dim) = 0;

  // Memory for one case; the next Reset takes it all back. Contents: anything.
  virtual void Reset() = 0;
  virtual uint8_t* Pool(int64_t bytes) = 0;
  virtual int32_t* Table(int64_t entries) = 0;
  virtual uint8_t* Staging(int64_t bytes) = 0;

  virtual std::string Poison(uint8_t* pool_bytes, int64_t bytes) = 0;
  virtual std::string SetTable(int32_t* at, const std::vector<int32_t>& pages) = 0;
  virtual std::string Append(const AppendParams& params) = 0;
  virtual std::string Decode(const DecodeParams& params) = 0;
  virtual std::string Wait() = 0;  // until all of the above is done
};

// What is in the cache beside what the queries see.
enum class Unseen : uint8_t {
  kPoison,  // NaN: tokens outside the window or past the last query were never written
  kTokens,  // the case's own tokens, all seq_len of them appended
};

// Empty when the device took the work and wrote nothing outside of its outputs.
std::string Launch(Device& device, const Case& c, const std::vector<RowData>& data, Unseen unseen,
                   Answer* answer);

// The right answer of a case, from the reference. Scales as broken makes them, for the tests of the
// test: kNone is the right one.
enum class Broken : uint8_t { kNone, kVScaleTimes105, kOneScaleForAll };
reference::DecodeOutput Right(const Case& c, const std::vector<RowData>& data, Broken broken);

// Launch with poison, judge, and again with kTokens: same bits. Empty when all holds. The second
// form is for several devices that share the work of Right.
std::string RunCase(Device& device, const Case& c);
std::string RunCase(Device& device, const Case& c, const std::vector<RowData>& data,
                    const reference::DecodeOutput& right);

// The judge must refuse outputs made with broken scales. Empty when it does.
std::string CheckThatBrokenScalesFail();

}  // namespace fp8kvd::kernels::cases
