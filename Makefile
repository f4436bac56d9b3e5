# The front door. Every target does its own set-up, in any order, from a fresh clone. `make help`.
#
# Settings (make NAME=value, or from the environment):
#   JOBS=2            compile and test jobs at a time; compiling against torch takes 1.5 GB each
#   TESTS=regex       only the tests whose name matches; tests that use libtorch by suite: TESTS=ddp_test.DdpTest
#   CONVOY_TORCH=dir  use the libtorch in dir instead of the one of .venv
#   CONVOY_VENV=dir   the Python environment, instead of .venv
#   CMAKE_ARGS=...    more arguments for cmake, such as -DCONVOY_BUILD_TORCH=OFF
#   PREFIX=dir        where `make install` puts things
#   WORLD=4           how many ranks `make test-pytorch` has
#   TEXT=file         what `make demo` learns
#   SEEDS=10000       how many programs `make soak-coll` runs
#   SOAK_SECONDS=600  how long `make soak` runs
#   FUZZ_SECONDS=60   how long `make fuzz` runs each fuzzer
#   BOOTSTRAP=off     do not look for missing packages
#   V=1               show every command of a build instead of one line of progress
JOBS ?= 2
TESTS ?=
CONVOY_TORCH ?=
CONVOY_VENV ?= .venv
CMAKE_ARGS ?=
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 600
SEEDS ?= 10000
WORLD ?= 4
TEXT ?=
BOOTSTRAP ?= on
V ?=
export CONVOY_TORCH CONVOY_VENV FUZZ_SECONDS V
# Without it ccache reads the precompiled header, 765 MB, for each file: 2 s of a miss, all of a hit.
export CCACHE_INODECACHE ?= 1

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

targets := build test test-full test-pytorch test-pytorch-rpc demo lint lint-full asan tsan tsan-torch fuzz verify bench bench-coll \
           bench-quick bench-group bench-faults bench-flight bench-python bench-ddp bench-endpoint bench-rpc bench-autograd \
           bench-share bench-report \
           soak soak-coll tidy check-headers \
           check-layers docs format install python wheel clean help
settings := JOBS SOAK_SECONDS SEEDS WORLD TEXT TESTS CONVOY_TORCH CONVOY_VENV CMAKE_ARGS PREFIX DESTDIR FUZZ_SECONDS BOOTSTRAP V

# A word that is no target, or a setting that is none, stops before anything is done.
unknown := $(firstword $(filter-out $(targets),$(MAKECMDGOALS)) \
             $(filter-out $(settings:%=%=%),$(filter-out -%,$(MAKEOVERRIDES))))
ifneq ($(unknown),)
$(error $(shell tools/make_help '$(unknown)' $(settings)))
endif
ifeq ($(shell [[ '$(JOBS)$(FUZZ_SECONDS)$(SEEDS)' =~ ^[1-9][0-9]*$$ ]] || echo bad),bad)
$(error JOBS ($(JOBS)), SEEDS ($(SEEDS)) and FUZZ_SECONDS ($(FUZZ_SECONDS)) are numbers)
endif

# One test more than cores: a fifth of the tests' time is spent waiting.
ctest = ctest --test-dir build/$(1) -j$$(($(JOBS) + 1)) --output-on-failure --no-label-summary --no-tests=error \
        $(if $(TESTS),-R '$(TESTS)')
pip = $(CONVOY_VENV)/bin/python -m pip --disable-pip-version-check
compile = tools/progress build/$(1) $(JOBS)
# The sanitizers' shadow memory needs a kernel that does not spread mappings too far.
no_aslr = $$(setarch -R true 2>/dev/null && echo setarch -R)
sanitizer_options = \
  ASAN_OPTIONS=halt_on_error=1:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1 \
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
tsan_torch_tests := autograd_test autograd_random_test pipeline_test rpc_session_test rpc_rref_test rpc_codec_test optim_rpc_test

##@ Everyday
build: ready-release ## build everything into build/release (the default; programs in build/release/bin)
	@$(call compile,release)

test: build ## build and run the tests (all but the long ones)
	@$(call ctest,release) -LE '^long$$'

test-full: build ## all tests, the long ones too
	@$(call ctest,release)

