"""The commands `kvplus eval`, `compare` and `bench`, which hf_kvplus finds through its entry points."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from hf_kvplus.checks import require_choice
from hf_kvplus.devices import measure_device
from hf_kvplus.loading import DTYPES, load_config, load_model, load_tokenizer, resolve_device
from hf_kvplus.plots import plot_decode
from hf_kvplus.report import write_report
from kvplus_eval.bench import BenchPlan, run_bench
from kvplus_eval.compare import Tolerances, compare_runs, compare_summary, compare_table, latest_run
from kvplus_eval.data import EvalText, cut_windows, load_text
from kvplus_eval.decode_peak import PeakJob, peak_table, watch_rows
from kvplus_eval.evaluation import Finished, Job, asked, run_evaluation
from kvplus_eval.growth import growth_rows, growth_table, require_contexts
from kvplus_eval.guards import claimed_stored_bits
from kvplus_eval.html import write_page
from kvplus_eval.journal import fingerprint
from kvplus_eval.kernel_bench import Shape, kernel_summary, kernel_table, read_shape, run_kernel_bench
from kvplus_eval.plan import make_plan
from kvplus_eval.processes import Processes, join_processes, leave_processes
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol, choose_strategies, require_positions
from kvplus_eval.reference_model import record_reference_model, require_same_vocabulary, require_same_windows
from kvplus_eval.results import Row, append_rows, finished_rows, run_facts
from kvplus_eval.suites import DEFAULT_STRATEGIES, OPTIONS, Settings, settle, suite_names
from kvplus_eval.tables import bench_summary, bench_table, complaints, eval_summary, eval_tables, make_console
from kvplus_eval.tasks import TASKS

RANDOM_PROMPT_SEED = 0
# Tokens decoded while memory is watched: more than a block, so that packing is among them
WATCHED_TOKENS = 96
# A token of any language is shorter than this on average, so a streamed text of so many characters is long enough
CHARACTERS_A_TOKEN = 12
KERNEL_SHAPE = "kv_heads=8,queries=4,head_dim=128,tokens=32768"

Model = Annotated[str, typer.Option(help="Alias, hub id, checkpoint folder or .gguf file.")]
Strategies = Annotated[str, typer.Option(help="Comma-separated strategies; see `kvplus strategies`.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Out = Annotated[Path, typer.Option(help="Folder for results; rows are appended to what is there.")]
Prefill = Annotated[int, typer.Option(help="Tokens in one forward pass of a timed prefill.")]


def _option(kind: Any, help_text: str, default: object) -> Any:
    """Describes an option of a suite, whose default counts where neither suite nor command line has it."""
    shown = ",".join(map(str, default)) or "none" if isinstance(default, tuple) else str(default)
    return Annotated[kind | None, typer.Option(help=help_text, show_default=f"the suite's, or {shown}")]


def evaluate(
    suite: Annotated[str | None, typer.Option(help=f"{', '.join(suite_names())}, or a .yaml file.")] = None,
    model: Model = "smollm2-135m",
    reference_model: Annotated[
        str | None,
        typer.Option(
            help="Compare with the full cache of this model, for example the original of a converted checkpoint.",
            show_default="the model's own",
        ),
    ] = None,
    strategies: _option(str, "Comma-separated; see `kvplus strategies`.", DEFAULT_STRATEGIES) = None,
    text: _option(str, "Text or .jsonl file, data set NAME:CONFIG:SPLIT, pydoc-topics.", "auto") = None,
    windows: _option(int, "Windows of text.", Protocol.windows) = None,
    window_tokens: _option(int, "Tokens in a window.", Protocol.window_tokens) = None,
    chunk_tokens: _option(int, "Tokens fed at once; later chunks read stored ones.", Protocol.chunk_tokens) = None,
    prefill_chunk_tokens: _option(
        int, "Tokens in one forward pass of a timed prefill.", Protocol.prefill_chunk_tokens
    ) = None,
    decode_tokens: _option(int, "Greedy tokens timed after a window.", Protocol.decode_tokens) = None,
    greedy_tokens: _option(
        int, "Length of greedy text compared with the full cache's.", Protocol.greedy_tokens
    ) = None,
    timing_rounds: _option(
        int, "Rounds of timing; 0 leaves out times and greedy text.", Protocol.timing_rounds
    ) = None,
    contexts: _option(str, "Context lengths at which a token is timed.", Protocol.contexts) = None,
    tasks: _option(str, f"Planted facts: {', '.join(TASKS)}.", Protocol.tasks) = None,
    task_lengths: _option(str, "Lengths of their contexts.", Protocol.task_lengths) = None,
    task_depths: _option(str, "Where the fact lies, 0 to 1.", Protocol.task_depths) = None,
    task_samples: _option(int, "Facts at each length and depth.", Protocol.task_samples) = None,
    noise: _option(str, "Noise floor: chunking, dtype.", Protocol.noise) = None,
    noise_windows: _option(int, "Windows of the noise floor.", Protocol.noise_windows) = None,
    sensitivity_tokens: _option(
        int, "First tokens on which every layer is quantized alone; 0 for none.", Protocol.sensitivity_tokens
    ) = None,
    peak_memory: Annotated[
        bool | None,
        typer.Option("--peak-memory/--no-peak-memory", help="Watch each strategy's memory in a process of its own."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="auto, balanced or sequential: spread a model that no device holds.")
    ] = None,
    out: Out = Path("kvplus-eval"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what an interrupted run left.")] = False,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Show a finished run of the same job again instead of measuring anew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, its time and memory, and stop.")] = False,
) -> None:
    """Measure what each cache costs in quality and saves in memory and time."""
    given = {key: value for key, value in locals().items() if key in OPTIONS}
    settings = settle(suite, given)
    names = choose_strategies(settings.strategies)
    for name in names:
        claimed_stored_bits(name)  # a claim that is no number is told before any work
    for task in settings.protocol.tasks:
        TASKS.get(task)
    if dry_run:
        _print_plan(settings, names, (model, reference_model), dtype)
        return
    processes = join_processes(device)
    try:
        where = (processes.device(device), dtype, device_map)
        _evaluate(settings, names, (model, reference_model), where, (out, fresh, reuse), processes)
    finally:
        leave_processes()


def _print_plan(settings: Settings, names: list[str], models: tuple[str, str | None], dtype: str) -> None:
    """Prints what would be done, and what it would take on the device at hand."""
    console, (model, other) = make_console(), models
    plan = make_plan(
        load_config(model),
        settings.protocol,
        names,
        measure_device(),
        None if dtype == "auto" else dtype,
        reference=other and load_config(other),
    )
    against = f", against the full cache of {other}" if other else ""
    console.print(f"{model}{against}: {len(names)} strategies: {', '.join(names)}", soft_wrap=True)
    for table in plan.tables():
        console.print(table)
    console.print(plan.memory_line(), soft_wrap=True)
    typer.echo(plan.summary(names))


def _evaluate(
    settings: Settings,
    names: list[str],
    models: tuple[str, str | None],
    where: tuple[str, str, str | None],
    into: tuple[Path, bool, bool],
    processes: Processes,
) -> None:
    """Loads text and model, evaluates, and lets the first process write and print."""
    protocol, (model, other), (out, fresh, reuse) = settings.protocol, models, into
    console = make_console() if processes.is_first else Console(quiet=True)
    chosen_text = load_text(settings.text, CHARACTERS_A_TOKEN * protocol.windows * protocol.window_tokens)
    console.print(chosen_text.describe(), soft_wrap=True)
    reference = None
    if other is not None:
        began = _load_job(other, where, chosen_text, settings, out, console)
        _require_comparable(began, model)
        reference = record_reference_model(began, console, processes)
        # Makes room for the model under test
        del began
        console.print(f"figures compare with the full cache of {other}", soft_wrap=True)
    job = _load_job(model, where, chosen_text, settings, out, console)
    job = replace(job, strategies=names, fresh=fresh, reference=reference)
    rows = processes.from_first(_earlier(job, out, console)) if reuse and not fresh else []
    finished = None
    if not rows:
        finished = run_evaluation(job, console, processes)
        rows = finished.rows
        if processes.is_first:
            _write(finished, out)
    if processes.is_first:
        _tell(rows, out, console)
    processes.gather(None)
    if finished is not None and finished.journal is not None and processes.local_index == 0:
        finished.journal.close()  # of a machine with a disk of its own
    _leave(rows)


def _load_job(
    model: str,
    where: tuple[str, str, str | None],
    text: EvalText,
    settings: Settings,
    out: Path,
    console: Console,
) -> Job:
    """Loads a model and cuts the text for it; strategies aren't chosen yet."""
    protocol = settings.protocol
    loaded, tokenizer, source = load_model(model, *where)
    console.print(f"model: {source.name} from {source.how}, {source.revision}", soft_wrap=True)
    require_positions(loaded.config, protocol.most_positions)
    cut = cut_windows(text, tokenizer, windows=protocol.windows, window_tokens=protocol.window_tokens)
    return Job(loaded, source, text, cut, [], protocol, out, tokenizer=tokenizer, suite=settings.suite)


