#include "server/engine/snapshot_format.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include <xxhash.h>
#ifdef FP8KVD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // the same functions and values, by the widest vectors of the machine
#endif

#include "config/base/check.h"

namespace fp8kvd::engine {
namespace {

constexpr char kMagic[] = {'F', 'P', '8', 'K', 'V', 'S', 'N', 'P'};
constexpr size_t kPreambleBytes = 16;
constexpr size_t kFrameHeadBytes = 16;

// Numbers into bytes, of whatever order the machine has.
template <typename Number>
void Put(Number number, uint8_t* at) {
  for (size_t i = 0; i < sizeof(Number); ++i) {
    at[i] = static_cast<uint8_t>(static_cast<uint64_t>(number) >> (8 * i));
  }
}

template <typename Number>
Number Get(const uint8_t* at) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) number |= uint64_t{at[i]} << (8 * i);
  return static_cast<Number>(number);
}

uint64_t CheckOf(uint64_t before, FrameKind kind, absl::Span<const uint8_t> bytes) {
  uint8_t parts[16];
  Put(static_cast<uint32_t>(kind), parts);
  Put(static_cast<uint32_t>(bytes.size()), parts + 4);
  Put(XXH3_64bits_withSeed(bytes.data(), bytes.size(), before), parts + 8);
  return XXH3_64bits(parts, sizeof(parts));
}

