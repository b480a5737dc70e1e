#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of the tree that no compiler checks; prints every violation as file:line: rule: what.

Rules: layers include downwards only; each third-party library has its place; vendor words stay in device files; every op is
in the list; Highway files name themselves; SPDX lines; file and tree sizes; environment reads; TODOs with an issue.
tools/check_tree_test.py has one violation of each.
"""
import argparse
import os
import re
import subprocess
import sys

# What a layer may include besides itself.
BELOW = {
    "base": set(),
    "core": {"base"},
    "ops": {"core", "base"},
    "model": {"ops", "core", "base"},
    "plan": {"model", "ops", "core", "base"},
    "engine": {"plan", "model", "ops", "core", "base"},
    "text": {"base"},
    "server": {"engine", "plan", "text", "model", "ops", "core", "base"},
    "main": {"server", "engine", "plan", "text", "model", "ops", "core", "base"},
}

# Third-party header prefix -> the files under src/ that may include it (regular expression). A prefix that is not here may
# not be included at all.
THIRD_PARTY = {
    "fmt/": r"",
    "nlohmann/": r"base/json",
    "hwy/": r"(core/(device|ceilings)|ops/)",
    "boost/asio": r"server/http\.cc$",
    "boost/beast": r"server/http\.cc$",
    "prometheus/": r"server/metrics\.cc$",
    "spdlog/": r"main/",
    "CLI/": r"main/main\.cc$",
    "zlib.h": r"main/gzip\.cc$",
}
# System headers without a slash that are not part of the C++ library pass; with a slash, these do.
SYSTEM = ("sys/", "netinet/", "arpa/", "linux/", "bits/")

VENDOR = re.compile(r"(^|[/_])(cuda|cublas|cub|cudnn|nvidia|nvml|nvrtc|nccl|hip|hipblas|rccl|rocm|rocblas|amd)", re.I)
VENDOR_FILES = re.compile(r"^src/(core/[^/]*gpu[^/]*|core/comm_[^/]*|ops/[^/]*_blas\.cc|ops/[^/]*_(sm|gfx)\d+[^/]*)$")

SOURCE = re.compile(r"^(src|tests|tools|fuzz)/.*\.(h|cc|cu|cuh|inc|py|sh|mjs|js)$|(^|/)CMakeLists\.txt$|^Makefile$|^\.ci/run$")
MAX_LINES = 900
MAX_TREE_BYTES = 50 * 2**20
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
TODO = re.compile(r"\b(TODO|FIXME)\b(?!\((#|issue )\d+\))")


def tree_files(root):
    """Paths of the tree: what git tracks or would add, or everything where there is no git."""
    if os.path.exists(os.path.join(root, ".git")):
        out = subprocess.run(["git", "-C", root, "ls-files", "-z", "-c", "-o", "--exclude-standard"],
                             check=True, stdout=subprocess.PIPE).stdout.decode()
        paths = sorted(set(p for p in out.split("\0") if p))
    else:
        paths = []
        for folder, dirs, names in os.walk(root):
            dirs[:] = [d for d in dirs if not (folder == root and d == "build")]
            paths += [os.path.relpath(os.path.join(folder, n), root) for n in names]
    return [p for p in sorted(paths) if os.path.isfile(os.path.join(root, p))]


class Checker:
    def __init__(self, root):
        self.root = root
        self.files = tree_files(root)
        self.violations = []

    def fail(self, path, line, rule, what):
        self.violations.append(f"{path}:{line}: {rule}: {what}")

    def lines(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()

    def check_include(self, path, number, quoted, angled):
        header = quoted or angled
        if VENDOR.search(header) and not VENDOR_FILES.match(path):
            self.fail(path, number, "vendor", f"{header} may be included by device and architecture files only")
        match = re.match(r"src/(\w+)/", path)
        if not match:
            return
        layer = match.group(1)
        if layer not in BELOW:
            return self.fail(path, number, "layers", f"src/{layer} is no layer; see ARCHITECTURE.md")
        if quoted:
            target = header.split("/")[0]
            if "/" in header and target not in BELOW:
                self.fail(path, number, "layers", f"{header} is in no layer")
            elif "/" in header and target != layer and target not in BELOW[layer]:
                allowed = ", ".join(sorted(BELOW[layer])) or "nothing"
                self.fail(path, number, "layers", f"{layer} may not include {header} (below {layer}: {allowed})")
            return
        for prefix, where in THIRD_PARTY.items():
            if header.startswith(prefix):
                if not re.match("src/" + where, path):
                    self.fail(path, number, "third-party", f"<{header}> may be included by src/{where} only")
                return
        if "/" in header and not header.startswith(SYSTEM) and not VENDOR.search(header):
            self.fail(path, number, "third-party", f"<{header}> is of no library listed in tools/check_tree.py")

    def check_source(self, path):
        lines = self.lines(path)
        first = lines[1] if lines and lines[0].startswith("#!") and len(lines) > 1 else lines[0] if lines else ""
        if "SPDX-License-Identifier: Apache-2.0" not in first:
            self.fail(path, 1, "spdx", "the first line must carry SPDX-License-Identifier: Apache-2.0")
        if len(lines) > MAX_LINES:
            self.fail(path, len(lines), "size", f"{len(lines)} lines, at most {MAX_LINES}: split the file")
        includes_foreach = False
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if match:
                self.check_include(path, number, match.group(1), match.group(2))
                includes_foreach |= match.group(2) == "hwy/foreach_target.h"
            if path.startswith("tools/check_tree"):
                continue
            if TODO.search(line):
                self.fail(path, number, "todo", "a TODO carries its issue: TODO(#12)")
            if path.startswith("src/") and not path.startswith("src/main/options") and re.search(r"\bgetenv\b", line):
                self.fail(path, number, "getenv", "environment variables are read in src/main/options only")
        if includes_foreach:
            self.check_highway(path, lines)

    def check_highway(self, path, lines):
        """foreach_target.h compiles HWY_TARGET_INCLUDE once per instruction set: it must be the file itself."""
        own = path[len("src/"):]
        wanted = f'#define HWY_TARGET_INCLUDE "{own}"'
        if wanted not in lines:
            self.fail(path, 1, "highway", f"must say {wanted}")

    def check_ops(self):
        list_path = "src/ops/all_ops.cc"
        if list_path not in self.files:
            return
        listed = set(re.findall(r"\bTypedOp\s+\w+\((k\w+)\)", "\n".join(self.lines(list_path))))
        for path in self.files:
            if not re.match(r"src/ops/[^/]*\.h$", path):
                continue
            for number, line in enumerate(self.lines(path), 1):
                match = re.match(r"extern const Op<\w+> (k\w+);", line)
                if match and match.group(1) not in listed:
                    self.fail(path, number, "op-list", f"{match.group(1)} is missing from {list_path}")

    def check_tree_size(self):
        total = sum(os.path.getsize(os.path.join(self.root, p)) for p in self.files)
        if total >= MAX_TREE_BYTES:
            self.fail(".", 0, "size", f"the tree has {total / 2**20:.1f} MiB, at most {MAX_TREE_BYTES >> 20}")
        return total

    def run(self):
        for path in self.files:
            if SOURCE.search(path):
                self.check_source(path)
        self.check_ops()
        return self.check_tree_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    root = parser.parse_args().root
    checker = Checker(root)
    total = checker.run()
    for violation in checker.violations:
        print(violation)
    count = len(checker.violations)
    print(f"check_tree: {len(checker.files)} files, {total / 2**20:.1f} MiB, {count} violation{'' if count == 1 else 's'}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
