"""Kills writers of an offloaded cache at random points and reopens what they leave.

    python tests/offload/kills.py --count 100

One process imports everything and forks a writer for each kill. A writer stores states that tell their layer, row and
column, now and then reorders its rows or rolls tokens back, and says after each completed flush how far it is. What
is reopened must be at least as long, the same number of tokens in every layer and row, and every number right.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from hf_kvplus import OffloadedCache, build_cache

LAYERS, BATCH, STEP = 3, 2, 40
STRATEGIES = ("fp+offload:disk,budget=0", "int8,recent=16+offload:disk,budget=30kb", "window:200,sinks=4+offload:disk")


def config() -> LlamaConfig:
    """Returns the configuration of a model with three small layers."""
    return LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, hidden_size=32, intermediate_size=32
    )


def states(layer: int, first: int, tokens: int, rows: list[int]) -> torch.Tensor:
    """Returns states `(batch, 2, tokens, 16)` that are a number for each layer, column and row."""
    columns = torch.arange(first, first + tokens, dtype=torch.float32)[None, None, :, None] % 97
    row = torch.tensor(rows, dtype=torch.float32)[:, None, None, None]
    return (columns / 97 + layer + 10 * row).expand(len(rows), 2, tokens, 16).contiguous()


def write(folder: str, strategy: str, seed: int, progress: int) -> None:
    """Stores states until killed; reports after each flush the tokens that must survive."""
    torch.set_num_threads(1)
    choice = random.Random(seed)
    cache = build_cache(f"{strategy},dir={folder}", config())
    length = flushed = 0
    while True:
        tokens = choice.choice((1, STEP, 3 * STEP))
        if strategy.startswith("window"):
            cache.layers[0].get_mask_sizes(tokens)
            cache.layers[0].masks.plan.built = True
        for index in range(LAYERS):
            new = states(index, length, tokens, list(range(BATCH)))
            cache.update(new, -new, index)
        length += tokens
        if choice.random() < 0.1 and length > 400 and not strategy.startswith("window"):
            # What these tokens packed may not be written yet, and some of what is written goes now
            os.pwrite(progress, f"{min(flushed, length - 150 - 64):012d}".encode(), 0)
            cache.crop(-150)
            length = cache.get_seq_length()
        cache.flush()
        flushed = min(layer.packed_tokens for layer in cache.layers)
        os.pwrite(progress, f"{flushed:012d}".encode(), 0)


@functools.cache
def warm_up(strategy: str) -> None:
    """Stores something once, so that what is compiled for it is there in every writer."""
    torch.set_num_threads(1)
    cache = build_cache(strategy, config())
    if strategy.startswith("window"):
        cache.layers[0].get_mask_sizes(200)
        cache.layers[0].masks.plan.built = True
    cache.update(states(0, 0, 200, [0, 1]), states(0, 0, 200, [0, 1]), 0)
    cache.close()


def kill_one(strategy: str, seed: int) -> dict[str, object]:
    """Forks a writer, kills it after a while, reopens its folder and checks every number."""
    warm_up(strategy)
    folder = tempfile.mkdtemp(prefix="kvplus-kill-")
    progress = os.open(os.path.join(folder, "progress"), os.O_RDWR | os.O_CREAT)
    child = os.fork()
    if child == 0:
        try:
            write(folder, strategy, seed, progress)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while not (os.pread(progress, 12, 0) or b"0").strip(b"0") and time.monotonic() < deadline:
        time.sleep(0.001)  # a first flush, so that there is something to reopen
    time.sleep(random.Random(seed).uniform(0, 0.4))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    flushed = int(os.pread(progress, 12, 0) or b"0")
    os.close(progress)
    outcome = {"seed": seed, "strategy": strategy, "flushed": flushed, "killed": os.WIFSIGNALED(status)}
    cache, tokens = OffloadedCache.reopen(config(), folder)
    outcome |= {"tokens": tokens, "right": check(cache, tokens, strategy)}
    # The process that goes on stores and flushes as before.
    for index in range(LAYERS):
        if strategy.startswith("window"):
            cache.layers[index].get_mask_sizes(3 * STEP)
            cache.layers[index].masks.plan.built = True
        cache.update(states(index, tokens, 3 * STEP, list(range(BATCH))), torch.ones(BATCH, 2, 3 * STEP, 16), index)
    cache.flush()
    outcome["went_on"] = cache.get_seq_length() == tokens + 3 * STEP
    cache.close()
    outcome["left"] = sorted(path.name for path in Path(folder).iterdir())
    shutil.rmtree(folder)
    return outcome


def check(cache, tokens: int, strategy: str) -> bool:
    """Whether all layers hold the same tokens and every number is what was stored."""
    exact = not strategy.startswith("int8")
    for index, layer in enumerate(cache.layers):
        if layer.get_seq_length() != tokens or layer.batch_size != BATCH:
            return False
        first = layer.policy.first_visible(tokens)
        keys, values = layer.dense()
        expected = states(index, first, tokens - first, list(range(BATCH)))
        keys, values = keys[:, :, -expected.shape[2] :], values[:, :, -expected.shape[2] :]
        tolerance = 0 if exact else 0.15
        if (keys - expected).abs().max() > tolerance or (values + expected).abs().max() > tolerance:
            return False
    return True


def is_good(outcome: dict[str, object]) -> bool:
    """Whether a kill left a consistent prefix, no shorter than what was flushed, and a cache that goes on."""
    through = outcome["killed"] and outcome["right"] and outcome["went_on"]
    return bool(through and outcome["tokens"] >= outcome["flushed"] and outcome["left"] == ["progress"])


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    """Kills writers one after the other; prints a summary and returns what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = []
    for seed in range(options.count):
        outcomes.append(kill_one(STRATEGIES[seed % len(STRATEGIES)], seed))
    good = [one for one in outcomes if is_good(one)]
    tokens = sorted(one["tokens"] for one in outcomes)
    print(f"{len(good)} of {len(outcomes)} reopened to a consistent prefix, of {tokens[0]} to {tokens[-1]} tokens")
    print(json.dumps([one for one in outcomes if one not in good]))
    return outcomes


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
