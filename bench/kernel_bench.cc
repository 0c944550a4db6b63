// fp8kv_kernel_bench: times the CUDA kernels on an H200 beside the read and copy roofs of the same
// run, prints a table and writes JSON. Checks the kernels against double precision first: a fast
// wrong answer is not reported. Stands alone: needs a driver and nothing else.
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "bench/gpu_problem.h"
#include "kernels/cuda/backend.h"
#include "tests/kernels/backend_device.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::bench {
namespace {

constexpr const char* kUsage =
    "usage: fp8kv_kernel_bench [--json=FILE] [--commit=HASH] [--only=NAMED|APPEND|ALL]\n"
    "  --json    writes all results there\n"
    "  --commit  is written into the JSON\n"
    "  --only    NAMED: the named cells alone; APPEND: appends, and decodes after an append\n";

struct Flags {
  std::string json;
  std::string commit;
  std::string only = "ALL";
};

bool ParseFlags(int argc, char** argv, Flags* flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--json=", 0) == 0) {
      flags->json = arg.substr(std::strlen("--json="));
    } else if (arg.rfind("--commit=", 0) == 0) {
      flags->commit = arg.substr(std::strlen("--commit="));
    } else if (arg == "--only=NAMED" || arg == "--only=APPEND" || arg == "--only=ALL") {
      flags->only = arg.substr(std::strlen("--only="));
    } else {
      return false;
    }
  }
  return true;
}

const char* Name(Precision precision) { return precision == Precision::kFp8Kv ? "fp8_kv" : "bf16"; }

// One number when all sequences are equally long, else all of them.
std::string KvLenJson(const Shape& shape) {
  bool same = true;
  for (const int32_t len : shape.kv_lens) same = same && len == shape.kv_lens[0];
  if (same) return std::to_string(shape.kv_lens[0]);
  std::string text = "[";
  for (const int32_t len : shape.kv_lens)
    text += (text.size() > 1 ? "," : "") + std::to_string(len);
  return text + "]";
}

std::string CellJson(const Shape& shape, double us, const std::string& more) {
  char text[160];
  std::snprintf(text, sizeof(text), "\"us\":%.3f,\"gbps\":%.1f}", us,
                static_cast<double>(shape.KvBytes()) / us / 1e3);
  return "{\"batch\":" + std::to_string(shape.kv_lens.size()) + ",\"kv_len\":" + KvLenJson(shape) +
         ",\"q_heads\":" + std::to_string(shape.q_heads) +
         ",\"kv_heads\":" + std::to_string(shape.kv_heads) +
         ",\"head_dim\":" + std::to_string(shape.head_dim) +
         ",\"q_len\":" + std::to_string(shape.q_len) + ",\"precision\":\"" + Name(shape.precision) +
         "\"," + more + text;
}

Shape Uniform(int32_t batch, int32_t kv_len, int32_t q_heads, int32_t kv_heads,
              int32_t head_dim = 128, int32_t q_len = 1) {
  Shape shape;
  shape.kv_lens.assign(batch, kv_len);
  shape.q_heads = q_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.q_len = q_len;
  return shape;
}

struct Cell {
  std::string name;
  Shape shape;
};

std::vector<Cell> NamedCells() {
  Shape h = Uniform(32, 4096, 64, 8);
  h.kv_lens[0] = 65536;
  return {{"A", Uniform(128, 2048, 64, 8)},
          {"B", Uniform(1, 262144, 32, 4)},
          {"C", Uniform(32, 32768, 8, 1)},
          {"D", Uniform(64, 128, 64, 8)},
          {"E", Uniform(1, 1024, 64, 8)},
          {"F77", Uniform(16, 77, 16, 2)},
          {"F512", Uniform(16, 512, 16, 2)},
          {"F2048", Uniform(16, 2048, 16, 2)},
          {"F8192", Uniform(16, 8192, 16, 2)},
          {"G", Uniform(64, 8192, 64, 8)},
          {"H", h},
          {"I", Uniform(1, 131072, 64, 8)}};
}

