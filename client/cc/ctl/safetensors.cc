#include "client/cc/ctl/safetensors.h"

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

#include "client/cc/ctl/files.h"

namespace fp8kvd::ctl {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

constexpr uint64_t kLengthBytes = 8;  // the file starts with the header's length

std::string Text(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// The number as an integer from 0 to 2^53, below which a JSON number is exact.
absl::StatusOr<int64_t> Count(const Value& value, const std::string& what) {
  constexpr double kExactMax = 9007199254740992.0;
  const double number = value.number_value();
  if (value.kind_case() != Value::kNumberValue || !(number >= 0 && number <= kExactMax) ||
      number != static_cast<double>(static_cast<int64_t>(number))) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is not a whole number from 0 to 2^53; write the file again"));
  }
  return static_cast<int64_t>(number);
}

absl::StatusOr<std::vector<int64_t>> Counts(const Struct& entry, const std::string& key,
                                            const std::string& name) {
  const auto found = entry.fields().find(key);
  if (found == entry.fields().end() || !found->second.has_list_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " has no list ", key, "; write the file again"));
  }
  std::vector<int64_t> counts;
  for (const Value& value : found->second.list_value().values()) {
    absl::StatusOr<int64_t> count = Count(value, absl::StrCat("tensor ", name, ": ", key));
    if (!count.ok()) return count.status();
    counts.push_back(*count);
  }
  return counts;
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Read(const std::string& path) {
  absl::StatusOr<std::string> bytes = ReadFile(path, kSafetensorsFileBytesMax);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<Safetensors> file = Parse(*std::move(bytes));
  if (!file.ok()) {
    return absl::Status(file.status().code(), absl::StrCat(path, ": ", file.status().message()));
  }
  return file;
}

absl::StatusOr<Safetensors> Safetensors::Parse(std::string bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "holds ", bytes.size(), " bytes, a safetensors file at least 8; give a capture"));
  }
  for (uint64_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  if (header_bytes > kSafetensorsHeaderBytesMax || header_bytes > bytes.size() - kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("says that its header takes ", header_bytes, " bytes, but holds ",
                     bytes.size() - kLengthBytes, " after the length (at most ",
                     kSafetensorsHeaderBytesMax, " allowed); not a safetensors file, or cut off"));
  }
  Safetensors file;
  file.bytes_ = std::move(bytes);
  file.data_begin_ = kLengthBytes + header_bytes;
  if (absl::Status s = file.ParseHeader(file.bytes_.substr(kLengthBytes, header_bytes)); !s.ok()) {
    return s;
  }
  return file;
}

absl::Status Safetensors::ParseHeader(const std::string& json) {
  Struct header;
  if (!google::protobuf::util::JsonStringToMessage(json, &header).ok()) {
    return absl::InvalidArgumentError("its header is not a JSON object; not a safetensors file");
  }
  const uint64_t data_bytes = bytes_.size() - data_begin_;
  for (const auto& [name, value] : header.fields()) {
    if (!value.has_struct_value()) {
      return absl::InvalidArgumentError(absl::StrCat("header entry ", name, " is not an object"));
    }
    const Struct& entry = value.struct_value();
    if (name == "__metadata__") {
      for (const auto& [key, text] : entry.fields()) metadata_[key] = text.string_value();
      continue;
    }
    absl::StatusOr<std::vector<int64_t>> shape = Counts(entry, "shape", name);
    if (!shape.ok()) return shape.status();
    absl::StatusOr<std::vector<int64_t>> offsets = Counts(entry, "data_offsets", name);
    if (!offsets.ok()) return offsets.status();
    if (offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] ||
        static_cast<uint64_t>((*offsets)[1]) > data_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " lies at ", Text(*offsets),
                                                     ", the file holds ", data_bytes,
                                                     " bytes of data; cut off? fetch it again"));
    }
    const auto dtype = entry.fields().find("dtype");
    tensors_[name] = {.dtype = dtype == entry.fields().end() ? "" : dtype->second.string_value(),
                      .shape = *std::move(shape),
                      .begin = static_cast<uint64_t>((*offsets)[0]),
                      .end = static_cast<uint64_t>((*offsets)[1])};
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Safetensors::Metadata(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) {
    return absl::NotFoundError(absl::StrCat("no metadata ", key, "; give a capture"));
  }
  return found->second;
}

template <typename T>
absl::StatusOr<std::vector<T>> Safetensors::Elements(const std::string& name, const char* dtype,
                                                     const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat("no tensor ", name, "; give a capture"));
  }
  const Tensor& tensor = found->second;
  if (tensor.dtype != dtype || tensor.shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " is ", tensor.dtype, " ",
                                                   Text(tensor.shape), ", wanted ", dtype, " ",
                                                   Text(shape)));
  }
  // The offsets are within the file, so a product that passes its size is wrong, never an overflow.
  uint64_t elements = 1;
  const uint64_t elements_held = (tensor.end - tensor.begin) / sizeof(T);
  for (const int64_t dim : shape) {
    const auto factor = static_cast<uint64_t>(dim);
    if (factor != 0 && elements > elements_held / factor) elements = elements_held + 1;
    if (elements <= elements_held) elements *= factor;
  }
  if (elements != elements_held || (tensor.end - tensor.begin) % sizeof(T) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " holds ", tensor.end - tensor.begin, " bytes, its shape ",
                     Text(shape), " of ", dtype, " wants another number"));
  }
  std::vector<T> out(elements);
  if (elements > 0) {
    std::memcpy(out.data(), bytes_.data() + data_begin_ + tensor.begin, elements * sizeof(T));
  }
  return out;
}

absl::StatusOr<std::vector<uint16_t>> Safetensors::Bf16(const std::string& name,
                                                        const std::vector<int64_t>& shape) const {
  return Elements<uint16_t>(name, "BF16", shape);
}

absl::StatusOr<std::vector<float>> Safetensors::F32(const std::string& name,
                                                    const std::vector<int64_t>& shape) const {
  return Elements<float>(name, "F32", shape);
}

absl::StatusOr<std::vector<int32_t>> Safetensors::I32(const std::string& name,
                                                      const std::vector<int64_t>& shape) const {
  return Elements<int32_t>(name, "I32", shape);
}

}  // namespace fp8kvd::ctl
