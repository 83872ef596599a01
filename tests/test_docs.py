"""The Python blocks of the documentation run as they stand, those of a page in order and in one namespace.

A block whose first line is a comment that begins with "# not run" is left out, which a reader sees.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(number of the first line, code) of each block that runs."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]
    return [(line, code) for line, code in blocks if not code.startswith("# not run")]


def run(text: str, name: str) -> int:
    """Runs the blocks of a page and counts them. A traceback shows the lines of the page."""
    namespace: dict[str, object] = {"__name__": name}
    blocks = python_blocks(text)
    for line, code in blocks:
        exec(compile("\n" * (line - 1) + code, name, "exec"), namespace)
    return len(blocks)


def section(text: str, heading: str) -> str:
    """From a heading of the second level to the next."""
    return re.search(rf"^## {heading}$.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[0]  # type: ignore[index]


KERNELS = (ROOT / "docs" / "kernels.md").read_text()
README = section((ROOT / "README.md").read_text(), "For the kernel writer")


def test_docs_kernels():
    assert run(KERNELS, "docs/kernels.md") == 5


def test_readme_for_the_kernel_writer(capsys):
    assert run(README, "README.md") == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed and all(f"`{line}`" in README for line in printed)


@pytest.mark.parametrize(
    ("right", "wrong", "stops_at"),
    [
        ("e2m1_magnitude(code)", "e2m1_magnitude(code ^ 1)", "tests.test_exp_10_every_bf16_pattern(NVFP4)"),
        ('["columns"] == 256', '["columns"] == 255', '["columns"] == 255'),
    ],
)
def test_a_wrong_block_fails_at_its_line(right, wrong, stops_at):
    """The page as a reader would find it after a mistake: the kernel a code off, a statement that no longer holds."""
    text = KERNELS if "code" in right else section(KERNELS, "The autotuning table: sizes by device")
    assert text.count(right) == 1
    page = text.replace(right, wrong)
    with pytest.raises(AssertionError) as failure:
        run(page, "page")
    lines = [entry.lineno + 1 for entry in failure.traceback if str(entry.path).endswith("page")]
    assert stops_at in page.splitlines()[lines[-1] - 1]


def test_a_block_may_be_left_out_visibly():
    text = "```python\n# not run: needs a GPU\n1 / 0\n```\ntext\n```python\na = 1\n```\n```\n1 / 0\n```\n"
    assert python_blocks(text) == [(7, "a = 1\n")]


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, function) of every test that a page names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)


def absent(tests: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that do not exist."""
    return [(file, name) for file, name in tests if not (ROOT / file).is_file() or f"def {name}(" not in (ROOT / file).read_text()]


def test_every_fault_of_docs_reliability_names_tests_that_exist():
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15 and not [row for row in rows if not named_tests(row)]
    assert absent(named_tests(page)) == []
    assert absent([("tests/test_docs.py", "test_" + "nothing"), ("tests/none.py", "test_a")]) != []
    assert not re.findall(r"`tests/[^`]*`", re.sub(r"`tests/[\w/]+\.py(::test_\w+)?`", "", page))