def _require_comparable(reference: Job, model: str) -> None:
    """Checks, before a reference is computed, that the model under test can be compared with it."""
    names, tokenizer, protocol = (reference.source.name, model), load_tokenizer(model), reference.protocol
    require_same_vocabulary(names, (reference.tokenizer, tokenizer), (reference.model.config, load_config(model)))
    cut = cut_windows(reference.text, tokenizer, windows=protocol.windows, window_tokens=protocol.window_tokens)
    require_same_windows(names, (reference.windows, cut))


def _earlier(job: Job, out: Path, console: Console) -> list[Row]:
    """Returns the rows of a finished run of the same job, and says that they aren't new."""
    rows = finished_rows(out / "results.jsonl", fingerprint(asked(job)), job.strategies)
    if rows:
        run, date = rows[0]["run"], rows[0]["date"]
        console.print(f"run {run} of {date} did this job; without --reuse it is measured anew", soft_wrap=True)
    return rows


def _write(finished: Finished, out: Path) -> None:
    """Writes the rows, then drops what was kept for the case of an interruption."""
    append_rows(out / "results.jsonl", finished.rows)
    if finished.journal is not None:
        finished.journal.close()


def _tell(rows: list[Row], out: Path, console: Console) -> None:
    """Writes the reports, then prints the tables and the summary."""
    report, page = write_report(rows, out), write_page(rows, out / "report.html")
    for table in eval_tables(rows, console.width):
        console.print(table)
    for line in complaints(rows):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"rows: {out / 'results.jsonl'}   report: {report}   {page}", soft_wrap=True)
    typer.echo(eval_summary(rows, out))


