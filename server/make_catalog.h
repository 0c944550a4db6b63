// server/make_catalog.h: what server/translate knows of the daemon, from its parts.
#pragma once

#include <vector>

#include "config/load.h"
#include "config/model.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/translate/catalog.h"

namespace fp8kvd {

translate::Catalog MakeCatalog(const config::Loaded& loaded, const kernels::DeviceInfo& device,
                               const std::vector<config::ModelPools>& pools,
                               engine::Engine& engine);

}  // namespace fp8kvd
