#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format 14 over every C++ file of the tree. `check_format.sh --fix` (make format) rewrites; without it the files that
# differ are named and the check fails. A file that git does not know yet counts too.
set -euo pipefail
cd "$(dirname "$0")/.."
format=${CLANG_FORMAT:-clang-format-14}
mapfile -d '' -t files < <(git ls-files -z -c -o --exclude-standard -- 'src/*.h' 'src/*.cc' 'tests/*.h' 'tests/*.cc')
present=()
for file in "${files[@]}"; do if [ -f "$file" ]; then present+=("$file"); fi; done
if [ "${1:-}" = --fix ]; then
  "$format" -i "${present[@]}"
  exit 0
fi
bad=0
for file in "${present[@]}"; do
  if ! "$format" --dry-run -Werror "$file" 2>/dev/null; then
    echo "$file: not formatted (make format)"
    bad=$((bad + 1))
  fi
done
echo "check_format: ${#present[@]} files, $bad not formatted"
[ "$bad" -eq 0 ]