def compare(
    a: Annotated[Path, typer.Argument(help="results.jsonl of the yardstick, or its folder; its last run counts.")],
    b: Annotated[Path, typer.Argument(help="The same of what is judged.")],
    kl_tolerance: Annotated[float, typer.Option(help="Accepted relative rise of the mean KL.")] = Tolerances.kl,
    perplexity_tolerance: Annotated[
        float, typer.Option(help="Accepted rise of perplexity in percent.")
    ] = Tolerances.perplexity,
    size_tolerance: Annotated[float, typer.Option(help="Accepted relative rise of cache bytes.")] = Tolerances.size,
    agreement_tolerance: Annotated[
        float, typer.Option(help="Accepted fall of a share: top-1, top-5, retrieval.")
    ] = Tolerances.agreement,
    time_tolerance: Annotated[
        float | None, typer.Option(help="Accepted relative rise of times.", show_default="times don't count")
    ] = Tolerances.time,
) -> None:
    """Compare two runs; exit status 1 if the second is worse."""
    limits = Tolerances(kl_tolerance, perplexity_tolerance, size_tolerance, agreement_tolerance, time_tolerance)
    before, after = latest_run(a), latest_run(b)
    findings = compare_runs(before, after, limits)
    make_console().print(compare_table(findings))
    typer.echo(compare_summary(findings, before[0], after[0]))
    if any(finding.worse for finding in findings):
        raise typer.Exit(1)