// Of 1 GB and more in fp8_kv, for batch_invariant.
std::vector<Cell> LongCells() {
  Shape ragged = Uniform(64, 1, 64, 8);
  for (size_t i = 0; i < ragged.kv_lens.size(); ++i) {
    ragged.kv_lens[i] = static_cast<int32_t>(12000 - 61 * i);
  }
  return {{"64 x 8157 to 12000", ragged},
          {"16 x 32768", Uniform(16, 32768, 64, 8)},
          {"4 x 131072", Uniform(4, 131072, 64, 8)}};
}

// About 1.1 GB of fp8_kv cache (2.1 GB of bf16) at any head_dim and number of KV heads.
int32_t LenForBytes(int32_t batch, int32_t kv_heads, int32_t head_dim) {
  const int64_t elements = int64_t{64} * 8192 * 8 * 128;
  return static_cast<int32_t>(elements / batch / kv_heads / head_dim / 64 * 64);
}

std::vector<Cell> OtherCells() {
  std::vector<Cell> cells;
  for (const int32_t head_dim : {64, 256}) {
    for (const int32_t kv_len : {77, 512, 2048}) {
      for (const int32_t group : {1, 8, 16}) {
        cells.push_back({"short", Uniform(16, kv_len, 2 * group, 2, head_dim)});
      }
    }
  }
  for (const int32_t group : {1, 2, 3, 4, 5, 6, 7, 12, 16}) {
    cells.push_back({"group " + std::to_string(group), Uniform(64, 8192, 8 * group, 8)});
  }
  for (const int32_t head_dim : {64, 80, 96, 192, 256}) {
    for (const int32_t group : {4, 8}) {
      cells.push_back({"d" + std::to_string(head_dim),
                       Uniform(64, LenForBytes(64, 8, head_dim), 8 * group, 8, head_dim)});
    }
  }
  cells.push_back({"32/16 d256", Uniform(64, LenForBytes(64, 16, 256), 32, 16, 256)});
  cells.push_back({"4/1 d256", Uniform(64, LenForBytes(64, 1, 256), 4, 1, 256)});
  Shape ragged = Uniform(64, 1, 64, 8);
  for (size_t i = 0; i < ragged.kv_lens.size(); ++i) {
    ragged.kv_lens[i] = static_cast<int32_t>(4000 - 61 * i);
  }
  cells.push_back({"ragged", ragged});
  for (const int32_t batch : {1, 4, 16, 64, 256, 512}) {
    for (const int32_t kv_len : {64, 256, 1024, 4096, 16384, 65536, 262144}) {
      if (int64_t{batch} * kv_len > int64_t{1} << 20) continue;  // 2 GB of fp8_kv
      cells.push_back({"sweep", Uniform(batch, kv_len, 64, 8)});
    }
  }
  for (const int32_t q_len : {2, 4, 8}) {
    for (const int32_t group : {4, 8}) {
      cells.push_back(
          {"q_len " + std::to_string(q_len), Uniform(64, 8192, 8 * group, 8, 128, q_len)});
    }
  }
  cells.push_back({"q_len 4 d64", Uniform(64, LenForBytes(64, 8, 64), 64, 8, 64, 4)});
  return cells;
}

// Where one query token and four bring the board to, when they go on.
std::vector<Cell> SustainedCells() {
  std::vector<Cell> cells;
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t q_len : {1, 4}) {
      cells.push_back(
          {"sustained", Uniform(64, LenForBytes(64, 8, head_dim), 64, 8, head_dim, q_len)});
    }
  }
  return cells;
}

bool SameShape(const Shape& a, const Shape& b) {
  return a.kv_lens == b.kv_lens && a.q_heads == b.q_heads && a.kv_heads == b.kv_heads &&
         a.head_dim == b.head_dim && a.q_len == b.q_len;
}

