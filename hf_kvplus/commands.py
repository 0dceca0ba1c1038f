"""The commands that need no harness: `generate`, `strategies` and `doctor`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

from hf_kvplus import available_strategies, build_cache, estimate_memory, measure_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.live import LiveView, MemoryRecorder
from hf_kvplus.loading import ALIASES, load_config, load_model
from hf_kvplus.strategies.build import find_strategy
from hf_kvplus.strategies.grammar import parse
from hf_kvplus.units import MISSING, format_bytes, format_number

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

REPORTED_PACKAGES = ("hf_kvplus", "torch", "transformers", "accelerate", "huggingface-hub")
EXTRAS = {
    "cpu": ("numba",),
    "eval": ("accelerate", "datasets", "evaluate", "matplotlib", "rich", "typer"),
    "disk": ("xxhash",),
    "gguf": ("gguf",),
    "peers": ("optimum.quanto", "hqq"),
}

Model = Annotated[str, typer.Option(help=f"Alias ({', '.join(ALIASES)}), hub id, checkpoint folder or .gguf file.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]


class TimedStreamer(TextStreamer):
    """Prints text as it is generated and notes when each token arrived; `generate` hands it the prompt first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.began_s = time.perf_counter()
        self.arrivals_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt or the next token from `generate`."""
        if not self.next_tokens_are_prompt:
            self.arrivals_s.append(time.perf_counter())
        super().put(value)

    def speed_line(self) -> str:
        """Tells how many tokens arrived and how fast, the first one, which waits for the prompt, apart."""
        first_s = self.arrivals_s[0] - self.began_s
        later, later_s = len(self.arrivals_s) - 1, self.arrivals_s[-1] - self.arrivals_s[0]
        speed = f"then {later / later_s:.1f} tokens per second" if later else "and no other"
        return f"speed: {len(self.arrivals_s)} tokens, the first after {first_s:.2f} s, {speed}"


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: Model = "smollm2-135m",
    strategy: Annotated[str, typer.Option(help="Cache strategy; see `kvplus strategies`.")] = "int4",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    watch: Annotated[bool, typer.Option(help="Show the cache's bytes while it grows.")] = False,
    memory_plot: Annotated[Path | None, typer.Option(help="Draw the cache's bytes into this PNG or SVG file.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Continue a prompt greedily, then tell what the cache took and how fast it went."""
    check_strategy(strategy)
    loaded, tokenizer, _ = load_model(model, device, dtype)
    token_ids = _encode(tokenizer, prompt, chat=chat).to(loaded.device)
    cache = build_cache(strategy, loaded.config, max_length=token_ids.shape[1] + max_new_tokens, model=loaded)
    streamer = TimedStreamer(tokenizer)
    view = LiveView(lambda tokens: _full_bytes(loaded, tokens), strategy) if watch else None
    recorder = MemoryRecorder(cache, streamer, on_step=view.show if view else None) if watch or memory_plot else None
    with view or contextlib.nullcontext():
        loaded.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            **{cache_keyword(loaded): cache},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=recorder or streamer,
        )
    if recorder and memory_plot:
        recorder.plot(memory_plot, strategy)
    typer.echo(_cache_line(cache, strategy, loaded))
    typer.echo(streamer.speed_line())


