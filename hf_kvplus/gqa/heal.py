"""Healing a converted model: a short distillation of the original model's predictions.

The converted model learns the next-token distributions of the original one on text, by their KL divergence, with
accelerate: on a CPU, one GPU or several (`accelerate launch`). A run that was stopped goes on where its last
checkpoint was: which text a step sees and its learning rate follow from the step's number alone.

Left out: mixing in the loss on the text itself, and teachers that don't fit beside the student.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.gqa.convert import PROJECTIONS

if TYPE_CHECKING:
    from accelerate import Accelerator

TRAINED = ("attention", "all")
# Where launchers tell how many processes they started.
COUNTERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
CURVE_FILE, STATE_FOLDER, STEP_FILE = "loss.jsonl", "state", "step.json"
# Tokens whose divergence is computed at once, since logits of a large vocabulary take much memory.
SLICE_TOKENS = 256


@dataclass(frozen=True)
class Healing:
    """How a converted model is healed.

    Args:
        steps: Steps of the optimizer.
        batch_size: Windows in a step, on each process.
        learning_rate: Its largest value, reached after the warm-up; it falls to a tenth along a cosine.
        warmup_steps: Steps of the warm-up.
        trained: `"attention"`, the projections of all attention layers, or `"all"` weights.
        checkpoint_steps: Steps between two checkpoints.
        seed: Of the order of windows.

    Raises:
        ValueError: If a number is out of range.
    """

    steps: int
    batch_size: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    trained: str = "attention"
    checkpoint_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("steps", "batch_size", "checkpoint_steps"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("warmup_steps", self.warmup_steps, 0)
        require_choice("trained", self.trained, TRAINED)
        if not self.learning_rate > 0:
            raise ValueError(f"`learning_rate` must be above 0, got {self.learning_rate}")

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * share))


def heal(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    healing: Healing,
    folder: str | Path,
    *,
    stop_after: int | None = None,
    advance: Callable[[int, float], None] = lambda step, loss: None,
) -> PreTrainedModel:
    """Distils a teacher into a student.

    Source: Distilling the Knowledge in a Neural Network, https://arxiv.org/abs/1503.02531, at temperature 1.

    Args:
        student: The converted model; trained in place.
        teacher: The original model.
        windows: Token ids of one length, each `(tokens,)`.
        healing: How.
        folder: Where checkpoints and `loss.jsonl` (step, loss in nats, learning rate) are kept; if it has a
            checkpoint, the run goes on from there.
        stop_after: Steps of this call, to run in pieces; `None` runs to the end.
        advance: Called after each step with its number, from 1, and its loss.

    Returns:
        The student, in evaluation mode.

    Raises:
        ImportError: If accelerate isn't installed.
        ValueError: If there are no windows, they differ in length, the vocabularies differ, or the checkpoint is of
            a run with other settings or on another text.
    """
    accelerator = _make_accelerator()
    lengths = {len(window) for window in windows}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ValueError(f"`windows` must have one length of at least 2 tokens, got {sorted(lengths) or 'none'}")
    if student.config.vocab_size != teacher.config.vocab_size:
        raise ValueError(
            f"student and teacher must have one vocabulary, got {student.config.vocab_size} and "
            f"{teacher.config.vocab_size} tokens"
        )
    run = _Run(Path(folder), healing, accelerator, windows)
    teacher = teacher.to(accelerator.device).eval()
    chosen = _choose_weights(student, healing.trained)
    optimizer = torch.optim.AdamW(chosen, lr=healing.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(student, optimizer)
    first = run.resume()
    last = healing.steps if stop_after is None else min(healing.steps, first + stop_after)
    model.train()
    for step in range(first, last):
        ids = torch.stack([windows[index] for index in run.indices(step, len(windows))]).to(accelerator.device)
        for group in optimizer.param_groups:
            group["lr"] = healing.rate(step)
        loss = _distil(model, teacher, ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = accelerator.gather(loss.detach()[None]).mean().item()
        run.note(step + 1, value)
        advance(step + 1, value)
        if (step + 1) % healing.checkpoint_steps == 0 or step + 1 == last:
            run.checkpoint(step + 1)
    return accelerator.unwrap_model(model).eval().requires_grad_(True)


def join_processes(device: str = "auto") -> tuple[bool, str]:
    """Meets the processes that a launcher started for one healing, if there are others.

    Args:
        device: The device option of a command.

    Returns:
        Whether this is the first process, which writes and prints for all, and the device option of this one: of
        several processes on GPUs each takes one of its own.

    Raises:
        ImportError: If accelerate isn't installed.
        ValueError: If accelerate was asked for several processes and has started this one alone.
    """
    if _was_left_alone(os.environ):
        raise ValueError(
            "accelerate was asked for several processes on CPUs and started one, as it does without MPI; use "
            "`torchrun --nproc_per_node N` in its place"
        )
    try:
        from accelerate import PartialState
    except ModuleNotFoundError as error:
        raise ImportError('healing needs accelerate: pip install "hf_kvplus[eval]"') from error
    # Without an accelerator, processes meet only if they are said to be on CPUs; else each would heal by itself.
    state = PartialState(cpu=device == "cpu" or not torch.accelerator.is_available())
    own = state.num_processes > 1 and device in ("auto", "cuda") and state.device.type == "cuda"
    return state.is_main_process, str(state.device) if own else device


def _was_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether accelerate (1.15) was asked for several processes on CPUs: else it gives a lone one no address."""
    on_cpus = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    told = any(name in environment for name in COUNTERS)
    return on_cpus and "MASTER_PORT" in environment and not told


