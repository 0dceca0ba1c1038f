"""Peak memory of one strategy in a process of its own: what it needs beside the loaded model, at its worst moment.

A cache may hold little and still need much on the way. The process loads the model from a folder, runs a few tokens so
that all libraries are awake, resets the system's own peak counter, and reads one window with some decoded tokens
behind it. That counter is Linux'; on a CUDA device the allocator counts, and no process is needed.

python -m kvplus_eval.peak FOLDER STRATEGY TOKENS DECODED CHUNK prints the bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvplus_eval.runner import make_cache
from kvplus_eval.stepping import step

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
AWAKE_TOKENS = 8
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def can_watch() -> bool:
    """Whether this system tells the peak of resident memory and lets it be reset."""
    return STATUS.is_file() and RESET.exists()


def watch_peak(folder: Path, strategy: str, tokens: int, decoded: int, chunk_tokens: int) -> int:
    """Runs one strategy in a process of its own.

    Args:
        folder: Checkpoint of the model, as `save_pretrained` writes it.
        strategy: A strategy string.
        tokens: Tokens of the window.
        decoded: Tokens decoded after it.
        chunk_tokens: Tokens in one forward pass.

    Returns:
        Bytes of resident memory above those of the loaded model.

    Raises:
        RuntimeError: If the process fails; the message ends as its did.
    """
    arguments = [str(folder), strategy, str(tokens), str(decoded), str(chunk_tokens)]
    done = subprocess.run(
        [sys.executable, "-m", "kvplus_eval.peak", *arguments],
        capture_output=True,
        text=True,
        check=False,
        # The child must not take itself for one of the processes that share this evaluation
        env={name: value for name, value in os.environ.items() if name not in LAUNCHED},
    )
    if done.returncode != 0:
        raise RuntimeError(f"watching the memory of `{strategy}` failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.strip().splitlines()[-1])


def run_watched(folder: Path, strategy: str, tokens: int, decoded: int, chunk_tokens: int) -> int:
    """Runs one strategy in this process; arguments and result as for `watch_peak`."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = torch.randint(0, model.config.get_text_config().vocab_size, (tokens,), generator=torch.Generator())
    with torch.inference_mode():
        step(model, make_cache(strategy, model, tokens), text[:AWAKE_TOKENS], last_only=True)
        RESET.write_text(RESET_PEAK)
        before = status_bytes("VmRSS")
        cache = make_cache(strategy, model, tokens + decoded)
        for piece in [*text.split(chunk_tokens), *text[:decoded].split(1)]:
            step(model, cache, piece, last_only=True)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """Reads one figure of this process's memory from the system."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    where, which, *numbers = sys.argv[1:]
    print(run_watched(Path(where), which, *map(int, numbers)))
