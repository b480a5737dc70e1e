// SPDX-License-Identifier: Apache-2.0
// `moat bench ceilings`: read bandwidth and f32 rate of this machine.
#include "base/json.h"
#include "core/ceilings.h"
#include "core/device.h"
#include "main/commands.h"

namespace moat {

Status bench_ceilings_command(const BenchCeilingsOptions& o) {
  ThreadPool pool(o.threads > 0 ? o.threads : num_usable_cpus());
  const double bandwidth = measure_read_bandwidth(pool);
  const double flops = measure_f32_flops(pool);
  if (o.json) {
    fmt::print("{}\n", Json::object({{"isa", host_arch().level},
                                     {"threads", pool.num_threads()},
                                     {"read_bandwidth_gb_per_second", bandwidth / 1e9},
                                     {"f32_gflops", flops / 1e9}})
                           .dump());
    return {};
  }
  fmt::print("{}  threads {}\n  read bandwidth  {:8.1f} GB/s  (1 GiB buffer)\n  f32 FMA         {:8.1f} GFLOP/s\n",
             host_arch().name, pool.num_threads(), bandwidth / 1e9, flops / 1e9);
  return {};
}

}  // namespace moat