// Collects a table for people and JSON for scripts.
class Bench {
 public:
  Bench() : read_gbps_(gpu_.ReadGbps()), copy_gbps_(gpu_.CopyGbps()) {
    std::printf("%s: reads %.0f GB/s, copies %.0f GB/s\n", gpu_.name().c_str(), read_gbps_,
                copy_gbps_);
    std::printf("%-14s %5s %8s %7s %5s %5s | %9s %6s | %9s %6s | %6s\n", "cell", "batch", "kv_len",
                "heads", "dim", "q_len", "fp8_kv us", "roof", "bf16 us", "roof", "ratio");
  }

  void Decode(const std::vector<Cell>& cells) {
    for (const Cell& cell : cells) {
      bool done = false;
      for (const Shape& shape : shapes_) done = done || SameShape(shape, cell.shape);
      if (done) continue;
      shapes_.push_back(cell.shape);
      DecodeCell(cell);
    }
  }

  void Sustained(const std::vector<Cell>& cells) {
    for (const Cell& cell : cells) {
      for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
        Shape shape = cell.shape;
        shape.precision = precision;
        const double us = gpu_.SustainedDecodeUs(shape);
        std::printf("%s, d%d, %d query tokens, %s: %.2f us\n", cell.name.c_str(), shape.head_dim,
                    shape.q_len, Name(precision), us);
        Join(&sustained_, CellJson(shape, us, ""));
      }
    }
  }

  // The same cells another way, in turns with the default.
  void Variants(const std::vector<Cell>& cells, const Variant& variant, const char* name,
                std::string* json) {
    for (const Cell& cell : cells) {
      for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
        Shape shape = cell.shape;
        shape.precision = precision;
        const auto [us, plain] = gpu_.DecodeBesideDefault(shape, variant);
        std::printf("%s, %s, %s: %.2f us, default %.2f us (%+.2f us, %.3f)\n", name,
                    cell.name.c_str(), Name(precision), us, plain, us - plain, us / plain);
        char more[48];
        std::snprintf(more, sizeof(more), "\"default_us\":%.3f,", plain);
        Join(json, CellJson(shape, us, more));
      }
    }
  }

  void BulkAppends() {
    for (const int32_t head_dim : {64, 128, 256}) {
      for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
        const Gpu::Append append = gpu_.BulkAppend(precision, head_dim, 16, 8, 4096);
        const double gbps = static_cast<double>(append.bytes) / append.us / 1e3;
        std::printf("append 16 x 4096 tokens, 8 heads, d%d, %s: %.1f us, %.2f of the copy roof\n",
                    head_dim, Name(precision), append.us, gbps / copy_gbps_);
        char text[160];
        std::snprintf(text, sizeof(text),
                      "{\"seqs\":16,\"tokens\":4096,\"kv_heads\":8,\"head_dim\":%d,"
                      "\"precision\":\"%s\",\"us\":%.3f,\"gbps\":%.1f}",
                      head_dim, Name(precision), append.us, gbps);
        Join(&appends_, text);
      }
    }
  }

  std::string* step_with_append() { return &steps_; }
  std::string* batch_invariant() { return &invariant_; }
  std::string* generic() { return &generic_; }

  std::string Json(const std::string& commit) const {
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::tm utc{};
    gmtime_r(&now, &utc);
    std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
    char roofs[96];
    std::snprintf(roofs, sizeof(roofs), "\"roof_gbps\":%.1f,\n\"copy_gbps\":%.1f", read_gbps_,
                  copy_gbps_);
    return "{\"device\":\"" + gpu_.name() + "\",\n\"commit\":\"" + commit + "\",\n\"date\":\"" +
           date + "\",\n" + roofs + ",\n\"cells\":[\n" + cells_ + "],\n\"sustained\":[\n" +
           sustained_ + "],\n\"bulk_append\":[\n" + appends_ + "],\n\"step_with_append\":[\n" +
           steps_ + "],\n\"batch_invariant\":[\n" + invariant_ + "],\n\"generic\":[\n" + generic_ +
           "]}\n";
  }

 private:
  static void Join(std::string* list, const std::string& item) {
    *list += (list->empty() ? "" : ",\n") + item;
  }

  void DecodeCell(const Cell& cell) {
    double us[2] = {};
    double share[2] = {};
    for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
      Shape shape = cell.shape;
      shape.precision = precision;
      const int i = precision == Precision::kFp8Kv ? 0 : 1;
      us[i] = gpu_.DecodeUs(shape);
      share[i] = static_cast<double>(shape.KvBytes()) / us[i] / 1e3 / read_gbps_;
      Join(&cells_, CellJson(shape, us[i], ""));
    }
    const Shape& s = cell.shape;
    std::printf("%-14s %5zu %8d %3d/%-3d %5d %5d | %9.2f %6.3f | %9.2f %6.3f | %6.3f\n",
                cell.name.c_str(), s.kv_lens.size(), s.kv_lens[0], s.q_heads, s.kv_heads,
                s.head_dim, s.q_len, us[0], share[0], us[1], share[1], us[0] / us[1]);
    std::fflush(stdout);
  }

  Gpu gpu_;
  const double read_gbps_;
  const double copy_gbps_;
  std::vector<Shape> shapes_;
  std::string cells_;
  std::string sustained_;
  std::string appends_;
  std::string steps_;
  std::string invariant_;
  std::string generic_;
};

