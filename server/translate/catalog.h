// server/translate/catalog.h: the daemon as a request meets it: its models and what one message may
// ask for. Built once at start (server/daemon.cc), read by every thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/base/geometry.h"
#include "config/base/limits.h"

namespace fp8kvd::translate {

struct CatalogModel {
  ModelGeometry geometry;
  std::string precision_reason;
  std::vector<int64_t> group_page_bytes;  // [groups] on the device in use
  // Tokens that one slice of an append to a layer takes [layers] (engine::AppendSliceTokens); of
  // several layers the fewest.
  std::vector<int32_t> slice_tokens;
};

struct CatalogDevice {
  std::string name;   // "cuda:0"
  std::string model;  // as its vendor calls it
};

struct Catalog {
  std::vector<CatalogModel> models;  // indexed as the engine's
  std::string version;
  uint64_t incarnation = 0;
  std::string device_kind;             // "cpu", "cuda"
  std::vector<CatalogDevice> devices;  // by home; empty: one without a name
  std::string host_id;                 // of this boot of this machine
  int64_t message_bytes_max = kMessageBytesMax;
  int64_t slot_bytes_max = 0;  // of one message's tensors with its reply's
  // Large tensors go past this processor's caches: a device reads them.
  bool streams_rows = false;
  int64_t seqs_max = 0;
  int64_t seq_len_max = kSeqLenMax;
  int64_t lease_ttl_ms = 0;  // of who asks for none
  int64_t lease_ttl_ms_max = 0;

  // Where a handle's sequence is. One of no device of ours is for the first to refuse.
  int32_t DeviceOf(uint32_t home) const {
    return home < devices.size() ? static_cast<int32_t>(home) : 0;
  }
};

}  // namespace fp8kvd::translate
