// bench/gpu_problem.h: decode problems of any shape over one pool of real, appended data, and their
// time. Made for measuring: a device fault ends the program.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/cuda/decode_args.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/params.h"

namespace fp8kvd::bench {

// Ends the program when a call failed.
void Must(cudaError_t error, const char* what);

struct Shape {
  std::vector<int32_t> kv_lens;  // one for each sequence
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 128;
  int32_t q_len = 1;
  Precision precision = Precision::kFp8Kv;

  int32_t group() const { return q_heads / kv_heads; }
  int64_t KvBytes() const;  // that one decode must read, scales included
};

struct Variant {
  int32_t sm = 90;
  bool batch_invariant = false;
  bool with_append = false;  // each decode appends one token of each sequence
};

class Gpu {
 public:
  Gpu();

  // Median time of one operation in a graph of at least 20 that walks over so many copies of the
  // cache that they touch 320 MB (five times the L2), of 9 replays after 2. The board has rested
  // before, so that the time does not depend on what was timed before.
  double DecodeUs(const Shape& shape);
  // The same after 0.6 s of it: at the clocks that the board's power limit leaves by then.
  double SustainedDecodeUs(const Shape& shape);
  // The same of a variant and of the default, whose graphs are replayed in turns, 19 times each:
  // clocks drift by more than they differ.
  struct Beside {
    double us;
    double default_us;
  };
  Beside DecodeBesideDefault(const Shape& shape, const Variant& variant);
  // n tokens of each of `seqs` sequences: time, and bytes read and written.
  struct Append {
    double us;
    int64_t bytes;
  };
  Append BulkAppend(Precision precision, int32_t head_dim, int32_t seqs, int32_t kv_heads,
                    int32_t n);

  double ReadGbps();
  double CopyGbps();
  std::string name() const { return properties_.name; }

 private:
  struct Problem;

  // The pool as blocks of this format, all of them holding appended noise.
  void Fill(Precision precision, int32_t head_dim);
  void Upload(const void* from, int64_t bytes, int64_t offset, uint8_t* to) const;
  Problem Place(const Shape& shape);
  // Queues the index-th of a row of operations.
  using Operation = std::function<void(int32_t index)>;
  Operation DecodeOf(const Problem& problem, const Variant& variant) const;
  // Of one in a graph of so many, for each of these operations. Graphs are replayed in turns, at
  // least for so long before they are timed. One alone begins from rest.
  std::vector<double> MediansUs(int32_t launches, const std::vector<Operation>& operations,
                                double warm_ms = 0.0);
  void Rest();

  cudaDeviceProp properties_{};
  kernels::cuda::DeviceLimits limits_{};
  cudaStream_t stream_ = nullptr;
  uint8_t* pool_ = nullptr;     // [kPoolBytes]
  uint8_t* scratch_ = nullptr;  // rows, tables, queries, outputs, noise
  kernels::cuda::DecodeArgs workspace_{};
  Precision filled_ = Precision::kBf16;
  int32_t filled_head_dim_ = 0;
  double busy_ms_ = 0.0;  // since it rested
};

}  // namespace fp8kvd::bench
