// tests/fuzz/wire_agrees.h: holds translate's wire reader against protobuf's own parse of the same
// bytes, cut into pieces at chosen places. Shared by the fuzz target and the unit test.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/wire.h"

namespace fp8kvd::translate {

// Cuts bytes into pieces of the given sizes, over and over; a size of 0 makes an empty piece. The
// rest is one piece when there are no sizes.
inline std::vector<Piece> Cut(absl::Span<const uint8_t> bytes, const std::vector<size_t>& sizes) {
  std::vector<Piece> pieces;
  for (size_t at = 0, i = 0; at < bytes.size(); ++i) {
    // Every second lap takes at least a byte, so that sizes of 0 end too.
    size_t size = sizes.empty() ? bytes.size() : sizes[i % sizes.size()];
    if (i >= sizes.size() && size == 0) size = 1;
    pieces.push_back(bytes.subspan(at, size));
    at += pieces.back().size();
  }
  return pieces;
}

inline bool Same(const Pieces& ours, const std::string& theirs) {
  if (ours.size != static_cast<int64_t>(theirs.size())) return false;
  std::string bytes(theirs.size(), '\0');
  ours.CopyTo(reinterpret_cast<uint8_t*>(bytes.data()));
  return bytes == theirs;
}

inline bool Same(const WireName& ours, const std::string& theirs) {
  return ours.size == static_cast<int64_t>(theirs.size()) &&
         ours.kept == theirs.substr(0, kNameBytesMax);
}

inline bool Same(const WireHandle& ours, const v1::Handle& theirs) {
  return ours.seq_id == theirs.seq_id() && ours.generation == theirs.generation() &&
         ours.incarnation == theirs.incarnation() && ours.home == theirs.home();
}
inline bool Same(uint64_t ours, uint64_t theirs) { return ours == theirs; }
inline bool Same(uint32_t ours, uint32_t theirs) { return ours == theirs; }
inline bool Same(float ours, float theirs) { return std::memcmp(&ours, &theirs, 4) == 0; }

template <typename T, int64_t Max, typename Repeated>
bool Same(const Bounded<T, Max>& ours, const Repeated& theirs) {
  if (ours.count != theirs.size()) return false;
  if (static_cast<int64_t>(ours.kept.size()) != std::min<int64_t>(ours.count, Max)) return false;
  for (size_t i = 0; i < ours.kept.size(); ++i) {
    if (!Same(ours.kept[i], theirs.Get(static_cast<int>(i)))) return false;
  }
  return true;
}

// What differs, empty if nothing does.
inline std::string Difference(const WireDecode& ours, const v1::DecodeRequest& theirs) {
  if (ours.request_id != theirs.request_id()) return "request_id";
  if (!Same(ours.model, theirs.model())) return "model";
  if (ours.layer != theirs.layer()) return "layer";
  if (!Same(ours.handles, theirs.handles())) return "handles";
  if (!Same(ours.positions, theirs.positions())) return "positions";
  if (!Same(ours.q_lens, theirs.q_lens())) return "q_lens";
  if (!Same(ours.q, theirs.q())) return "q";
  if (!Same(ours.k, theirs.k())) return "k";
  if (!Same(ours.v, theirs.v())) return "v";
  if (!Same(ours.sink_logits, theirs.sink_logits())) return "sink_logits";
  if (ours.omit_sinks != theirs.omit_sinks()) return "omit_sinks";
  if (ours.want_lse != theirs.want_lse()) return "want_lse";
  if (ours.out_type != static_cast<int32_t>(theirs.out_type())) return "out_type";
  if (ours.timeout_ms != theirs.timeout_ms()) return "timeout_ms";
  return "";
}

inline std::string Difference(const WireAppend& ours, const v1::AppendRequest& theirs) {
  if (!Same(ours.model, theirs.model())) return "model";
  if (ours.has_handle != theirs.has_handle()) return "has_handle";
  if (!Same(ours.handle, theirs.handle())) return "handle";
  if (ours.layer != theirs.layer()) return "layer";
  if (ours.layers_count != theirs.layers_count()) return "layers_count";
  if (ours.pos != theirs.pos()) return "pos";
  if (ours.n != theirs.n()) return "n";
  if (!Same(ours.k, theirs.k())) return "k";
  if (!Same(ours.v, theirs.v())) return "v";
  if (ours.skip_to != theirs.skip_to()) return "skip_to";
  return "";
}

// Empty when both accept the bytes and read the same, or both refuse them.
template <typename Ours, typename Theirs>
std::string Disagreement(absl::Span<const uint8_t> bytes, const std::vector<size_t>& sizes) {
  Ours ours;
  Theirs theirs;
  const absl::Status read = ours.Read(Cut(bytes, sizes));
  const bool parsed = theirs.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (read.ok() != parsed) {
    return absl::StrCat("protobuf ", parsed ? "accepts" : "refuses", ", we say ", read.ToString());
  }
  return parsed ? Difference(ours, theirs) : "";
}

}  // namespace fp8kvd::translate