def bench(
    model: Model = "smollm2-135m",
    strategies: Strategies = "dynamic,fp,int4",
    context: Annotated[str, typer.Option(help="Context lengths in tokens, comma-separated, ascending.")] = "1024,4096",
    tokens: Annotated[int, typer.Option(help="Decoded tokens in a round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds at each context length.")] = 3,
    prefill_chunk_tokens: Prefill = 512,
    text: Annotated[
        str | None, typer.Option(help="Text to feed, as for `kvplus eval`.", show_default="random tokens")
    ] = None,
    fused: Annotated[bool, typer.Option(help="Read packed states directly, as `use_fused_attention` does.")] = False,
    kernels: Annotated[bool, typer.Option(help="Time attention alone, without a model, against PyTorch's.")] = False,
    shape: Annotated[
        str, typer.Option(help="With --kernels, numbers for batch, kv_heads, queries, head_dim and tokens.")
    ] = KERNEL_SHAPE,
    plain_avx512: Annotated[
        bool, typer.Option("--plain-avx512", help="With --kernels, also time PyTorch's bfloat16 on plain AVX-512.")
    ] = False,
    growth: Annotated[bool, typer.Option(help="Tell how times grow, over three contexts or more.")] = False,
    peak_memory: Annotated[
        bool, typer.Option("--peak-memory", help="Watch the memory of decoding at the longest context, in processes.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = Path("kvplus-bench"),
) -> None:
    """Time one decoded token at given context lengths, strategies taking turns in one run."""
    of_models = {"fused": fused, "growth": growth, "peak-memory": peak_memory, "text": text}
    of_kernels = {"shape": shape != KERNEL_SHAPE, "plain-avx512": plain_avx512}
    for name in (name for name, given in (of_models if kernels else of_kernels).items() if given):
        words = "does nothing with --kernels; leave out one of the two" if kernels else "goes with --kernels; add that"
        raise ValueError(f"`{name}` {words}")
    if kernels:
        names = choose_strategies(strategies)
        _bench_kernels(names, read_shape(shape), device, dtype, tokens * rounds, out, held=plain_avx512)
        return
    plan = BenchPlan(_lengths(context), tokens, rounds, prefill_chunk_tokens, fused)
    if growth:
        require_contexts(plan.contexts)
    names = choose_strategies(strategies)
    chosen_text = None if text is None else load_text(text)
    loaded, tokenizer, source = load_model(model, device, dtype)
    if peak_memory and loaded.device.type != "cpu":
        raise ValueError(
            f"`--peak-memory` watches processes on a CPU, this model is on {loaded.device}; use --device cpu"
        )
    require_positions(loaded.config, plan.longest_tokens)
    if chosen_text is None:
        token_ids = _random_prompt(len(tokenizer), plan.longest_tokens)
    else:
        token_ids = cut_windows(chosen_text, tokenizer, windows=1, window_tokens=plan.longest_tokens)[0]
    console = make_console()
    facts = {
        **run_facts(loaded, source),
        "kind": "bench",
        "text": None if chosen_text is None else {"name": chosen_text.name, "sha256": chosen_text.sha256},
    }
    with Progress(console=console) as progress:
        task = progress.add_task("bench", total=len(plan.contexts) * (len(names) + rounds))
        found = run_bench(loaded, token_ids, names, plan, lambda: progress.advance(task))
    rows = [{**facts, **row} for row in found]
    told = []
    if peak_memory:
        job = PeakJob(model, "", plan.contexts[-1], WATCHED_TOKENS, prefill_chunk_tokens, fused, dtype)
        jobs = {name: replace(job, strategy=name) for name in names}
        told = watch_rows(rows, jobs)
    append_rows(out / "bench.jsonl", rows)
    console.print(bench_table(rows))
    if peak_memory:
        console.print(peak_table(rows))
    if growth:
        grown = growth_rows(rows)
        append_rows(out / "growth.jsonl", grown)
        console.print(growth_table(grown))
    _draw(rows, out / "ms-by-context.png")
    for line in [*complaints(rows), *told]:
        console.print(line, soft_wrap=True, markup=False)
    typer.echo(bench_summary(rows))
    _leave(rows)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws times against contexts, if there are several."""
    drawn = [row for row in rows if row["status"] == "ok"]
    if len({row["bench"]["context_tokens"] for row in drawn}) > 1:
        plot_decode(drawn, path)


def _bench_kernels(
    names: list[str], shape: Shape, device: str, dtype: str, rounds: int, out: Path, *, held: bool
) -> None:
    """Times attention alone."""
    where = resolve_device(device)
    require_choice("dtype", dtype, ("auto", *DTYPES))
    chosen = DTYPES.get(dtype, torch.float32 if where.type == "cpu" else torch.bfloat16)
    mine = [name for name in names if name != REFERENCE_STRATEGY]
    rows = run_kernel_bench(mine, shape, device=where, dtype=chosen, rounds=rounds, held=held)
    append_rows(out / "kernels.jsonl", rows)
    console = make_console()
    console.print(kernel_table(rows))
    for line in complaints(rows):
        console.print(line, soft_wrap=True, markup=False)
    typer.echo(kernel_summary(rows))
    _leave(rows)


def _lengths(text: str) -> tuple[int, ...]:
    """Reads comma-separated lengths."""
    try:
        return tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(f"`context` must be integers separated by commas, got {text!r}") from None


def _random_prompt(vocab: int, tokens: int) -> torch.Tensor:
    """Returns seeded random token ids, shape (tokens,); the time of a step doesn't depend on what is said."""
    return torch.tensor(random.Random(RANDOM_PROMPT_SEED).choices(range(vocab), k=tokens))


def _leave(rows: list[dict[str, object]]) -> None:
    """Ends with exit status 1 unless every strategy has figures."""
    if any(row["status"] != "ok" for row in rows):
        raise typer.Exit(1)
