// server/translate/requests.h: the two messages with tensors, from their bytes to what the engine
// takes. In two steps, so that nothing is held for a message that is wrong:
//   Check(catalog, message)   reads it in place and holds every count, size and number against the
//                             model and the limits; takes no staging memory
//   Load(slot)                copies the tensors into the slot, once; then, on that copy, refuses
//                             what is not finite or >= 2^28 and digests the rows of K and V
// after which its requests can be submitted and live until their Done. A Decode is one request for
// each device that its sequences are on, mostly one: their rows go into that device's slot, and
// back from there to their places in the reply.
//
// Does not manage: slots and their return, deadlines (server/rpc); whether a handle exists,
//   lengths, rooms (the engine). A handle of no device of ours goes to the first, which refuses it.
// Threads: one message at a time per object. Memory is kept from message to message, but for what a
//   refused one took: an object that waits for the next holds no more than tensors came for.
// Errors: INVALID_ARGUMENT, NOT_FOUND (model). What is wrong with one item of a Decode is that
//   item's status, and the message goes on.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/engine/messages.h"
#include "server/translate/catalog.h"
#include "server/translate/rows.h"
#include "server/translate/wire.h"

namespace fp8kvd::translate {

// Tensors that came beside a message instead of in it, as shared memory has them. Their bytes may
// change while they are read: Load copies them once, and only the copy is looked at.
struct Beside {
  Piece q;  // none of an append
  Piece k;
  Piece v;
};

class DecodeMessage {
 public:
  // beside, where given, stands for the message's own q, k and v.
  absl::Status Check(const Catalog& catalog, absl::Span<const Piece> message,
                     const Beside* beside = nullptr);
  // After Check, also after one that failed (0 where it failed too early): what the reply goes back
  // to.
  uint64_t request_id() const { return wire_.request_id; }
  uint32_t timeout_ms() const { return wire_.timeout_ms; }

  // After a Check that was OK: one for each device, ascending.
  absl::Span<engine::DecodePart* const> parts() const { return parts_; }
  // slot has the part's slot_bytes.
  void Load(size_t part, uint8_t* slot);

  // The message's items in its own order, whichever part they are in.
  size_t items() const { return items_.size(); }
  const engine::DecodeItem& item(size_t index) const {
    return items_[origins_.empty() ? index : static_cast<size_t>(item_at_[index])];
  }
  // The first row of an item (of a part) in the message's tensors and its reply's.
  int64_t RowOf(const engine::DecodeItem& item) const {
    return origins_.empty() ? item.row : origins_[&item - items_.data()].row;
  }
  // Bytes of one query token's row in out; tokens of all items.
  int64_t out_row_bytes() const { return out_row_bytes_; }
  int64_t out_bytes() const { return tokens_ * out_row_bytes_; }
  int64_t lse_bytes() const { return lse_bytes_; }  // 0: not asked
  int64_t q_heads() const { return model_->geometry.q_heads; }
  int64_t tokens() const { return tokens_; }

 private:
  absl::Status CheckAll(const Catalog& catalog, absl::Span<const Piece> message,
                        const Beside* beside);
  absl::Status CheckItems(const Catalog& catalog);
  absl::Status CheckTensors(const Catalog& catalog);
  absl::Status CheckSinks();
  void RefuseRepeated();
  int64_t SlotBytes(int64_t tokens) const;
  // Makes the parts; with several, items_ are put in their order.
  void Split(const Catalog& catalog);
  engine::DecodePart& AddPart(int32_t device);
  // A walk over each tensor.
  struct Fields {
    RangeReader q;
    RangeReader k;
    RangeReader v;
  };
  // Checks and digests an item's rows, which are in the slot; or brings them there, too.
  void CheckItem(const engine::DecodeRequest& request, engine::DecodeItem* item) const;
  void BringItem(const engine::DecodeRequest& request, Fields* fields,
                 engine::DecodeItem* item) const;
  void Refuse(engine::DecodeItem* item, const char* name, const BadElement& bad,
              int64_t row_elements) const;

  // How rows come into a slot.
  enum class Loading : uint8_t {
    kPieces,  // whole tensors, of any pieces, before they are checked
    kRows,    // an item's rows at a time, checked on their way
    kStream,  // so, of any pieces, past the caches
  };

  // Where an item of a part stands in the message.
  struct Origin {
    int32_t index = 0;
    int32_t row = 0;
  };

  WireDecode wire_;
  const CatalogModel* model_ = nullptr;
  int32_t model_index_ = 0;
  int32_t layer_ = 0;
  kernels::OutType out_type_ = kernels::OutType::kBf16;
  std::vector<engine::DecodeItem> items_;
  std::vector<Origin> origins_;               // [items_]; empty: items_ are in the message's order
  std::vector<int32_t> item_at_;              // by index in the message, its place in items_
  std::vector<engine::DecodeItem> unsorted_;  // scratch of Split
  std::vector<uint32_t> order_;               // scratch of RefuseRepeated
  std::deque<std::optional<engine::DecodePart>> part_at_;  // memory for parts_
  std::vector<engine::DecodePart*> parts_;
  int64_t tokens_ = 0;
  int64_t out_row_bytes_ = 0;
  int64_t lse_bytes_ = 0;
  Loading loading_ = Loading::kPieces;
};

class AppendMessage {
 public:
  absl::Status Check(const Catalog& catalog, absl::Span<const Piece> message,
                     const Beside* beside = nullptr);
  int64_t slot_bytes() const { return slot_bytes_; }
  // INVALID_ARGUMENT when a value is out of range: nothing may be submitted then.
  absl::Status Load(uint8_t* slot);
  // The same in parts: of large messages a part takes some 10 us. True: more is left.
  void BeginLoad(uint8_t* slot);
  absl::StatusOr<bool> ContinueLoad();

  engine::AppendRequest& request() { return *request_; }
  const engine::AppendRequest& request() const { return *request_; }

 private:
  absl::Status CheckAll(const Catalog& catalog, absl::Span<const Piece> message,
                        const Beside* beside);
  absl::Status CheckPlace(const Catalog& catalog);
  // One layer's rows for slice_tokens tokens, or for those that are left.
  struct Slice {
    int64_t first_row;
    int64_t rows;
  };
  Slice SliceAt(int64_t index) const;
  int64_t RowElements() const;
  absl::Status CheckSlice(const Slice& slice, uint64_t* digest) const;
  void BeginStream(uint64_t seed);
  absl::Status ContinueStream();
  absl::Status BadRow(const char* tensor, BadElement bad, const Slice& slice) const;

  WireAppend wire_;
  const CatalogModel* model_ = nullptr;
  std::optional<engine::AppendRequest> request_;
  std::vector<uint64_t> digests_;
  std::vector<int64_t> seq_lens_;
  int64_t slot_bytes_ = 0;
  bool streams_ = false;
  int64_t loaded_ = 0;     // slices
  bool has_keys_ = false;  // of the one that is streamed
  std::optional<RowStream> stream_;
  std::optional<RangeReader> from_k_;  // what it streams from
  std::optional<RangeReader> from_v_;
};

// The index of a configured model; an empty name means the only one. NOT_FOUND names those that
// are.
absl::StatusOr<int32_t> FindModel(const Catalog& catalog, absl::string_view name,
                                  int64_t name_size);

cache::SeqHandle ToHandle(const WireHandle& handle);

}  // namespace fp8kvd::translate
