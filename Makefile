# `make train` and `make test` do everything on a fresh machine; the other targets are listed by `make help`.
PYTHON ?= python3
VENV   ?= .venv
# SGLang pins its own torch and transformers, so it lives in an environment of its own.
SGLANG ?= .venv-sglang
# Which torch the set-up takes, see README "CPU or CUDA". Left alone when it is already in the environment.
TORCH  ?= torch==2.13.0
ARGS   ?=
# For the targets gemma-*: a folder with train.jsonl, dev.jsonl and corpus.jsonl, and where their runs go.
DATA   ?= data
GEMMA  ?= runs/gemma

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup sglang-env train bench test lint cold-start gemma-cold-start gemma-gpu ablation ablation-short results bench-evaluation sglang-client clean

help:
	@echo "make train       set up, train the default recipe (about 10 minutes on 2 cores), show the result"
	@echo "make setup       set up only: the virtual environment $(VENV) (make clean removes it)"
	@echo "make test        set up, lint, type-check and run the tests; make lint: without the tests"
	@echo "make sglang-env  set up SGLang in an environment of its own, for a CPU: --engine sglang --launch, and its tests"
	@echo "make bench       score the newest run on the embedded held-out benchmarks"
	@echo "make cold-start  rebuild the cold-start model that comes with the package"
	@echo "make gemma-cold-start DATA=FOLDER  Gemma 3 270M imitates the expert on real questions (one core)"
	@echo "make gemma-gpu DATA=FOLDER  the same on a GPU, then 50 steps of MemPO and 50 of GRPO from one cold start"
	@echo "make sglang-client  what the SGLang client costs, on a server that it starts"
	@echo "make bench-evaluation  what of an evaluation's time is not the model's"
	@echo "make results     the figures of docs/results.md: 3 seeds and the good-habit reference"
	@echo "make ablation    every algorithm of the family, 5 paired seeds (hours); make ablation-short: one short seed each"
	@echo "Arguments go through ARGS, e.g. make train ARGS='--seed 1 --set steps=40'"

setup: $(STAMP)

# torch first and alone, so that nothing else chooses its build; constraints.txt makes two machines equal.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25"
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[models,server,dev]"
	touch $@

sglang-env: $(SGLANG)/.installed

# Without their dependencies: those that a text model on a CPU needs are in requirements.txt, the CUDA ones are left out.
$(SGLANG)/.installed: tests/sglang/requirements.txt tests/sglang/packages.txt
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -c "import torch" 2>/dev/null || $(SGLANG)/bin/python -m pip install -q $(TORCH) triton==3.9.0
	$(SGLANG)/bin/python -m pip install -q -r tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install -q --no-deps -r tests/sglang/packages.txt
	touch $@

train: setup
	$(BIN)/python -m trainer.run $(ARGS)

bench: setup
	$(BIN)/python -m eval.bench $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not sglang" $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sglang $(ARGS) || test $$? -eq 5 # 5: ARGS chose none of them

cold-start: setup
	$(BIN)/python -m trainer.cold_start $(ARGS)

gemma-cold-start: setup
	$(BIN)/python -m trainer.imitate gemma3-270m-imitate --model "$$($(BIN)/python -m benchmarks.gemma $(GEMMA)/weights)" \
	  --data $(DATA)/train.jsonl --corpus $(DATA)/corpus.jsonl --eval-data $(DATA)/dev.jsonl --out $(GEMMA)/cold $(ARGS)

gemma-gpu: setup
	$(BIN)/python -m trainer.run gemma3-270m-gpu-mempo --model "$$($(BIN)/python -m benchmarks.gemma $(GEMMA)/weights)" \
	  --data $(DATA)/train.jsonl --corpus $(DATA)/corpus.jsonl --eval-data $(DATA)/dev.jsonl --out $(GEMMA)/mempo $(ARGS)
	$(BIN)/python -m trainer.run gemma3-270m-gpu-grpo --model $(GEMMA)/mempo/cold_start --set cold_start.source=none \
	  --data $(DATA)/train.jsonl --corpus $(DATA)/corpus.jsonl --eval-data $(DATA)/dev.jsonl --out $(GEMMA)/grpo $(ARGS)

ablation: setup
	$(BIN)/python -m benchmarks.ablation $(ARGS)

ablation-short: setup
	$(BIN)/python -m benchmarks.ablation --seeds 0 --runs runs/ablation-short --set steps=12 $(ARGS)

sglang-client: setup sglang-env
	$(BIN)/python -m benchmarks.sglang_client --launch $(ARGS)

results: setup
	$(BIN)/python -m benchmarks.results $(ARGS)

# What of an evaluation's time is not the model's.
bench-evaluation: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evaluation $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
