// server/engine/step_context.h: what the steps of the engine's thread share, and a launch in
// flight.
#pragma once

#include <vector>

#include "cache/seq_store.h"
#include "config/options.h"
#include "kernels/backend.h"
#include "server/engine/batcher.h"
#include "server/engine/freed_pages.h"
#include "server/engine/model_setup.h"
#include "server/engine/page_map.h"
#include "server/engine/stats.h"

namespace fp8kvd::engine {

struct StepContext {
  const config::EngineOptions& options;
  const config::CacheOptions& cache_options;
  const std::vector<ModelSetup>& models;
  kernels::Backend& backend;
  cache::SeqStore& store;
  const PageMap& pages;
  FreedPages& freed;
  EngineStats& stats;
};

// Work that was handed to the device: a decode batch, or a slice of a bulk append.
struct Launch {
  kernels::FenceId fence;
  TimeUs begun = 0;
  std::vector<BatchItem> items;  // reserved for batch_rows_max
  AppendRequest* append = nullptr;
};

// Advice with RESOURCE_EXHAUSTED for pages or sequences: they come back when someone frees them or
// a lease ends. Far above a launch, so that retries cost nothing; far below a lease.
inline constexpr int32_t kRoomRetryMs = 1000;

}  // namespace fp8kvd::engine