// The small cases of the kernels' test. Empty when all hold.
std::string CheckAnswers(bool generic) {
  kernels::cuda::CudaOptions options;
  options.generic_kernels = generic;
  auto backend = kernels::cuda::MakeCudaBackend(options);
  if (!backend.ok()) return std::string(backend.status().message());
  std::vector<kernels::KernelShape> shapes;
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t group = 1; group <= kGroupMax; ++group) {
      shapes.push_back({head_dim, group, Precision::kFp8Kv});
      shapes.push_back({head_dim, group, Precision::kBf16});
    }
  }
  const absl::Status warm = (*backend)->WarmUp(shapes, kItemsMax, kQLenMax, 256);
  if (!warm.ok()) return std::string(warm.message());
  kernels::cases::BackendDevice device(**backend,
                                       {int64_t{512} << 20, 1 << 20, int64_t{256} << 20});
  for (const auto& c : kernels::cases::Cases(kernels::cases::Set::kShort)) {
    const std::string error = kernels::cases::RunCase(device, c);
    if (!error.empty()) return error;
  }
  return "";
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!ParseFlags(argc, argv, &flags)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  for (const bool generic : {false, true}) {
    const std::string error = CheckAnswers(generic);
    if (!error.empty()) {
      std::fprintf(stderr, "wrong answer, nothing timed: %s\n", error.c_str());
      return 1;
    }
  }
  Bench bench;
  const std::vector<Cell> named = NamedCells();
  const std::vector<Cell> steps = {{"64 x 8192", Uniform(64, 8192, 64, 8)},
                                   {"64 x 1024", Uniform(64, 1024, 64, 8)}};
  bench.Decode(flags.only == "APPEND" ? steps : named);
  if (flags.only == "ALL") {
    bench.Decode(OtherCells());
    bench.Sustained(SustainedCells());
    Variant invariant;
    invariant.batch_invariant = true;
    bench.Variants(named, invariant, "batch_invariant", bench.batch_invariant());
    bench.Variants(LongCells(), invariant, "batch_invariant", bench.batch_invariant());
    Variant generic;
    generic.sm = 80;
    bench.Variants(named, generic, "generic", bench.generic());
  }
  if (flags.only != "NAMED") {
    Variant step;
    step.with_append = true;
    bench.Variants(steps, step, "append and decode", bench.step_with_append());
    bench.BulkAppends();
  }
  if (!flags.json.empty()) {
    std::ofstream file(flags.json);
    file << bench.Json(flags.commit);
    if (!file.good()) {
      std::fprintf(stderr, "could not write %s\n", flags.json.c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace fp8kvd::bench

int main(int argc, char** argv) { return fp8kvd::bench::Main(argc, argv); }
