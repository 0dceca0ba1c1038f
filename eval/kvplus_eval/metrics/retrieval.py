"""How often facts planted in a long context are found again; a figure for each task in `kvplus_eval.tasks`."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric
from kvplus_eval.tasks import TASKS


@METRICS.register("retrieval")
class Retrieval(Metric):
    """Share of questions answered exactly, over all lengths and depths, and the mean loss of the answers' tokens.

    The share is what users see; the loss moves before it does. The row's `tasks` has both by length and depth.
    """

    columns = {
        **{f"{task}_accuracy": Column("share", "higher") for task in TASKS},
        **{f"{task}_answer_nats": Column("nats", "lower") for task in TASKS},
    }

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns both figures of every task; argument as in `Metric`."""
        figures: dict[str, float | int | None] = dict.fromkeys(Retrieval.columns)
        for task in TASKS:
            answers = [answer for answer in measured.answers if answer["task"] == task]
            if answers:
                figures[f"{task}_accuracy"] = sum(answer["exact"] for answer in answers) / len(answers)
                figures[f"{task}_answer_nats"] = sum(answer["nats"] for answer in answers) / len(answers)
        return figures
