#include "server/calibrate.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace fp8kvd {
namespace {

constexpr int64_t kBatches[] = {1, 4, 16, 64};
constexpr int64_t kTokens[] = {16, 64, 256, 1024, 4096, 16384, 65536, 262144};
constexpr int32_t kRowsMax = 64;
static_assert(kBatches[std::size(kBatches) - 1] <= kRowsMax, "every batch fits a launch");

constexpr int kSamples = 21;
constexpr double kSampleUs = 2000;  // launches until a sample is so long, but for the largest
constexpr int64_t kLaunchesMax = 64;

// What a launch's time depends on besides batch and tokens.
struct Shape {
  int32_t head_dim = 0;
  int32_t group = 0;
  int32_t kv_heads = 0;

  int64_t TokenBytes() const { return KvBytesPerToken(Precision::kBf16, head_dim) * kv_heads; }
  int64_t KvRow() const { return int64_t{kPageTokens} * kv_heads * head_dim; }  // of one page
  int64_t QRow() const { return int64_t{kv_heads} * group * head_dim; }
  bool operator<(const Shape& other) const {
    return std::tie(head_dim, group, kv_heads) <
           std::tie(other.head_dim, other.group, other.kv_heads);
  }
};

int64_t PagesOf(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// bf16 bits of numbers from 0.5 to 2 with either sign.
void FillRows(uint16_t* rows, int64_t count) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525 + 1013904223;
    rows[i] = static_cast<uint16_t>(0x3F00 | (state >> 31 << 15) | (state >> 20 & 0xFF));
  }
}

// One backend's memory, dealt out to one shape at a time.
class Bench {
 public:
  static absl::StatusOr<Bench> Make(const CalibrateArgs& args, const std::set<Shape>& shapes) {
    Bench bench(args);
    std::vector<kernels::KernelShape> kernels;
    int64_t staging = 0;
    int64_t q_heads_max = 0;
    for (const Shape& shape : shapes) {
      bench.pages_ = std::max(bench.pages_, bench.PagesFor(shape));
      staging = std::max(staging, 2 * shape.KvRow() + 2 * kRowsMax * shape.QRow());
      q_heads_max = std::max<int64_t>(q_heads_max, int64_t{shape.kv_heads} * shape.group);
      for (const Precision precision : {Precision::kBf16, Precision::kFp8Kv}) {
        kernels.push_back({shape.head_dim, shape.group, precision});
        int64_t& bytes = bench.pool_bytes_[static_cast<int>(precision)];
        bytes = std::max(bytes, bench.PagesFor(shape) * bench.Stride(shape, precision));
      }
    }
    absl::Status status =
        args.backend->WarmUp(kernels, kRowsMax, /*q_len_max=*/1, static_cast<int32_t>(q_heads_max));
    if (status.ok()) status = bench.Allocate(staging * static_cast<int64_t>(sizeof(uint16_t)));
    if (!status.ok()) return status;
    return bench;
  }

  // Times every point of the shape into the calibration.
  absl::Status Measure(const Shape& shape, config::Calibration* calibration) {
    FillRows(staging_, 2 * shape.KvRow() + kRowsMax * shape.QRow());
    for (const Precision precision : {Precision::kBf16, Precision::kFp8Kv}) {
      if (absl::Status status = FillPool(shape, precision); !status.ok()) return status;
    }
    for (const int64_t batch : kBatches) {
      for (const int64_t tokens : kTokens) {
        if (batch * PagesOf(tokens) > PagesFor(shape)) break;
        config::CalibrationPoint point{.head_dim = shape.head_dim,
                                       .group = shape.group,
                                       .kv_heads = shape.kv_heads,
                                       .batch = batch,
                                       .tokens = tokens};
        if (absl::Status status = TimePoint(shape, &point); !status.ok()) return status;
        args_.progress(absl::StrFormat(
            "head_dim %d, %d q_heads per KV head, %d kv_heads, %d x %d tokens: bf16 %.1f us, "
            "fp8_kv %.1f us, r %.3f",
            shape.head_dim, shape.group, shape.kv_heads, batch, tokens, point.bf16_us,
            point.fp8_kv_us, point.fp8_kv_us / point.bf16_us));
        calibration->points.push_back(point);
      }
    }
    return absl::OkStatus();
  }

