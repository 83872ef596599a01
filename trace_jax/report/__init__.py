"""Reports of runs: a self-contained HTML file with an overview PNG, and the figure of the quickstart."""

from trace_jax.report.build import report
from trace_jax.report.quickstart import quickstart_figure

__all__ = ["quickstart_figure", "report"]
