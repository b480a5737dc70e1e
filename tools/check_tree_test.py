#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_tree.py against small trees with one violation each: every rule must be seen, and a clean tree must pass."""
import os
import tempfile
import unittest

from check_tree import MAX_LINES, Checker

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"


class CheckTreeTest(unittest.TestCase):
    def violations(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                full = os.path.join(root, path)
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "w", encoding="utf-8") as f:
                    f.write(text)
            checker = Checker(root)
            checker.run()
            return checker.violations

    def one(self, files, start):
        found = self.violations(files)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(start), found[0])

    def include(self, path, header, start=None):
        self.one({path: SPDX + f"#include {header}\n"}, start or f"{path}:2: layers")

    def test_clean(self):
        self.assertEqual(self.violations({
            "src/engine/a.cc": SPDX + '#include <vector>\n#include <sys/mman.h>\n#include "ops/b.h"\n#include "base/c.h"\n',
            "src/server/http.cc": SPDX + "#include <boost/asio/post.hpp>\n",
            "src/core/device_gpu.cc": SPDX + "#include <cuda_runtime.h>\n",
            "src/ops/mla_sm90.cu": SPDX + "#include <cuda_fp16.h>\n",
            "src/main/options.cc": SPDX + 'const char* v = std::getenv("MOAT_X");\n// TODO(#4): later\n',
            "tests/a.cc": SPDX + 'const char* v = std::getenv("MOAT_X");\n',
            "src/ops/x_hwy.cc": SPDX + '#define HWY_TARGET_INCLUDE "ops/x_hwy.cc"\n#include <hwy/foreach_target.h>\n',
            "src/ops/x.h": SPDX + "extern const Op<XArgs> kX;\n",
            "src/ops/all_ops.cc": SPDX + "static const TypedOp x(kX);\n",
        }), [])

    def test_upward_includes(self):
        for path, header in [("src/base/a.h", '"core/b.h"'), ("src/core/a.h", '"ops/b.h"'), ("src/ops/a.h", '"model/b.h"'),
                             ("src/model/a.cc", '"plan/b.h"'), ("src/plan/a.cc", '"engine/b.h"'),
                             ("src/engine/a.cc", '"server/b.h"'), ("src/server/a.cc", '"main/b.h"')]:
            self.include(path, header)

    def test_text_and_engine_do_not_know_each_other(self):
        self.include("src/text/a.cc", '"engine/b.h"')
        self.include("src/engine/a.cc", '"text/b.h"')

    def test_unknown_layers(self):
        self.include("src/base/a.cc", '"util/b.h"')
        self.include("src/util/a.cc", "<vector>")

    def test_third_party(self):
        self.include("src/server/server.cc", "<boost/asio/post.hpp>", "src/server/server.cc:2: third-party")
        self.include("src/engine/a.cc", "<spdlog/spdlog.h>", "src/engine/a.cc:2: third-party")
        self.include("src/text/a.cc", "<nlohmann/json.hpp>", "src/text/a.cc:2: third-party")
        self.include("src/text/a.cc", "<unicode/uchar.h>", "src/text/a.cc:2: third-party")

    def test_vendor_words(self):
        self.include("src/ops/norm.cc", "<cuda_runtime.h>", "src/ops/norm.cc:2: vendor")
        self.include("src/engine/a.cc", "<hip/hip_runtime.h>", "src/engine/a.cc:2: vendor")

    def test_op_missing_from_the_list(self):
        self.one({"src/ops/x.h": SPDX + "extern const Op<XArgs> kX;\n", "src/ops/all_ops.cc": SPDX}, "src/ops/x.h:2: op-list")

    def test_highway_names_itself(self):
        self.one({"src/ops/x_hwy.cc": SPDX + '#define HWY_TARGET_INCLUDE "ops/y_hwy.cc"\n#include <hwy/foreach_target.h>\n'},
                 "src/ops/x_hwy.cc:1: highway")

    def test_lines_of_a_file(self):
        self.one({"tools/a.py": "x = 1\n"}, "tools/a.py:1: spdx")
        self.one({"src/base/a.cc": SPDX + "\n" * MAX_LINES}, f"src/base/a.cc:{MAX_LINES + 1}: size")
        self.one({"src/base/a.cc": SPDX + '// getenv("X")\n'}, "src/base/a.cc:2: getenv")
        self.one({"tests/a.cc": SPDX + "// TODO: some day\n"}, "tests/a.cc:2: todo")


if __name__ == "__main__":
    unittest.main()
