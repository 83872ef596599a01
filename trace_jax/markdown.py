"""Tables in documents, brought up to date from result files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_jax.errors import UserError


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """A Markdown table; the columns named in `texts` are aligned left, the others right."""
    lines = [headings, ["---" if heading in texts else "---:" for heading in headings], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_block(text: str, name: str, content: str) -> str:
    """The document with what stands between the lines `<!-- NAME -->` and `<!-- end -->` replaced.

    Raises:
      UserError: the document has no such lines.
    """
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise UserError(f"the document has no place for the {name}; add the lines `<!-- {name} -->` and `<!-- end -->`")
    # A function, so that a backslash in a cell is no group reference.
    return pattern.sub(lambda match: f"{match[1]}{content}{match[2]}", text)