def strategies() -> None:
    """List the strategies."""
    table = Table(title="Strategies: join those marked with + by a plus sign", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    table.add_column("bits", justify="right")
    table.add_column("joins")
    table.add_column("meaning", overflow="fold")
    for info in available_strategies():
        table.add_row(info.name, format_number(info.stored_bits), "+" if info.composable else "", info.summary)
    console = Console()
    console.print(table)
    console.print("bits: per element of the packed part, scales counted, at head_dim 64. `kvplus eval` measures them.")


def doctor(
    model: Annotated[str | None, typer.Option(help="Also tell what this model's layers would get.")] = None,
    strategy: Annotated[str, typer.Option(help="The strategy that --model is told for.")] = "int4",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text: also run --model on its end and tell of biases in its keys.")
    ] = None,
) -> None:
    """Tell versions, devices, kernels and extras, and what a model's layers would get."""
    if text is not None and model is None:
        raise ValueError("`text` is for a model's keys; give --model too")
    check_strategy(strategy)
    console = Console()
    console.print(_versions_table())
    console.print(_devices_table())
    console.print(_extras_table())
    if model is not None:
        cache = build_cache(strategy, load_config(model), max_length=1)
        console.print(f"{model} with {strategy}:")
        for line in getattr(cache, "plan", [f"every layer: transformers' own ({type(cache).__name__})"]):
            console.print(f"  {line}", soft_wrap=True, markup=False)
    if text is not None and model is not None:
        from hf_kvplus.plan_commands import tell_key_biases

        tell_key_biases(console, model, text)


def check_strategy(strategy: str) -> None:
    """Checks the names in a strategy before a model is loaded for it.

    Raises:
        ValueError: If one is unknown.
    """
    for part in parse(strategy):
        find_strategy(part.name)


def _full_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Returns the bytes of transformers' own cache after so many tokens of a model, each layer by its own rule."""
    return estimate_memory(model.config, tokens, dtype=model.dtype).cache_bytes


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool) -> torch.Tensor:
    """Tokenizes a prompt, shape (1, tokens)."""
    if chat:
        if tokenizer.chat_template is None:
            raise ValueError("`chat` needs a model with a chat template, and this one has none; leave out --chat")
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).input_ids
    if token_ids.shape[1] == 0:
        raise ValueError("`prompt` must have at least one token, got an empty one")
    return token_ids.long()


def _cache_line(cache: Cache, strategy: str, model: PreTrainedModel) -> str:
    """Tells what the cache took against the full one."""
    memory = measure_memory(cache)
    tokens = int(cache.get_seq_length())
    full_bytes = _full_bytes(model, tokens)
    share = 100 * memory.total_bytes / full_bytes
    return (
        f"cache: {format_bytes(memory.total_bytes)} with {strategy}, {format_bytes(full_bytes)} unquantized "
        f"({share:.1f} %), {tokens} tokens, {memory.bits_per_element:.2f} bits per element"
    )


def _versions_table() -> Table:
    table = Table(title="Versions", title_justify="left", show_header=False)
    table.add_row("python", platform.python_version())
    for name in REPORTED_PACKAGES:
        table.add_row(name, _version(name))
    return table


def _devices_table() -> Table:
    table = Table(title="Devices", title_justify="left", show_header=False)
    table.add_row("cpu", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in use")
    table.add_row("cpu instructions", torch.backends.cpu.get_cpu_capability())
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{facts.name}, {format_bytes(facts.total_memory)}")
    if not torch.cuda.is_available():
        table.add_row("cuda", "none")
    return table


def _extras_table() -> Table:
    """Tells which kernels can run and which extras are complete, found without importing them."""
    table = Table(title="Kernels and extras", title_justify="left", show_header=False)
    table.add_row("attention in PyTorch", "available")
    numba = "numba is there" if _is_there("numba") else 'needs pip install "hf_kvplus[cpu]"'
    triton = "triton is there" if _is_there("triton") else "needs triton"
    table.add_row("CPU compiler", numba)
    table.add_row("CUDA compiler", triton if torch.cuda.is_available() else f"{triton}, and there is no CUDA device")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not _is_there(module)]
        state = f'missing {", ".join(missing)}: pip install "hf_kvplus[{extra}]"' if missing else "complete"
        table.add_row(f"[{extra}]".replace("[", "\\["), state.replace("[", "\\["))
    return table


def _is_there(module: str) -> bool:
    """Tells whether a module could be imported, looking for its parent first, since a lookup inside needs it."""
    parent = module.partition(".")[0]
    return importlib.util.find_spec(parent) is not None and importlib.util.find_spec(module) is not None


def _version(name: str) -> str:
    """Returns the version of a distribution, a dash for one that isn't installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return MISSING
