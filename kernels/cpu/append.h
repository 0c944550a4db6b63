// kernels/cpu/append.h: quantises rows of K and V and writes them into blocks of page_layout.h.
// Codes and scales equal kernels/reference/append.h bit for bit.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/workers.h"

namespace fp8kvd::kernels::cpu {

// Runs to its end inside the call. Allocates nothing. Tokens are spread over the threads.
void Append(const AppendParams& params, Workers& workers);

}  // namespace fp8kvd::kernels::cpu
