"""On the console: one line a step with the figures one watches."""

import math
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

_SHOWN = (
    ("loss", "loss", "{:.4f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("sft/pass_at_1", "pass", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("reward/pass_rate", "pass", "{:.3f}"),
    ("rollout_corr/k3_kl", "kl", "{:.1e}"),
    ("unguided/rollout_corr/k3_kl", "kl unguided", "{:.1e}"),
    ("response/length_mean", "length", "{:.1f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("grad_norm", "grad", "{:.2g}"),
    ("throughput/rollout_tokens_per_s", "tok/s", "{:.0f}"),
    ("time/step", "time", "{:.1f}s"),
)


class ConsoleWriter:
    """Prints the known metrics that a step has, in a fixed order, and the evaluation results when there are any."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, step: int, metrics: Mapping[str, float | int | bool | str | None]) -> None:
        line = Text.assemble((f"step {step:>5}", "bold"))
        shown = [(label, form, metrics.get(name)) for name, label, form in _SHOWN]
        shown += [
            (name.removesuffix("/pass_at_1").replace("/", " "), "{:.3f}", value)
            for name, value in metrics.items()
            if name.startswith("eval/") and name.endswith("/pass_at_1")
        ]
        for label, form, value in shown:
            if isinstance(value, int | float):
                text, style = (form.format(value), "") if math.isfinite(value) else ("nan", "bold red")
                line.append_text(Text.assemble(("  " + label + " ", "dim"), (text, style)))
        self._console.print(line, soft_wrap=True)