test-pytorch: build ## PyTorch's own test suite on backend convoy, WORLD=4 or 8 ranks (a quarter of an hour)
	@tests/pytorch/suite.py --build build/release --python $(CONVOY_VENV)/bin/python --world $(WORLD)

test-pytorch-rpc: build ## PyTorch's own tests of torch.distributed.rpc on Convoy's transport (a quarter of an hour)
	@tests/pytorch/rpc_suite.py --build build/release --python $(CONVOY_VENV)/bin/python --jobs $(JOBS)

demo: demo-plan ready-release ## train a character-level GPT with two processes, on TEXT=file or on three classics
	@$(call compile,release) convoy_command char_gpt
	@TEXT='$(TEXT)' examples/char_gpt/demo

lint: ready-lint ## what CI checks without running: format, layers, clang on src and public headers, clang-tidy on changes
	@JOBS=$(JOBS) tools/lint

lint-full: ready-lint ## the same, and clang-tidy on all files: tests, benchmarks, all headers
	@JOBS=$(JOBS) tools/lint --full

##@ Deeper checks
asan: ready-asan ## the torch-free core and its tests under AddressSanitizer and UBSan
	@$(call compile,asan)
	@$(sanitizer_options) $(no_aslr) $(call ctest,asan) -LE '^long$$'

tsan: ready-tsan ## the same under ThreadSanitizer
	@$(call compile,tsan)
	@$(sanitizer_options) $(no_aslr) $(call ctest,tsan) -LE '^long$$'

tsan-torch: ready-tsan-torch ## RPC, RRefs, distributed autograd and optimizers under ThreadSanitizer (libtorch is not instrumented)
	@$(call compile,tsan-torch) $(tsan_torch_tests)
	@JOBS=$(JOBS) TESTS='$(TESTS)' $(no_aslr) tools/tsan_torch $(tsan_torch_tests)

fuzz: ready-fuzz ## every fuzzer for FUZZ_SECONDS
	@tools/fuzz

bench: bench-quick bench-group bench-faults ## the benchmarks that take minutes

bench-coll: bootstrap-peers build ## collectives beside Gloo, Open MPI, oneCCL and the machine's limit, into build/bench/coll.json
	@bench/coll.py

bench-quick: bootstrap-peers build ## the same and calls in two minutes: fewer sizes, fewer rounds
	@failed=0; for bench in coll rpc; do bench/$$bench.py --quick || failed=1; done; exit $$failed

bench-group: build ## what process groups cost beside the collectives below, into build/bench/group.json
	@bench/group.py

bench-faults: build ## how long survivors take to learn of a killed rank, into build/bench/faults.json
	@mkdir -p build/bench; BENCH_JSON=build/bench/faults.json build/release/bin/bench_faults --gtest_brief=1

bench-flight: build ## cost of the flight record for each operation
	@build/release/bin/bench_flight

bench-python: build ## torch.distributed on backend convoy beside Gloo, into build/bench/python.json
	@$(CONVOY_VENV)/bin/python bench/python.py

bench-ddp: build ## DistributedDataParallel beside Python's on Gloo, into build/bench/ddp.json
	@failed=0; for bench in ddp exposed; do bench/$$bench.py || failed=1; done; exit $$failed

bench-endpoint: bootstrap-peers build ## messages between processes beside ZeroMQ, Open MPI and the machine's limits, into build/bench/endpoint.json
	@bench/endpoint.py

bench-rpc: bootstrap-actors build ## calls with tensors beside PyTorch's RPC, gRPC, Ray and Monarch, into build/bench/rpc.json
	@bench/rpc.py

bench-autograd: build ## backward passes across workers beside torch.distributed.autograd, into build/bench/autograd.json
	@failed=0; for bench in autograd pipeline; do bench/$$bench.py || failed=1; done; exit $$failed

bench-share: build ## tensors between processes beside torch.multiprocessing, into build/bench/share.json
	@failed=0; for bench in share queues processes; do bench/$$bench.py || failed=1; done; exit $$failed

bench-report: ## draw what the benchmarks left in build/bench: report.html there, and the README's chart
	@bench/report.py --chart docs/images/speed.svg

