"""Several processes that share one evaluation: who does what, and how their findings come together.

`accelerate launch --num_processes N -m kvplus_eval ...` starts N of them, on one machine or several, with GPUs or
without. Windows and tasks are dealt out in turn; everybody then knows everything, and the first process alone times,
prints and writes. What is gathered are the scores themselves, in the order of the windows, so that sums are those of
one process. accelerate is imported only where a launcher has started more than one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from kvplus_eval.launching import count_processes

T = TypeVar("T")
# The first process times alone while the others wait for it
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class Processes:
    """This process among its like.

    Args:
        index: Its number, from 0.
        count: How many there are.
        local_index: Its number on its own machine, which is the number of its GPU.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that times, prints and writes."""
        return self.index == 0

    def mine(self, things: Sequence[T]) -> list[tuple[int, T]]:
        """Returns this process's part of `things`, each with its number among all."""
        return [(number, thing) for number, thing in enumerate(things) if number % self.count == self.index]

    def gather(self, thing: T) -> list[T]:
        """Returns what every process gave, by process; all must call it, and in the same order."""
        if self.count == 1:
            return [thing]
        gathered: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(gathered, thing)
        return gathered

    def from_first(self, thing: T) -> T:
        """Returns what the first process gave."""
        return self.gather(thing if self.is_first else None)[0]  # type: ignore[arg-type]

    def device(self, wanted: str) -> str:
        """Returns the device of this process: of several processes on GPUs each takes one of its own.

        Args:
            wanted: The device option; a number in it stays as it is.
        """
        on_gpus = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
        return f"cuda:{self.local_index}" if self.count > 1 and on_gpus else wanted


def join_processes(device: str) -> Processes:
    """Finds out whether a launcher started this process with others, and meets them.

    Args:
        device: The device option, which decides what they talk over: gloo for CPUs, nccl for GPUs.

    Returns:
        This process among its like; alone where there is no launcher.

    Raises:
        ImportError: If there are several processes and accelerate isn't installed.
    """
    if count_processes(os.environ) == 1:
        return Processes()
    try:
        from accelerate import PartialState
    except ModuleNotFoundError as error:
        raise ImportError('several processes need accelerate: pip install "hf_kvplus[eval]"') from error
    on_cpus = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpus, timeout=PATIENCE)
    return Processes(state.process_index, state.num_processes, state.local_process_index)


def leave_processes() -> None:
    """Parts from the others, where there are any, so that none is left waiting."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
