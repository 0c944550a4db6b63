// server/translate/checks.h: what both messages with tensors are held against, and how their
// tensors lie in a slot. For requests.cc and append_message.cc alone.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "server/translate/catalog.h"
#include "server/translate/rows.h"
#include "server/translate/wire.h"

namespace fp8kvd::translate {

inline constexpr int64_t kBf16Bytes = 2;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Bytes that a tensor takes in a slot.
int64_t Aligned(int64_t bytes);

// Whether the tensors lie in one piece each, at even bytes, as CopyRows takes them.
bool AreWhole(std::initializer_list<const Pieces*> tensors);

// Whether their rows are such as StreamRows takes, and worth it.
bool CanStream(std::initializer_list<const Pieces*> tensors, int64_t row_bytes);

absl::Status CheckLayer(const CatalogModel& model, uint32_t layer);

// Two tensors of one size that come together.
absl::Status CheckKv(int64_t k_size, int64_t v_size, int64_t wanted, absl::string_view shape);

absl::Status BadValue(absl::string_view name, const BadElement& bad, int64_t row_elements,
                      int32_t head_dim);

}  // namespace fp8kvd::translate