 private:
  explicit Bench(const CalibrateArgs& args) : args_(args) {}

  int64_t PagesFor(const Shape& shape) const {
    return std::max<int64_t>(args_.launch_bytes_max / (shape.TokenBytes() * kPageTokens), kRowsMax);
  }
  int64_t Stride(const Shape& shape, Precision precision) const {
    return args_.backend->BlockBytes(precision, shape.head_dim) * shape.kv_heads;
  }

  absl::Status Allocate(int64_t staging_bytes) {
    for (int p = 0; p < 2; ++p) {
      absl::StatusOr<uint8_t*> pool = args_.backend->AllocPool(pool_bytes_[p]);
      if (!pool.ok()) return pool.status();
      pool_[p] = *pool;
    }
    absl::StatusOr<uint8_t*> staging = args_.backend->AllocStaging(staging_bytes);
    if (!staging.ok()) return staging.status();
    staging_ = reinterpret_cast<uint16_t*>(*staging);
    absl::StatusOr<int32_t*> table = args_.backend->AllocTable(pages_);
    if (!table.ok()) return table.status();
    table_ = *table;
    // Entry i is page i: a sequence that begins at page i has its block table there.
    std::vector<kernels::TableEdit> edits;
    for (int64_t begin = 0; begin < pages_; begin += kItemsMax) {
      edits.clear();
      for (int64_t i = begin; i < std::min<int64_t>(begin + kItemsMax, pages_); ++i) {
        edits.push_back({table_ + i, static_cast<int32_t>(i)});
      }
      if (absl::Status status = args_.backend->UpdateTables(edits); !status.ok()) return status;
    }
    return Wait();
  }

  absl::Status Wait() const {
    const absl::StatusOr<kernels::FenceId> fence = args_.backend->Fence();
    if (!fence.ok()) return fence.status();
    for (;;) {
      const absl::StatusOr<bool> passed = args_.backend->Passed(*fence);
      if (!passed.ok()) return passed.status();
      if (*passed) return absl::OkStatus();
    }
  }