class Encoder {
 public:
  template <typename Number>
  void Add(Number number) {
    uint8_t bytes[sizeof(Number)];
    Put(number, bytes);
    text_.append(reinterpret_cast<const char*>(bytes), sizeof(bytes));
  }
  void AddCount(size_t count) {
    FP8KVD_CHECK(count <= std::numeric_limits<uint32_t>::max());
    Add(static_cast<uint32_t>(count));
  }
  void AddText(const std::string& text) {
    AddCount(text.size());
    text_ += text;
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

// Reads what Encoder wrote; once something is missing all is 0.
class Decoder {
 public:
  explicit Decoder(const std::string& text)
      : at_(reinterpret_cast<const uint8_t*>(text.data())), left_(text.size()) {}

  template <typename Number>
  Number Next() {
    if (left_ < sizeof(Number)) {
      Fail();
      return Number{};
    }
    const auto number = Get<Number>(at_);
    at_ += sizeof(Number);
    left_ -= sizeof(Number);
    return number;
  }
  // Elements of so many bytes at least, which must be there: no list is made larger than its text.
  size_t Count(size_t element_bytes) {
    const auto count = Next<uint32_t>();
    if (count > left_ / element_bytes) Fail();
    return is_ok_ ? count : 0;
  }
  std::string Text() {
    const size_t count = Count(1);
    std::string text(reinterpret_cast<const char*>(at_), count);
    at_ += count;
    left_ -= count;
    return text;
  }
  // All was there, and nothing more.
  bool is_whole() const { return is_ok_ && left_ == 0; }

 private:
  void Fail() {
    is_ok_ = false;
    left_ = 0;
  }

  const uint8_t* at_;
  size_t left_;
  bool is_ok_ = true;
};

uint32_t FormatOf(const SnapshotHead& head) {
  return head.devices == 1 ? kSnapshotFormatOfOne : kSnapshotFormatOfSeveral;
}

std::string Encode(const SnapshotHead& head) {
  Encoder out;
  out.AddText(head.version);
  for (const int64_t number : {head.unix_ms, head.seqs, head.pages, head.bytes}) out.Add(number);
  out.AddCount(head.facts.size());
  for (const SnapshotFact& fact : head.facts) {
    out.AddText(fact.name);
    out.AddText(fact.value);
  }
  for (const std::vector<std::string>* names : {&head.models, &head.tenants}) {
    out.AddCount(names->size());
    for (const std::string& name : *names) out.AddText(name);
  }
  if (FormatOf(head) == kSnapshotFormatOfSeveral) out.Add(head.devices);
  return out.Take();
}

bool Decode(const std::string& text, uint32_t format, SnapshotHead* head) {
  Decoder in(text);
  head->version = in.Text();
  for (int64_t* number : {&head->unix_ms, &head->seqs, &head->pages, &head->bytes}) {
    *number = in.Next<int64_t>();
  }
  head->facts.resize(in.Count(8));
  for (SnapshotFact& fact : head->facts) {
    fact.name = in.Text();
    fact.value = in.Text();
  }
  for (std::vector<std::string>* names : {&head->models, &head->tenants}) {
    names->resize(in.Count(4));
    for (std::string& name : *names) name = in.Text();
  }
  head->devices = format == kSnapshotFormatOfOne ? 1 : in.Next<uint32_t>();
  return in.is_whole();
}

void Add(const cache::StoreImage::Group& group, Encoder* out) {
  out->Add(group.first_pos);
  out->AddCount(group.seq_lens.size());
  for (size_t i = 0; i < group.seq_lens.size(); ++i) {
    out->Add(group.seq_lens[i]);
    out->AddCount(group.replays[i].size());
    for (const cache::ReplayEntry& entry : group.replays[i]) {
      out->Add(entry.pos);
      out->Add(entry.n);
      out->Add(entry.digest);
    }
  }
  out->AddCount(group.pages.size());
  for (const uint32_t page : group.pages) out->Add(page);
}

void Next(Decoder* in, cache::StoreImage::Group* group) {
  group->first_pos = in->Next<int64_t>();
  group->seq_lens.resize(in->Count(12));
  group->replays.resize(group->seq_lens.size());
  for (size_t i = 0; i < group->seq_lens.size(); ++i) {
    group->seq_lens[i] = in->Next<int64_t>();
    group->replays[i].resize(in->Count(16));
    for (cache::ReplayEntry& entry : group->replays[i]) {
      entry.pos = in->Next<int32_t>();
      entry.n = in->Next<int32_t>();
      entry.digest = in->Next<uint64_t>();
    }
  }
  group->pages.resize(in->Count(4));
  for (uint32_t& page : group->pages) page = in->Next<uint32_t>();
}

std::string Encode(const cache::StoreImage& image) {
  Encoder out;
  out.Add(image.incarnation);
  out.AddCount(image.generations.size());
  for (const uint32_t generation : image.generations) out.Add(generation);
  out.AddCount(image.pages.size());
  for (const auto& model : image.pages) {
    out.AddCount(model.size());
    for (const auto& group : model) out.Add(uint64_t{group.size()});
  }
  out.AddCount(image.seqs.size());
  for (const cache::StoreImage::Seq& seq : image.seqs) {
    out.Add(seq.index);
    out.Add(seq.model);
    out.Add(static_cast<uint32_t>(seq.tenant));
    out.Add(seq.expected_tokens);
    out.Add(seq.ttl_ms);
    out.Add(static_cast<uint64_t>(seq.parent.seq_id));
    out.Add(seq.parent.generation);
    out.AddCount(seq.groups.size());
    for (const cache::StoreImage::Group& group : seq.groups) Add(group, &out);
  }
  return out.Take();
}

bool Decode(const std::string& text, cache::StoreImage* image,
            std::vector<std::vector<uint64_t>>* page_counts) {
  Decoder in(text);
  image->incarnation = in.Next<uint64_t>();
  image->generations.resize(in.Count(4));
  for (uint32_t& generation : image->generations) generation = in.Next<uint32_t>();
  page_counts->resize(in.Count(4));
  for (std::vector<uint64_t>& model : *page_counts) {
    model.resize(in.Count(8));
    for (uint64_t& pages : model) pages = in.Next<uint64_t>();
  }
  image->seqs.resize(in.Count(44));
  for (cache::StoreImage::Seq& seq : image->seqs) {
    seq.index = in.Next<uint32_t>();
    seq.model = in.Next<int32_t>();
    seq.tenant = static_cast<cache::TenantId>(in.Next<uint32_t>());
    seq.expected_tokens = in.Next<int64_t>();
    seq.ttl_ms = in.Next<int64_t>();
    seq.parent.seq_id = static_cast<cache::SeqId>(in.Next<uint64_t>());
    seq.parent.generation = in.Next<uint32_t>();
    seq.groups.resize(in.Count(16));
    for (cache::StoreImage::Group& group : seq.groups) Next(&in, &group);
  }
  return in.is_whole();
}

const char* NameOf(FrameKind kind) {
  constexpr const char* kNames[] = {"head", "sequences", "pages", "end"};
  return kNames[static_cast<uint32_t>(kind) - 1];
}

}  // namespace

absl::Status SnapshotWriter::Frame(FrameKind kind, absl::Span<const uint8_t> bytes) {
  FP8KVD_CHECK(static_cast<int64_t>(bytes.size()) <= kFrameBytesMax);
  check_ = CheckOf(check_, kind, bytes);
  uint8_t head[kFrameHeadBytes];
  Put(static_cast<uint32_t>(kind), head);
  Put(static_cast<uint32_t>(bytes.size()), head + 4);
  Put(check_, head + 8);
  absl::Status status = sink_->Write(head);
  if (status.ok() && !bytes.empty()) status = sink_->Write(bytes);
  return status;
}

absl::Status SnapshotWriter::Stream(FrameKind kind, const std::string& text) {
  uint8_t size[sizeof(uint64_t)];
  Put(uint64_t{text.size()}, size);
  const std::string all = std::string(reinterpret_cast<const char*>(size), sizeof(size)) + text;
  absl::Span<const uint8_t> left(reinterpret_cast<const uint8_t*>(all.data()), all.size());
  while (!left.empty()) {
    const auto part = left.subspan(0, static_cast<size_t>(kFrameBytesMax));
    if (absl::Status status = Frame(kind, part); !status.ok()) return status;
    left.remove_prefix(part.size());
  }
  return absl::OkStatus();
}

absl::Status SnapshotWriter::Begin(const SnapshotHead& head) {
  uint8_t preamble[kPreambleBytes] = {};
  std::memcpy(preamble, kMagic, sizeof(kMagic));
  Put(FormatOf(head), preamble + sizeof(kMagic));
  check_ = XXH3_64bits(preamble, sizeof(preamble));
  absl::Status status = sink_->Write(preamble);
  if (status.ok()) status = Stream(FrameKind::kHead, Encode(head));
  return status;
}

absl::Status SnapshotWriter::Store(const cache::StoreImage& image) {
  return Stream(FrameKind::kStore, Encode(image));
}

absl::Status SnapshotWriter::Pages(absl::Span<const uint8_t> bytes) {
  return Frame(FrameKind::kPages, bytes);
}

absl::Status SnapshotWriter::End() { return Frame(FrameKind::kEnd, {}); }

absl::Status SnapshotReader::Damaged(const char* how) const {
  return absl::DataLossError(
      absl::StrCat("it is damaged in its ", part_, ", before byte ", at_, ": ", how));
}

absl::Status SnapshotReader::Exactly(absl::Span<uint8_t> bytes) {
  const absl::StatusOr<int64_t> read = source_->Read(bytes);
  if (!read.ok()) return read.status();
  at_ += *read;
  if (*read == static_cast<int64_t>(bytes.size())) return absl::OkStatus();
  return Damaged("it ends there");
}

absl::Status SnapshotReader::FrameHead(FrameKind kind, uint32_t* bytes, uint64_t* check) {
  part_ = NameOf(kind);
  uint8_t head[kFrameHeadBytes];
  if (absl::Status status = Exactly(absl::MakeSpan(head)); !status.ok()) return status;
  *bytes = Get<uint32_t>(head + 4);
  *check = Get<uint64_t>(head + 8);
  if (Get<uint32_t>(head) != static_cast<uint32_t>(kind)) return Damaged("another part is there");
  if (*bytes > kFrameBytesMax) return Damaged("a size that cannot be is there");
  return absl::OkStatus();
}

absl::Status SnapshotReader::FrameBytes(FrameKind kind, uint64_t check, absl::Span<uint8_t> bytes) {
  if (absl::Status status = Exactly(bytes); !status.ok()) return status;
  check_ = CheckOf(check_, kind, bytes);
  return check_ == check ? absl::OkStatus() : Damaged("its checksum is another");
}

absl::StatusOr<std::string> SnapshotReader::Stream(FrameKind kind) {
  std::string text;
  uint64_t size = sizeof(uint64_t);  // with the number itself, which is not known yet
  for (bool is_first = true; is_first || text.size() < size; is_first = false) {
    uint32_t bytes = 0;
    uint64_t check = 0;
    if (absl::Status status = FrameHead(kind, &bytes, &check); !status.ok()) return status;
    const size_t before = text.size();
    text.resize(before + bytes);
    absl::Status status = FrameBytes(
        kind, check, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()) + before, bytes));
    if (!status.ok()) return status;
    if (is_first && bytes >= sizeof(uint64_t)) {
      const auto told = Get<uint64_t>(reinterpret_cast<const uint8_t*>(text.data()));
      size = told > std::numeric_limits<int64_t>::max() ? told : told + sizeof(uint64_t);
    }
    if (bytes == 0) return Damaged("a frame is empty");
  }
  if (text.size() != size) return Damaged("its size is another");
  return text.substr(sizeof(uint64_t));
}

