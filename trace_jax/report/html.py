"""One HTML file without anything outside it: figures are embedded, there is no script and no network."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from trace_jax.report.sections import SECTIONS, Panel, Section
from trace_jax.report.series import Run
from trace_jax.report.style import COLORS, legend_height, new_figure
from trace_jax.report.summary import MISSING, summary_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSS = """
:root { color-scheme: light; --ink: #1f2933; --muted: #616e7c; --line: #e4e7eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f5f7; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 40px 0 12px; }
header p { color: var(--muted); margin: 0; }
table { border-collapse: collapse; width: 100%; background: white; border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
th, td { text-align: left; padding: 8px 14px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child th, tr:last-child td { border-bottom: 0; }
tbody th { font-weight: 500; color: var(--muted); width: 38%; }
td { font-variant-numeric: tabular-nums; }
td.missing { color: #9aa5b1; }
.scroll { overflow-x: auto; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; background: white; border: 1px solid var(--line); border-radius: 10px; padding: 14px 14px 12px; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: 13px; margin-top: 8px; }
footer { color: var(--muted); font-size: 13px; margin-top: 40px; }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; } }
"""


FOOTER = (
    "Thin lines are single steps, thick ones a centred moving average over a tenth of them. Every figure comes from the metrics.jsonl of "
    "the run; docs/metrics.md gives each formula."
)


def render_html(
    runs: Sequence[Run],
    *,
    title: str = "trace-jax report",
    summary: Sequence[tuple[str, list[str]]] | None = None,
    sections: Sequence[Section] = SECTIONS,
    footer: str = FOOTER,
) -> str:
    """The report as HTML text. Use it inside ``styled()``.

    Args:
        runs: what is drawn, one colour each.
        summary: rows of (label, one text a run); None takes `summary_table`.
    """
    names = ", ".join(run.name for run in runs)
    body = "\n".join(_section(section, runs) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(names)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
<header><h1>{escape(title)}</h1><p>{escape(names)}</p></header>
<h2>Summary</h2>
{_table(runs, summary_table(runs) if summary is None else summary)}
{body}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""


def png_bytes(figure: "Figure") -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _table(runs: Sequence[Run], summary: Sequence[tuple[str, list[str]]]) -> str:
    dots = [f'<span class="dot" style="background:{COLORS[i % len(COLORS)]}"></span>' if len(runs) > 1 else "" for i in range(len(runs))]
    head = "".join(f"<th>{dot}{escape(run.name)}</th>" for dot, run in zip(dots, runs, strict=True))
    rows = "\n".join(f"<tr><th>{escape(label)}</th>{''.join(map(_cell, values))}</tr>" for label, values in summary)
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _cell(value: str) -> str:
    return f'<td class="missing">{MISSING}</td>' if value == MISSING else f"<td>{escape(value)}</td>"


def _section(section: Section, runs: Sequence[Run]) -> str:
    figures = "\n".join(_figure(panel, runs) for panel in section.panels)
    return f'<section>\n<h2>{escape(section.title)}</h2>\n<div class="grid">\n{figures}\n</div>\n</section>'


def _figure(panel: Panel, runs: Sequence[Run]) -> str:
    height = (1.5 + 0.35 * len(runs) if panel.bars else 3.4) if panel.wide else 2.9
    figure = new_figure(9.6 if panel.wide else 5.0, height)
    axes = figure.subplots()
    axes.set_title(panel.title)
    panel.draw(axes, runs)
    if not panel.bars:
        figure.set_figheight(height + legend_height(axes))
    data = base64.b64encode(png_bytes(figure)).decode()
    kind = ' class="wide"' if panel.wide else ""
    return (
        f'<figure{kind}><img alt="{escape(panel.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
    )
