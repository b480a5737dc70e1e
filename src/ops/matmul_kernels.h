// SPDX-License-Identifier: Apache-2.0
// Kernels of the matmul family. `_cpu` are plain C++, `_hwy` are vectorised with run-time dispatch.
#pragma once

#include "ops/matmul.h"

namespace moat {

void matmul_cpu(Exec& exec, const MatmulArgs& args);
void matmul_hwy(Exec& exec, const MatmulArgs& args);
void head_matmul_cpu(Exec& exec, const HeadMatmulArgs& args);
void head_matmul_hwy(Exec& exec, const HeadMatmulArgs& args);

}  // namespace moat
