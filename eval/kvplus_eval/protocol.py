"""What one evaluation does, in numbers, and the checks that those numbers make sense.

The protocol is the same for every strategy, the reference included, and is written into every result row. Left out:
the text and the model, which are named beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.strategies.build import find_strategy
from hf_kvplus.strategies.grammar import parse, split_list

REFERENCE_STRATEGY = "dynamic"
# Below this, the fact and its question would fill the context
SHORTEST_TASK_TOKENS = 128
TASK_ANSWER_TOKENS = 64
# Steps that are decoded at each context length, the first ones to warm up
CONTEXT_STEPS = 64
NOISE_KINDS = ("chunking", "dtype")


@dataclass(frozen=True)
class Protocol:
    """How text is fed and what is timed.

    Args:
        windows: How many windows of text, one after the other from its beginning.
        window_tokens: Tokens in a window; each window starts with a fresh cache.
        chunk_tokens: Tokens in one forward pass of the quality pass. Later chunks read what earlier ones stored.
        prefill_chunk_tokens: Tokens in one forward pass when prefill is timed.
        decode_tokens: Greedy tokens decoded and timed after a window.
        greedy_tokens: Length of the greedy text that is compared with the reference's.
        timing_rounds: How often every strategy is timed, in turn; 0 leaves out timing and greedy text.
        contexts: Context lengths at which the time of one token is taken, ascending; none leaves that out.
        tasks: Tasks with planted facts, names from `kvplus_eval.tasks`.
        task_lengths: Lengths of their contexts in tokens.
        task_depths: Where the fact lies, from 0 (beginning) to 1 (end).
        task_samples: Facts at each length and depth.
        noise: Against what the model is compared with itself: `chunking`, `dtype`.
        noise_windows: Windows of that comparison.
        peak_memory: Whether each strategy runs once in a process of its own, whose memory is watched.
        sensitivity_tokens: First tokens of the first window on which every layer is quantized alone; 0 for none.
    """

    windows: int = 4
    window_tokens: int = 2048
    chunk_tokens: int = 64
    prefill_chunk_tokens: int = 512
    decode_tokens: int = 16
    greedy_tokens: int = 64
    timing_rounds: int = 3
    contexts: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    task_lengths: tuple[int, ...] = (1024,)
    task_depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    task_samples: int = 1
    noise: tuple[str, ...] = ()
    noise_windows: int = 1
    peak_memory: bool = False
    sensitivity_tokens: int = 0

    def __post_init__(self) -> None:
        """Checks each number on its own; whether chunks fit the window is a guard's business."""
        for name, minimum in (("windows", 1), ("window_tokens", 2), ("chunk_tokens", 1), ("prefill_chunk_tokens", 1)):
            require_at_least(name, getattr(self, name), minimum)
        for name, minimum in (("decode_tokens", 1), ("greedy_tokens", 0), ("timing_rounds", 0)):
            require_at_least(name, getattr(self, name), minimum)
        for name, minimum in (("task_samples", 1), ("noise_windows", 1)):
            require_at_least(name, getattr(self, name), minimum)
        if self.sensitivity_tokens:
            require_at_least("sensitivity_tokens", self.sensitivity_tokens, self.chunk_tokens + 1)
            if self.sensitivity_tokens > self.window_tokens:
                raise ValueError(
                    f"`sensitivity_tokens` must be at most window_tokens={self.window_tokens}, "
                    f"got {self.sensitivity_tokens}"
                )
        for length in self.task_lengths:
            require_at_least("task_lengths", length, SHORTEST_TASK_TOKENS)
        for depth in self.task_depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"`task_depths` must lie between 0 and 1, got {depth}")
        for kind in self.noise:
            require_choice("noise", kind, NOISE_KINDS)

    @property
    def predicted_tokens(self) -> int:
        """Tokens of one window that have a prediction: all but the first."""
        return self.window_tokens - 1

    @property
    def longest_tokens(self) -> int:
        """The most tokens that one cache ever holds."""
        return self.window_tokens + max(self.decode_tokens, self.greedy_tokens)

    @property
    def most_positions(self) -> int:
        """The most positions that any part of the evaluation asks of the model."""
        timed = self.longest_tokens if self.timing_rounds else self.window_tokens
        tasks = max(self.task_lengths, default=0) + TASK_ANSWER_TOKENS if self.tasks else 0
        return max(timed, tasks, *self.contexts, 0) + (CONTEXT_STEPS if self.contexts else 0)


def choose_strategies(text: str) -> list[str]:
    """Reads a comma-separated list of strategies and checks each name before any work starts.

    Args:
        text: The list as written on the command line; `window:1024,sinks=4` in it stays one strategy.

    Returns:
        The strategies, in order.

    Raises:
        ValueError: If the list is empty or names a strategy that is unknown, or one twice.
    """
    strategies = split_list(text)
    if not strategies:
        raise ValueError(f"`strategies` must name at least one strategy, got {text!r}")
    for strategy in strategies:
        for part in parse(strategy):
            find_strategy(part.name)
    doubled = sorted({strategy for strategy in strategies if strategies.count(strategy) > 1})
    if doubled:
        raise ValueError(f"`strategies` must name each strategy once, got {', '.join(doubled)} more than once")
    return strategies


def is_ours(strategy: str) -> bool:
    """Whether a strategy is a cache of this package, and not transformers' or somebody else's."""
    return all(find_strategy(part.name).info.composable for part in parse(strategy))


def is_foreign(strategy: str) -> bool:
    """Whether a strategy is a cache of another package, of which nothing is known but what it answers."""
    return any(part.name == "adapter" for part in parse(strategy))


def keeps_every_token(strategy: str) -> bool:
    """Whether a strategy promises that every token's own states, quantized or not, come back from every head."""
    parts = parse(strategy)
    return not any(part.name in ("window", "gqa") or part.options.get("evicts") == "yes" for part in parts)


def require_positions(config: PreTrainedConfig, tokens: int) -> None:
    """Checks that a model with a table of positions has enough of them; rotary models have no such limit.

    Raises:
        ValueError: If the table is too short.
    """
    text_config = config.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is not None and getattr(text_config, "rope_parameters", None) is None and tokens > limit:
        raise ValueError(f"this model has {limit} positions, and {tokens} tokens were asked for; use smaller windows")
