#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves what ops/op.h promises, with a small op made here: an incomplete op does not compile, a listed kernel that does not
# exist does not link, an op that is not in the list and an upward include are found by check_tree.py.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cxx=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

report() {  # report WHAT ok|wrong
  if [ "$2" = ok ]; then echo "contract: $1: ok"; else echo "contract: $1: DOES NOT HOLD"; failures=$((failures + 1)); fi
}

compile() { "$cxx" -std=c++20 -DFMT_HEADER_ONLY -I"$root/src" "$@" >"$work/log" 2>&1; }

cat >"$work/probe.cc" <<'PROBE'
#include "ops/op.h"
namespace moat {
struct ProbeArgs {};
void probe_cpu(Exec&, const ProbeArgs&);
#ifdef DEFINE_KERNEL
void probe_cpu(Exec&, const ProbeArgs&) {}
#endif
constexpr Kernel<ProbeArgs> kProbeKernels[] = {{"probe.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, probe_cpu}};
extern const Op<ProbeArgs> kProbe;
constinit const Op<ProbeArgs> kProbe{{
    .name = "probe",
    .check = [](const ProbeArgs&) { return Status(); },
    .describe = [](const ProbeArgs&) { return std::string(); },
    .cost = [](const ProbeArgs&) { return Cost(); },
    .reference = [](const ProbeArgs&) {},
    .cases = []() { return std::vector<Case>(); },
    .random_case = [](uint64_t) { return Case(); },
    .build = [](const Case&, CaseData&) { return ProbeArgs(); },
    .kernels = kProbeKernels,
}};
}  // namespace moat
int main() { return moat::kProbe->kernels.size() == 1 ? 0 : 1; }
PROBE

# 1. The complete op compiles, links and runs.
if compile -DDEFINE_KERNEL "$work/probe.cc" -o "$work/probe" && "$work/probe"; then
  report "a complete op builds" ok
else
  cat "$work/log"
  report "a complete op builds" wrong
fi

# 2. Without any one of its parts it does not compile, and the message says so.
for part in check describe cost reference cases random_case build; do
  grep -v "^    \.$part = " "$work/probe.cc" >"$work/partial.cc"
  if ! compile -fsyntax-only "$work/partial.cc" && grep -q "an op needs name, check" "$work/log"; then
    report "an op without $part does not compile" ok
  else
    report "an op without $part does not compile" wrong
  fi
done

# 3. A kernel that the table names but nobody defines does not link.
if ! compile "$work/probe.cc" -o "$work/probe" && grep -q "undefined reference to.*probe_cpu" "$work/log"; then
  report "a listed kernel that is not defined does not link" ok
else
  report "a listed kernel that is not defined does not link" wrong
fi

# 4. What only check_tree.py sees, tried on a copy.
mkdir "$work/tree"
cp -r "$root/src" "$work/tree/src"
check_copy() { python3 "$root/tools/check_tree.py" --root "$work/tree" >"$work/log" 2>&1; }

echo '#include "engine/engine.h"' >>"$work/tree/src/base/file.cc"
if ! check_copy && grep -q "src/base/file.cc:.*base may not include engine/engine.h" "$work/log"; then
  report "an upward include is found" ok
else
  report "an upward include is found" wrong
fi

sed -i '/TypedOp rms_norm(/d' "$work/tree/src/ops/all_ops.cc"
if ! check_copy && grep -q "kRmsNorm is missing from src/ops/all_ops.cc" "$work/log"; then
  report "an op missing from the list is found" ok
else
  report "an op missing from the list is found" wrong
fi

[ "$failures" -eq 0 ]
