# The front door: `make help`. CMake does the building; these targets only put its steps in order.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

CONFIG ?= configs/local.yaml
ARGS ?=
PRESET ?= release
CMAKE_ARGS ?=
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)

build_dir = $(if $(filter release,$(1)),build,build-$(1))
BUILD := $(call build_dir,$(PRESET))

.PHONY: help
help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12
	@echo
	@echo 'Variables: CONFIG=$(CONFIG)  ARGS="--set train.steps=5"  PRESET=$(PRESET) (cmake --list-presets)'
	@echo '           CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=80"  PREFIX=$(PREFIX)  JOBS=$(JOBS)'

.PHONY: deps
deps: ## install what is missing, or say what is
	@tools/setup.sh

.PHONY: build
build: deps ## configure and compile
	@cmake --preset $(PRESET) $(CMAKE_ARGS)
	@cmake --build $(BUILD) --parallel $(JOBS)

.PHONY: train
train: build ## train the run of CONFIG, with ARGS added to the command line
	@$(BUILD)/bin/oomb train $(CONFIG) $(ARGS)

.PHONY: test
test: build ## build and run every test
	@ctest --preset $(PRESET) --parallel $(JOBS)

.PHONY: check
check: ## build and test the parts that need no LibTorch and no GPU
	@tools/setup.sh --no-torch
	@cmake --preset check $(CMAKE_ARGS)
	@cmake --build $(call build_dir,check) --parallel $(JOBS)
	@ctest --preset check --parallel $(JOBS)

.PHONY: demos
demos: build ## both demos, each measured against what it has to reach
	@tools/demos.sh $(BUILD)/bin

.PHONY: install
install: build ## install programs, example runs and batch scripts below PREFIX
	@cmake --install $(BUILD) --prefix $(abspath $(PREFIX))

.PHONY: format
format: ## rewrite the C++ and CUDA files as clang-format 14 does
	@tools/lint.sh fix

.PHONY: lint
lint: ## check format, includes, headers; clang-tidy after `make check`
	@tools/lint.sh