  // Every page gets the same rows: what they are costs no time, that they are written does.
  absl::Status FillPool(const Shape& shape, Precision precision) {
    std::vector<kernels::AppendRow> rows;
    const int64_t pages = PagesFor(shape);
    for (int64_t begin = 0; begin < pages; begin += kRowsMax) {
      rows.clear();
      for (int64_t page = begin; page < std::min(begin + kRowsMax, pages); ++page) {
        rows.push_back({.k = staging_,
                        .v = staging_ + shape.KvRow(),
                        .block_table = table_ + page,
                        .base = pool_[static_cast<int>(precision)],
                        .page_stride = Stride(shape, precision),
                        .pos = 0,
                        .n = kPageTokens,
                        .kv_heads = shape.kv_heads});
      }
      absl::Status status = args_.backend->Append({.rows = rows.data(),
                                                   .rows_count = static_cast<int32_t>(rows.size()),
                                                   .head_dim = shape.head_dim,
                                                   .precision = precision});
      if (status.ok()) status = Wait();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // One launch of the point; `turn` says in which part of the pool its sequences lie.
  absl::Status Launch(const Shape& shape, Precision precision,
                      const config::CalibrationPoint& point, int64_t turn) {
    const int64_t seq_pages = PagesOf(point.tokens);
    const int64_t places = PagesFor(shape) / (point.batch * seq_pages);
    const int64_t first = turn % places * point.batch * seq_pages;
    uint16_t* const q = staging_ + 2 * shape.KvRow();
    uint16_t* const out = q + kRowsMax * shape.QRow();
    rows_.clear();
    for (int64_t i = 0; i < point.batch; ++i) {
      rows_.push_back({.q = q + i * shape.QRow(),
                       .out = out + i * shape.QRow(),
                       .lse = nullptr,
                       .sink_logits = nullptr,
                       .block_table = table_ + first + i * seq_pages,
                       .base = pool_[static_cast<int>(precision)],
                       .page_stride = Stride(shape, precision),
                       .pos = static_cast<int32_t>(point.tokens - 1),
                       .q_len = 1,
                       .kv_heads = shape.kv_heads,
                       .window = 0,
                       .sm_scale = 1.0F / 16,
                       .softcap = 0.0F});
    }
    return args_.backend->Decode({.rows = rows_.data(),
                                  .rows_count = static_cast<int32_t>(rows_.size()),
                                  .head_dim = shape.head_dim,
                                  .group = shape.group,
                                  .precision = precision,
                                  .out_type = kernels::OutType::kBf16,
                                  .batch_invariant = false});
  }

  // Microseconds of one launch, of so many in a row.
  absl::StatusOr<double> TimeLaunches(const Shape& shape, Precision precision,
                                      const config::CalibrationPoint& point, int64_t launches) {
    const int64_t begin = args_.clock->NowUs();
    for (int64_t i = 0; i < launches; ++i) {
      absl::Status status = Launch(shape, precision, point, turn_++);
      if (!status.ok()) return status;
    }
    if (absl::Status status = Wait(); !status.ok()) return status;
    // A clock of whole microseconds may see none pass.
    return static_cast<double>(std::max<int64_t>(args_.clock->NowUs() - begin, 1)) /
           static_cast<double>(launches);
  }

  absl::Status TimePoint(const Shape& shape, config::CalibrationPoint* point) {
    std::vector<double> times[2];
    for (int sample = 0; sample < kSamples; ++sample) {
      for (const Precision precision : {Precision::kBf16, Precision::kFp8Kv}) {
        std::vector<double>& of = times[static_cast<int>(precision)];
        const double one_us = of.empty() ? kSampleUs : of.back();  // the first warms up
        const auto launches =
            std::clamp<int64_t>(static_cast<int64_t>(kSampleUs / one_us), 1, kLaunchesMax);
        const absl::StatusOr<double> us = TimeLaunches(shape, precision, *point, launches);
        if (!us.ok()) return us.status();
        of.push_back(*us);
      }
    }
    for (std::vector<double>& of : times) {
      of.erase(of.begin());
      std::nth_element(of.begin(), of.begin() + kSamples / 4, of.end());
    }
    point->bf16_us = times[0][kSamples / 4];
    point->fp8_kv_us = times[1][kSamples / 4];
    return absl::OkStatus();
  }

  CalibrateArgs args_;
  int64_t pages_ = 0;
  int64_t pool_bytes_[2] = {};
  uint8_t* pool_[2] = {};
  int32_t* table_ = nullptr;
  // K and V of one page, then queries and outputs of a launch.
  uint16_t* staging_ = nullptr;
  std::vector<kernels::DecodeRow> rows_;
  int64_t turn_ = 0;
};

// Bytes a second of bf16 K and V, by the best of the launches that read a quarter at least of what
// the largest does: small ones are bound by other things, or read from a processor's own cache.
double BestRead(const std::vector<config::CalibrationPoint>& points) {
  const auto bytes = [](const config::CalibrationPoint& p) {
    return static_cast<double>(p.batch * p.tokens * p.kv_heads *
                               KvBytesPerToken(Precision::kBf16, p.head_dim));
  };
  double largest = 0;
  for (const config::CalibrationPoint& p : points) largest = std::max(largest, bytes(p));
  double best = 0;
  for (const config::CalibrationPoint& p : points) {
    if (4 * bytes(p) >= largest) best = std::max(best, bytes(p) / p.bf16_us * 1e6);
  }
  return best;
}

}  // namespace

int64_t CalibrationLaunchBytes(const kernels::DeviceInfo& device) {
  const int64_t wanted = device.kind == "cpu" ? int64_t{128} << 20 : int64_t{4} << 30;
  return std::min(wanted, device.bytes_free / 8);
}

absl::StatusOr<config::Calibration> Calibrate(const CalibrateArgs& args) {
  std::set<Shape> shapes;
  for (const ModelGeometry& model : args.models) {
    shapes.insert({model.head_dim, model.group_size(), model.kv_heads});
  }
  absl::StatusOr<Bench> bench = Bench::Make(args, shapes);
  if (!bench.ok()) return bench.status();
  config::Calibration calibration;
  calibration.device_kind = args.backend->Device().kind;
  calibration.device_name = args.backend->Device().name;
  for (const Shape& shape : shapes) {
    if (absl::Status status = bench->Measure(shape, &calibration); !status.ok()) return status;
  }
  calibration.read_bytes_per_s = BestRead(calibration.points);
  return calibration;
}

}  // namespace fp8kvd