def _make_accelerator() -> Accelerator:
    """Returns an accelerator.

    Raises:
        ImportError: If accelerate isn't installed.
    """
    join_processes()
    from accelerate import Accelerator

    return Accelerator()


def _choose_weights(student: PreTrainedModel, trained: str) -> list[torch.nn.Parameter]:
    """Lets gradients into the weights that are trained, and returns them."""
    chosen = []
    for name, weight in student.named_parameters():
        weight.requires_grad_(trained == "all" or any(f".{projection}." in name for projection in PROJECTIONS))
        if weight.requires_grad:
            chosen.append(weight)
    return chosen


def _distil(student: Any, teacher: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean KL divergence of the student's predictions from the teacher's, in nats."""
    with torch.no_grad():
        wanted = teacher(input_ids=ids, use_cache=False).logits
    found = student(input_ids=ids, use_cache=False).logits
    total = found.new_zeros((), dtype=torch.float32)
    pairs = zip(*(logits.flatten(0, 1).split(SLICE_TOKENS) for logits in (found, wanted)), strict=True)
    for ours, theirs in pairs:
        total = total + torch.nn.functional.kl_div(
            ours.float().log_softmax(-1), theirs.float().log_softmax(-1), log_target=True, reduction="sum"
        )
    return total / ids.numel()


class _Run:
    """The files of a run, and which windows its steps see."""

    def __init__(
        self, folder: Path, healing: Healing, accelerator: Accelerator, windows: Sequence[torch.Tensor]
    ) -> None:
        self.folder, self.healing, self.accelerator = folder, healing, accelerator
        tokens = torch.stack(list(windows)).cpu().numpy().tobytes()
        self.windows = f"{len(windows)} windows, SHA-256 {hashlib.sha256(tokens).hexdigest()[:16]}"
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            self._finish_checkpoint()
        accelerator.wait_for_everyone()

    def indices(self, step: int, count: int) -> list[int]:
        """Returns the windows of a step on this process: all of them in random order, then in another one."""
        size = self.healing.batch_size
        first = (step * self.accelerator.num_processes + self.accelerator.process_index) * size
        return [self._place(first + offset, count) for offset in range(size)]

    def _place(self, number: int, count: int) -> int:
        generator = torch.Generator().manual_seed(self.healing.seed + number // count)
        return int(torch.randperm(count, generator=generator)[number % count])

    def settings(self) -> dict[str, Any]:
        """Returns what must be equal when a run goes on."""
        return {**asdict(self.healing), "processes": self.accelerator.num_processes, "text": self.windows}

    def resume(self) -> int:
        """Loads the last checkpoint and returns the step it was made after, 0 without one.

        Raises:
            ValueError: If it is of a run with other settings.
        """
        saved = self.folder / STATE_FOLDER / STEP_FILE
        if not saved.is_file():
            (self.folder / CURVE_FILE).unlink(missing_ok=True)
            return 0
        facts = json.loads(saved.read_text())
        different = [
            f"{name} {facts['settings'].get(name)}, now {value}"
            for name, value in self.settings().items()
            if facts["settings"].get(name) != value
        ]
        if different:
            raise ValueError(
                f"{self.folder} holds a run with other settings ({'; '.join(different)}); give another folder, or "
                "delete this one"
            )
        self.accelerator.load_state(str(self.folder / STATE_FOLDER))
        self._forget_after(facts["step"])
        return int(facts["step"])

    def _forget_after(self, step: int) -> None:
        """Takes what came after a checkpoint out of the loss curve: those steps run again."""
        curve = self.folder / CURVE_FILE
        if self.accelerator.is_main_process and curve.is_file():
            rows = [json.loads(line) for line in curve.read_text().splitlines()]
            curve.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))

    def note(self, step: int, loss: float) -> None:
        """Appends a step to the loss curve."""
        if self.accelerator.is_main_process:
            row = {"step": step, "kl_nats": loss, "learning_rate": self.healing.rate(step - 1)}
            with open(self.folder / CURVE_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def checkpoint(self, step: int) -> None:
        """Saves everything that going on needs; the checkpoint before stays until this one is complete."""
        new, old, spent = self._folders()
        self.accelerator.save_state(str(new))
        # Each process writes the state of its own random numbers
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (new / STEP_FILE).write_text(json.dumps({"step": step, "settings": self.settings()}))
            shutil.rmtree(spent, ignore_errors=True)
            if old.exists():
                os.replace(old, spent)
            os.replace(new, old)
            shutil.rmtree(spent, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _folders(self) -> tuple[Path, Path, Path]:
        """Returns where a checkpoint is written, where it lies once it is complete, and where the one before goes."""
        new, old, spent = (self.folder / f"{STATE_FOLDER}{end}" for end in (".new", "", ".old"))
        return new, old, spent

    def _finish_checkpoint(self) -> None:
        """Puts a complete checkpoint into its place, where a run ended after the one before had left it."""
        new, old, _ = self._folders()
        if (new / STEP_FILE).is_file() and not old.exists():
            os.replace(new, old)


def steps_done(folder: str | Path) -> int:
    """Returns the step after which the last checkpoint of a run was made, 0 without one."""
    saved = Path(folder) / STATE_FOLDER / STEP_FILE
    return int(json.loads(saved.read_text())["step"]) if saved.is_file() else 0


def plot_curve(folder: str | Path) -> Path:
    """Draws `loss.jsonl` of a run into `loss.png` beside it and returns that path.

    Raises:
        FileNotFoundError: If there is no curve.
        ImportError: If matplotlib isn't installed.
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    rows = [json.loads(line) for line in (folder / CURVE_FILE).read_text().splitlines()]
    figure = Figure(figsize=(6.4, 4.0), dpi=150)
    axes = figure.add_subplot()
    axes.plot([row["step"] for row in rows], [row["kl_nats"] for row in rows], color="#0072b2", linewidth=1.4)
    axes.set(xlabel="step", ylabel="KL to the original model (nats)", yscale="log")
    axes.set_title("Healing a converted model", loc="left")
    axes.grid(alpha=0.25, which="both")
    path = folder / "loss.png"
    figure.savefig(path, bbox_inches="tight")
    return path