absl::StatusOr<SnapshotHead> SnapshotReader::Begin() {
  uint8_t preamble[kPreambleBytes];
  if (absl::Status status = Exactly(absl::MakeSpan(preamble)); !status.ok()) return status;
  if (std::memcmp(preamble, kMagic, sizeof(kMagic)) != 0) {
    return absl::FailedPreconditionError("it is no snapshot of fp8kvd");
  }
  const auto format = Get<uint32_t>(preamble + sizeof(kMagic));
  if (format != kSnapshotFormatOfOne && format != kSnapshotFormatOfSeveral) {
    return absl::FailedPreconditionError(
        absl::StrCat("it has format ", format, ", this fp8kvd reads ", kSnapshotFormatOfOne,
                     " and ", kSnapshotFormatOfSeveral, "; start the version that wrote it"));
  }
  check_ = XXH3_64bits(preamble, sizeof(preamble));
  const absl::StatusOr<std::string> text = Stream(FrameKind::kHead);
  if (!text.ok()) return text.status();
  SnapshotHead head;
  if (!Decode(*text, format, &head)) return Damaged("it cannot be read");
  return head;
}

absl::StatusOr<cache::StoreImage> SnapshotReader::Store(
    std::vector<std::vector<uint64_t>>* page_counts) {
  const absl::StatusOr<std::string> text = Stream(FrameKind::kStore);
  if (!text.ok()) return text.status();
  cache::StoreImage image;
  if (!Decode(*text, &image, page_counts)) return Damaged("it cannot be read");
  return image;
}

absl::Status SnapshotReader::Pages(absl::Span<uint8_t> bytes) {
  uint32_t size = 0;
  uint64_t check = 0;
  if (absl::Status status = FrameHead(FrameKind::kPages, &size, &check); !status.ok()) {
    return status;
  }
  if (size != bytes.size()) return Damaged("its size is another");
  return FrameBytes(FrameKind::kPages, check, bytes);
}

absl::Status SnapshotReader::End() {
  uint32_t size = 0;
  uint64_t check = 0;
  absl::Status status = FrameHead(FrameKind::kEnd, &size, &check);
  if (status.ok() && size != 0) status = Damaged("its size is another");
  if (status.ok()) status = FrameBytes(FrameKind::kEnd, check, {});
  if (!status.ok()) return status;
  uint8_t more = 0;
  const absl::StatusOr<int64_t> read = source_->Read(absl::MakeSpan(&more, 1));
  if (!read.ok()) return read.status();
  return *read == 0 ? absl::OkStatus() : Damaged("more follows");
}

}  // namespace fp8kvd::engine
