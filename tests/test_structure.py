"""The shape of the tree: direction of imports, size of files, public names, and what must not be in a commit."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "trace_jax", "rollout_bridge")
ABOVE = {"pallas_kernels": {"trace_jax", "rollout_bridge"}, "trace_jax": {"rollout_bridge"}, "rollout_bridge": set()}
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXTS = [
    path
    for pattern in ("*.py", "*.md", "*.toml", "*.yaml", "*.txt", "Makefile", ".ci/run")
    for path in sorted(ROOT.rglob(pattern) if "*" in pattern else ROOT.glob(pattern))
    if not {".venv", ".venv-vllm", ".git", ".cache", "runs", "build"} & set(path.relative_to(ROOT).parts) and path != Path(__file__)
]


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, lazily or by name in a string for import_module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(\w+)(\.\w+)+(:\w+)?", node.value)
            if match:
                found.add(match[1])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downwards(package: str) -> None:
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    upward = {str(path.relative_to(ROOT)): found for path in files if (found := imported_packages(path) & ABOVE[package])}
    assert not upward


def test_only_the_program_imports_its_command_line() -> None:
    """What the commands do can be used without them; `quickstart` and `__main__` are programs themselves."""
    work = [path for path in SOURCES if path.parent.name != "cli" and path.name not in ("__main__.py", "quickstart.py")]
    assert len(work) > 100 and not [path for path in work if "trace_jax.cli" in path.read_text()]


def test_kernels_need_jax_and_numpy_only() -> None:
    heavy = {"flax", "optax", "orbax", "pydantic", "typer", "rich", "torch", "yaml"}
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "pallas_kernels"]
    assert files and not {str(path): found for path in files if (found := imported_packages(path) & heavy)}


def test_files_are_small() -> None:
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (*SOURCES, *sorted((ROOT / "tests").rglob("*.py")))
    }
    assert not {name: lines for name, lines in sizes.items() if lines > 500}
    source = [lines for name, lines in sizes.items() if not name.startswith("tests")]
    assert sorted(source)[len(source) * 9 // 10] <= 250


@pytest.mark.parametrize(
    "module",
    [".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py" and "__all__" in path.read_text()],
)
def test_public_names_exist(module: str) -> None:
    try:
        package = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.importorskip("torch")  # the worker's side needs it
        raise
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name), f"{module}.__all__ lists {name}, which it does not have"


def test_public_functions_and_classes_are_documented() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not bare


def test_every_module_says_what_it_is() -> None:
    assert not [
        str(path.relative_to(ROOT)) for path in SOURCES if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]


def test_nothing_unfinished_or_local_is_committed() -> None:
    marker = re.compile(r"NotImplemented\b(?!Error)|(?<![\w.])/(work|root|home)/\w")
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    ]
    assert not hits


def test_constraints_name_no_index_and_pin_everything() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pin = re.compile(r"[a-z0-9-]+==[\w.+]+(; python_version (<|>=) \"3\.12\")?")
    assert lines and not [line for line in lines if not pin.fullmatch(line)]
