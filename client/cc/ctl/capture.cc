#include "client/cc/ctl/capture.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

#include "client/cc/ctl/files.h"

namespace fp8kvd::ctl {
namespace {

constexpr int64_t kDimMax = int64_t{1} << 24;  // of any one dimension of a capture
constexpr uint64_t kErrorsBytesMax = uint64_t{64} << 20;

// Reads numbers out of the metadata and remembers the first that is wrong.
class Numbers {
 public:
  explicit Numbers(const Safetensors& file) : file_(file) {}

  int64_t Count(const std::string& key, int64_t min) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(Text(key), &number) || number < min || number > kDimMax) {
      Fail(key, absl::StrCat("a whole number from ", min, " to ", kDimMax));
    }
    return number;
  }

  float Real(const std::string& key) {
    float number = 0;
    if (!absl::SimpleAtof(Text(key), &number) || !(number >= 0 && number < 1e6F)) {
      Fail(key, "a number from 0 to 1e6");
    }
    return number;
  }

  const absl::Status& status() const { return status_; }

 private:
  std::string Text(const std::string& key) const { return file_.Metadata(key).value_or(""); }

  void Fail(const std::string& key, const std::string& wanted) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("metadata ", key, " is \"", Text(key), "\", wanted ", wanted));
  }

  const Safetensors& file_;
  absl::Status status_;
};

template <typename T>
void Take(absl::StatusOr<std::vector<T>> read, std::vector<T>& into, absl::Status& status) {
  if (!read.ok()) {
    status.Update(read.status());
  } else {
    into = *std::move(read);
  }
}

}  // namespace

absl::StatusOr<Capture> MakeCapture(const Safetensors& file) {
  Capture c;
  Numbers numbers(file);
  c.layer = static_cast<int32_t>(numbers.Count("layer", 0));
  c.tokens = numbers.Count("tokens", 1);
  c.steps = numbers.Count("steps", 1);
  c.q_heads = static_cast<int32_t>(numbers.Count("q_heads", 1));
  c.kv_heads = static_cast<int32_t>(numbers.Count("kv_heads", 1));
  c.head_dim = static_cast<int32_t>(numbers.Count("head_dim", 1));
  c.window = static_cast<int32_t>(numbers.Count("window", 0));
  c.sm_scale = numbers.Real("sm_scale");
  c.softcap = numbers.Real("softcap");
  absl::Status status = numbers.status();
  status.Update(file.Metadata("model").status());
  if (!status.ok()) return status;
  c.model = *file.Metadata("model");
  Take(file.Bf16("k", {c.tokens, c.kv_heads, c.head_dim}), c.k, status);
  Take(file.Bf16("v", {c.tokens, c.kv_heads, c.head_dim}), c.v, status);
  Take(file.Bf16("q", {c.steps, c.q_heads, c.head_dim}), c.q, status);
  Take(file.F32("out", {c.steps, c.q_heads, c.head_dim}), c.out, status);
  Take(file.I32("positions", {c.steps}), c.positions, status);
  if (!status.ok()) return status;
  for (int64_t step = 0; step < c.steps; ++step) {
    if (c.positions[step] != c.tokens - c.steps + step) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", step, " stands at position ", c.positions[step], ", wanted ",
                       c.tokens - c.steps + step, ": the steps are the last tokens, in order"));
    }
  }
  return c;
}

absl::StatusOr<Capture> ReadCapture(const std::string& path) {
  absl::StatusOr<Safetensors> file = Safetensors::Read(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Capture> capture = MakeCapture(*file);
  if (!capture.ok()) {
    return absl::Status(capture.status().code(),
                        absl::StrCat(path, ": ", capture.status().message()));
  }
  return capture;
}

std::string ErrorsPath(const std::string& capture_path) {
  const size_t cut = capture_path.rfind("_layer");
  const size_t slash = capture_path.rfind('/');
  if (cut == std::string::npos || (slash != std::string::npos && slash > cut)) return "";
  return capture_path.substr(0, cut) + "_errors.json";
}

absl::StatusOr<double> ReadExpectedError(const std::string& errors_path, int32_t layer) {
  absl::StatusOr<std::string> json = ReadFile(errors_path, kErrorsBytesMax);
  if (!json.ok()) return json.status();
  google::protobuf::Value at;
  if (!google::protobuf::util::JsonStringToMessage(*json, &at).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(errors_path, " is not JSON; give another"));
  }
  const std::string steps[] = {"per_layer", "decode", absl::StrCat(layer), "row", "op"};
  for (const std::string& key : steps) {
    const auto found = at.struct_value().fields().find(key);
    if (found == at.struct_value().fields().end()) {
      return absl::NotFoundError(absl::StrCat(errors_path, " has no per_layer.decode.", layer,
                                              ".row.op; give the errors of this model"));
    }
    at = google::protobuf::Value(found->second);
  }
  if (at.kind_case() != google::protobuf::Value::kNumberValue || !(at.number_value() > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(errors_path, ": the error of layer ", layer, " is not a number above 0"));
  }
  return at.number_value();
}

}  // namespace fp8kvd::ctl
