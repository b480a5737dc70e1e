# SPDX-License-Identifier: Apache-2.0
# The commands people type. Each is thin: CMakePresets.json says how things are built, packages.txt what they need.
MODEL ?= models/moat-nano
HOST ?= 127.0.0.1
PORT ?= 8080
JOBS ?= $(shell nproc)
FUZZ_STEPS ?= 1000000
# Under AddressSanitizer: what reads bytes from outside. Under ThreadSanitizer: what has threads.
ASAN_TESTS := base_test text_test scheduler_test loader_test dspark_config_test server_test server_reply_test
TSAN_TESTS := engine_test server_test server_reply_test

.DEFAULT_GOAL := help
.PHONY: help serve build packages test test-release test-asan test-tsan fuzz bench format tidy check clean

help:
	@echo "make serve    install what is missing, build, serve MODEL=$(MODEL) on HOST=$(HOST) PORT=$(PORT)"
	@echo "make build    build/release/moat"
	@echo "make test     release build with the fast suite, then $(ASAN_TESTS) under ASan and UBSan"
	@echo "make fuzz     scheduler and cache ledger under libFuzzer and ASan for FUZZ_STEPS=$(FUZZ_STEPS) steps (needs clang-14)"
	@echo "make bench    ceilings of this machine, then the engine on MODEL"
	@echo "make check    tree, op contract and formatting (make format repairs the last)"
	@echo "make clean    remove build/"

packages:
	@tools/install_packages.sh

build/release/build.ninja: CMakePresets.json | packages
	@cmake --preset release

build: packages build/release/build.ninja
	@cmake --build --preset release -j $(JOBS) --target moat

serve: build
	build/release/moat serve -m $(MODEL) --host $(HOST) --port $(PORT)

test: test-release test-asan

test-release: packages build/release/build.ninja
	cmake --build --preset release -j $(JOBS)
	ctest --test-dir build/release --output-on-failure --no-tests=error

test-asan: packages
	cmake --preset asan
	cmake --build --preset asan -j $(JOBS) --target $(ASAN_TESTS)
	ctest --test-dir build/asan --output-on-failure --no-tests=error -R '^($(subst $() ,|,$(ASAN_TESTS)))$$'

# Threads: the engine and the server under ThreadSanitizer.
test-tsan: packages
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS) --target $(TSAN_TESTS)
	ctest --test-dir build/tsan --output-on-failure --no-tests=error -R '^($(subst $() ,|,$(TSAN_TESTS)))$$'

# clang-14 is not in packages.txt: it is large, and nothing else needs it.
fuzz:
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS) --target scheduler_fuzz
	mkdir -p build/fuzz/corpus
	for i in 1 2 3 4 5 6 7 8; do head -c 8192 /dev/urandom > build/fuzz/corpus/start$$i; done
	MOAT_FUZZ_STEPS=$(FUZZ_STEPS) build/fuzz/scheduler_fuzz -max_len=8192 -len_control=0 -rss_limit_mb=8192 -artifact_prefix=build/fuzz/ build/fuzz/corpus

bench: build
	build/release/moat bench ceilings
	build/release/moat bench engine -m $(MODEL)

format: packages
	@tools/check_format.sh --fix

# Of the files that differ from BASE. clang-tidy-16 is not in packages.txt: it is large, and nothing else needs it.
BASE ?= main
tidy: build/release/build.ninja
	git diff --name-only --diff-filter=d $(BASE) -- 'src/*.cc' 'tests/*.cc' | xargs -r clang-tidy-16 --quiet -p build/release

check: packages
	@tools/check_tree.py
	@python3 tools/check_tree_test.py
	@tools/check_contract.sh
	@tools/check_format.sh

clean:
	rm -rf build
