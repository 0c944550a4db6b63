// server/make_catalog.h: what server/translate knows of the daemon, from its parts.
#pragma once

#include <vector>

#include "config/load.h"
#include "server/engines.h"
#include "server/translate/catalog.h"

namespace fp8kvd {

translate::Catalog MakeCatalog(const config::Loaded& loaded, Engines& engines);

}  // namespace fp8kvd
