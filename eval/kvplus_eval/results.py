"""Result rows: one JSON object a strategy, appended to `results.jsonl`, with all that is needed to read it later.

Schema `kvplus-eval/1`, kind `eval`:

    schema, kind, run, date   schema name and version; kind of row; id of the run; UTC time of its start
    strategy, status, reason  status is ok, refused or failed; reason says why there are no figures, else null
    traceback                 of a failure, else null
    claimed_bits, plan        bits that the strategy's entry claims or null; one line a layer from the cache
    metrics, units            figure -> number or null (empty unless ok); figure -> {unit, better}
    curve                     [tokens, bytes] after each chunk of the first window
    windows                   column of positions -> its mean in each window, for paired comparisons
    contexts                  one object a context length: context_tokens, decode_ms_per_token, prefill_ms, cache_bytes
    tasks                     one object an answer: task, length_tokens, depth, sample, exact, nats
    layers                    one object a layer read back: layer, key_error, value_error (relative)
    layer_sensitivity         one object a layer quantized alone: layer, kl_nats; empty unless asked for
    findings                  faults that don't void the figures, in words
    model                     name, how, revision, dtype, parameters, attention
    reference_model           the same of the model whose full cache figures compare with, null for the model's own
    text                      name, sha256 (of the decoded text, UTF-8, newlines as line ends), file_sha256 (of the
                              file's bytes, as sha256sum prints it; null without a file), characters
    suite, protocol           name of the suite or null; the fields of `Protocol`
    versions, device          library -> version or null; type, name, threads, processes
    git_commit                of this package's checkout, with `+changes` when its code differs, or null
    question                  fingerprint of all that the figures depend on, strategies apart, the code included

Version 1 may gain keys, which older rows lack; a key that changes its meaning or goes makes version 2.
docs/evaluation.md says more.

Rows of kind `bench` (in `bench.jsonl`) share schema, kind, run, date, strategy, status, reason, traceback, model,
versions, device and git_commit, and have `bench` (see `kvplus_eval.bench`) instead of the rest.
Rows of kind `kernel-bench` (in `kernels.jsonl`) have no model, and `kernel` (see `kvplus_eval.kernel_bench`) and
`launch`, how the Triton kernels were launched or null for their defaults.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_kvplus
from hf_kvplus.loading import ModelSource
from kvplus_eval.data import EvalText
from kvplus_eval.guards import claimed_stored_bits
from kvplus_eval.metrics import column_units, summarize
from kvplus_eval.outcome import Outcome
from kvplus_eval.protocol import Protocol

SCHEMA = "kvplus-eval/1"
LIBRARIES = (
    "hf_kvplus",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "optimum-quanto",
    "hqq",
    "numba",
    "triton",
)

Row = dict[str, Any]


def run_facts(model: PreTrainedModel, source: ModelSource, processes: int = 1) -> Row:
    """Collects what all rows of a run share.

    Args:
        model: The model.
        source: Where it came from.
        processes: How many processes share the work.

    Returns:
        The shared part of a row.
    """
    return {
        "schema": SCHEMA,
        "run": uuid.uuid4().hex[:12],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model_facts(model, source),
        "versions": library_versions(),
        "device": {**device_facts(model.device), "processes": processes},
        "git_commit": git_commit(),
    }


def model_facts(model: PreTrainedModel, source: ModelSource) -> Row:
    """Returns what a row says of a model."""
    return {
        **asdict(source),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "attention": model.config._attn_implementation,
    }


def eval_row(facts: Row, outcome: Outcome, text: EvalText, protocol: Protocol, suite: str | None = None) -> Row:
    """Makes the row of one strategy.

    Args:
        facts: The shared part.
        outcome: What came of the strategy.
        text: The text.
        protocol: How it was fed.
        suite: Name of the suite that the protocol came from.

    Returns:
        The row; figures only where the outcome is ok.
    """
    good = outcome.status == "ok"
    return {
        **facts,
        **outcome.facts(),
        "kind": "eval",
        "claimed_bits": claimed_stored_bits(outcome.strategy),
        "plan": outcome.measured.plan if good else [],
        "metrics": summarize(outcome.measured) if good else {},
        "units": column_units(),
        "curve": outcome.measured.curve if good else [],
        "windows": outcome.measured.window_means() if good else {},
        "contexts": outcome.measured.contexts if good else [],
        "tasks": outcome.measured.answers if good else [],
        "layers": outcome.measured.layers if good else [],
        "layer_sensitivity": outcome.measured.sensitivity if good else [],
        "findings": outcome.measured.findings if good else [],
        "text": text.facts(),
        "suite": suite,
        "protocol": asdict(protocol),
    }


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows to a JSON-lines file; what is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path, schema: str = SCHEMA) -> list[Row]:
    """Reads rows back.

    Args:
        path: The file.
        schema: What its rows must have.

    Raises:
        ValueError: If a row has another schema.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows, 1):
        if row.get("schema") != schema:
            raise ValueError(f"`{path}`, row {number}: schema {row.get('schema')!r}, this version reads {schema!r}")
    return rows


def finished_rows(path: Path, question: str, strategies: Sequence[str]) -> list[Row]:
    """Finds the latest run that answers a question already.

    Args:
        path: Rows of earlier runs, which may not be there.
        question: Its fingerprint.
        strategies: What has to be in the run, without a failure.

    Returns:
        One row a strategy, in that order; none if no run has them all.
    """
    runs: dict[str, dict[str, Row]] = {}
    for row in read_rows(path) if path.is_file() else ():
        if row.get("question") == question and row["status"] != "failed":
            runs.setdefault(row["run"], {})[row["strategy"]] = row
    whole = [run for run in runs.values() if run.keys() >= set(strategies)]
    return [whole[-1][strategy] for strategy in strategies] if whole else []


def library_versions() -> dict[str, str | None]:
    """Returns the versions of the libraries that figures depend on, None for those not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def device_facts(device: torch.device) -> dict[str, str | int]:
    """Names the device that ran the model, and the CPU threads it may use."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {"type": device.type, "name": name, "threads": torch.get_num_threads()}


def git_commit() -> str | None:
    """Returns the commit of the checkout that holds this package, None for an installed copy."""
    package = Path(hf_kvplus.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "--short=12", "HEAD")
    # A run that writes into the checkout, as `make results` does, changes no code
    code = (":/hf_kvplus", ":/eval/kvplus_eval", ":/eval/suites")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", *code)
    return f"{commit}+changes" if commit and changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Asks git about a folder; None where there is no git or no answer."""
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _cpu_name() -> str:
    """Returns the CPU's model name where the system tells, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
