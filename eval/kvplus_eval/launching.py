"""Makes `accelerate launch --cpu --num_processes N` mean what it says.

Without MPI accelerate (1.15) starts one process on CPUs, whatever number it was asked for, and tells it nothing of the
number. Read from the launcher's own command line, it is handed to torch's launcher, which starts that many; so are the
numbers of machines and of this one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COUNTERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def count_processes(environment: Mapping[str, str]) -> int:
    """Returns how many processes a launcher started, as it told each of them; 1 without one."""
    return max([int(environment[name]) for name in COUNTERS if name in environment], default=1)


def was_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether accelerate was asked for several processes on CPUs and started this one only.

    It sets the address at which they would have met in no other case.
    """
    on_cpus = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    return on_cpus and "MASTER_PORT" in environment and count_processes(environment) == 1


def asked_processes(command: Sequence[str]) -> int:
    """Reads the number of processes from accelerate's command line.

    Raises:
        ValueError: If it isn't there.
    """
    found = re.search(r"--num[_-]processes[= ](\d+)", " ".join(command))
    if found is None:
        raise ValueError(
            "accelerate was asked for several processes on CPUs and started one; give `--num_processes` on its "
            "command line, or use: torchrun --nproc_per_node N -m kvplus_eval ..."
        )
    return int(found[1])


def asked_machines(command: Sequence[str]) -> tuple[int, int]:
    """Reads from accelerate's command line how many machines share the processes, and the number of this one."""
    text = " ".join(command)
    count, rank = (re.search(rf"--{name}[= ](\d+)", text) for name in ("num[_-]machines", "machine[_-]rank"))
    return int(count[1]) if count else 1, int(rank[1]) if rank else 0


def launcher_options(command: Sequence[str]) -> list[str]:
    """Returns how torch's launcher is told what accelerate was.

    Args:
        command: Accelerate's command line.

    Raises:
        ValueError: If the number of processes isn't there, or machines can't share them evenly.
    """
    count, (machines, rank) = asked_processes(command), asked_machines(command)
    if count % machines:
        raise ValueError(f"{count} processes can't be shared evenly by {machines} machines; ask for a multiple")
    return ["--nnodes", str(machines), "--node_rank", str(rank), "--nproc_per_node", str(count // machines)]


def start_the_others(arguments: Sequence[str]) -> None:
    """Replaces this process by torch's launcher with the number that accelerate was asked for.

    Args:
        arguments: The command line of `python -m kvplus_eval`.
    """
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    command = parent.read_bytes().decode().split("\0") if parent.is_file() else []
    meeting = ["--master_addr", os.environ["MASTER_ADDR"], "--master_port", os.environ["MASTER_PORT"]]
    launcher = [sys.executable, "-m", "torch.distributed.run", *launcher_options(command), *meeting]
    os.execv(sys.executable, [*launcher, "-m", "kvplus_eval", *arguments])