soak-coll: build ## SEEDS random programs of collectives and messages (10000: about a quarter of an hour)
	@for ((first = 1; first <= ($(SEEDS) + 5) / 6; first += 50)); do \
	  CONVOY_SEEDS=$$first:50 build/release/bin/coll_group_random_test --gtest_brief=1 || exit; done

soak: build ## a training job, a queue and published weights under random faults, for SOAK_SECONDS (600)
	@SOAK_SECONDS=$(SOAK_SECONDS) OMP_NUM_THREADS=1 build/release/bin/soak_test --gtest_brief=1

verify: bootstrap-verify ## check the models of the lock-free protocols with Spin
	@tools/verify

tidy: ready-lint ## clang-tidy over all files (lint: only over changed ones)
	@JOBS=$(JOBS) tools/tidy --all

check-headers: ready-lint ## each header compiles alone
	@$(call compile,lint) check_headers

check-layers: ## each file includes only its own layer and those below
	@tools/check_layers.py

##@ Other
docs: bootstrap-docs ## the documentation as a site with search and an API reference, in build/docs/site
	@tools/docs_site

format: bootstrap-lint ## format all C++ files
	@git ls-files -co --exclude-standard '*.h' '*.cpp' | xargs -r $(CONVOY_VENV)/bin/clang-format -i

install: ready-release ## build libraries and command, and install them into PREFIX
	@$(call compile,release) product
	@cmake --install build/release --prefix '$(PREFIX)'

python: bootstrap-python ## install the Python package into .venv
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(pip) install --no-build-isolation .

wheel: bootstrap-python ## a wheel in build/wheels, tried out in a fresh environment
	@rm -rf build/wheels
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(pip) wheel --no-build-isolation --no-deps -w build/wheels .
	@$(CONVOY_VENV)/bin/python tests/python/wheel_check.py build/wheels/torch_convoy-*.whl

clean: ## remove the build folder (.venv stays)
	rm -rf build

help: ## show this
	@tools/make_help

# --- Set-up ---------------------------------------------------------------------------------------

bootstrap_groups_release = build
bootstrap_groups_lint = build lint
bootstrap_groups_python = build python
bootstrap_groups_fuzz = core clang
bootstrap_groups_verify = core verify
bootstrap_groups_docs = docs
bootstrap_groups_peers = build peers
bootstrap_groups_actors = build peers actors
bootstrap_groups_asan = core
bootstrap_groups_tsan = core
bootstrap_groups_tsan-torch = core torch

# Takes 0.1 s with nothing to do, so it needs no stamp that could be wrong.
bootstrap-%:
	@[ $(BOOTSTRAP) = off ] || tools/bootstrap $(bootstrap_groups_$*)

ready-%: bootstrap-% build/%/build.ninja ;

demo-plan:
	@echo "make demo: sets up what is missing (a minute), builds libraries, launcher and char_gpt, and trains a"
	@echo "small GPT with two processes (three minutes). Seven to ten minutes in all on two cores; less the next time."

# Configured once; Ninja runs CMake again when a CMake file changes. Another setting starts afresh.
build/%/build.ninja: CMakePresets.json build/%/settings
	@echo "configuring build/$*"; cmake --fresh --preset $* $(if $(CONVOY_TORCH),-DCONVOY_TORCH='$(abspath $(CONVOY_TORCH))') $(CMAKE_ARGS) \
	   >build/$*/configure.log 2>&1 || { cat build/$*/configure.log; \
	   echo "make: configuring build/$* failed (see above). 'tools/bootstrap --check all' tells what is missing; 'make clean' starts afresh." >&2; exit 1; }
	@touch $@

.PRECIOUS: build/%/build.ninja build/%/settings
build/%/settings: always
	@mkdir -p $(@D); text='$(CONVOY_TORCH) $(CONVOY_VENV) $(CMAKE_ARGS)'; \
	  [ ! -e '$(CONVOY_VENV)/oneccl/packages' ] || text+=' oneccl'; \
	  [ ! -e /usr/include/zmq.h ] || text+=' zmq'; \
	  [ ! -e /usr/include/grpcpp/grpcpp.h ] || text+=' grpc'; \
	  [ -e $@ ] && [ "$$text" = "$$(cat $@)" ] || printf '%s\n' "$$text" >$@

.PHONY: $(targets) demo-plan always
