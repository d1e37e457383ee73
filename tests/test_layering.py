"""Imports run downward, in no circle, at the top of a file; techniques do not know each other; spec needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thrice

SOURCE = Path(thrice.__file__).parent

FLOORS = {
    "errors": 0,
    "worker": 1,
    "spec": 1,
    "files": 1,
    "model": 2,
    "data": 2,
    "optim": 2,
    "runtime": 3,
    "observe.trace": 3,
    "observe.operators": 3,
    "observe.engine": 3,
    "techniques": 4,
    "registry": 5,
    "compose": 5,
    "step": 5,
    "train": 5,
    "checkpoint": 5,
    "run_folder": 5,
    "job_file": 5,
    "observe": 6,
    "verify": 7,
    "reference": 7,
    "certificate": 7,
    "micro_batch": 7,
    "diagnose": 7,
    "child": 7,
    "launch": 7,
    "cluster": 7,
    "curves": 7,
    "verdict": 7,
    "experiment": 7,
    "compare": 7,
    "report": 8,
    "cli": 8,
    "": 8,
}
"""By module or package, the longest name that fits; "" is the top `__init__`, the public face."""

# who may import what inside a function: the command line defers torch, and an optional extra may be missing
DEFERRED = {"cli": None, "data.tokenizer": "tokenizers"}


class Module:
    """One file: its name below `thrice` ("" for the top), and the imports in it."""

    def __init__(self, path: Path, root: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.package else parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.top: list[str] = []
        """Full names imported when the file is loaded."""
        self.inside: list[str] = []
        """Full names imported by a function."""
        self._walk(self.tree, self.top)

    def _walk(self, node: ast.AST, found: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{self.name}: a relative import is not read by this test"
                found.extend(f"{child.module}.{alias.name}" for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    self._walk(other, found)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                self._walk(child, self.inside)
            else:
                self._walk(child, found)


def read(root: Path) -> dict[str, Module]:
    modules = (Module(path, root) for path in sorted(root.rglob("*.py")))
    return {module.name: module for module in modules}


def floor(name: str) -> int:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in FLOORS:
            return FLOORS[prefix]
    raise AssertionError(f"{name} has no floor: give it one in FLOORS")


def ours(imported: str, modules: dict[str, Module]) -> str | None:
    """The module of ours that `imported` loads; None for another library's."""
    if imported != "thrice" and not imported.startswith("thrice."):
        return None
    name = imported.removeprefix("thrice").removeprefix(".")
    while name not in modules:  # what follows the module is a name in it
        name = name.rpartition(".")[0]
    return name


def edges(module: Module, modules: dict[str, Module], *, inside: bool = True) -> set[str]:
    imported = module.top + (module.inside if inside else [])
    return {name for full in imported if (name := ours(full, modules)) is not None}


def problems(root: Path) -> Iterator[str]:
    """Everything that breaks a rule, a line each."""
    modules = read(root)
    for name, module in modules.items():
        own = floor(name)
        for other in edges(module, modules):
            if floor(other) > own:
                yield f"upward: {name} ({own}) imports {other or 'thrice'} ({floor(other)})"
            if name.startswith("techniques.") and other.startswith("techniques."):
                yield f"technique: {name} imports {other}"
        for full in module.inside:
            if name not in DEFERRED or (DEFERRED[name] is not None and full.partition(".")[0] != DEFERRED[name]):
                yield f"inside a function: {name} imports {full}"
        if module.package and name and module.tree.body:
            yield f"not empty: {name}/__init__.py"
        if name == "errors" or name.split(".")[0] == "spec":
            for reached in reachable(name, modules):
                if any(full.partition(".")[0] == "torch" for full in modules[reached].top):
                    yield f"torch: {name} imports it through {reached}"
    yield from cycles(modules)


def reachable(name: str, modules: dict[str, Module]) -> set[str]:
    """The modules that are loaded when `name` is, itself included."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += edges(modules[current], modules, inside=False)
    return seen


def cycles(modules: dict[str, Module]) -> Iterator[str]:
    for name, module in modules.items():
        for other in edges(module, modules, inside=False):
            if name in reachable(other, modules):
                yield f"cycle: {name} and {other or 'thrice'} import each other"


def test_our_own_source_keeps_the_rules():
    assert list(problems(SOURCE)) == []


def test_every_file_is_read():
    modules = read(SOURCE)
    assert {"", "errors", "spec.job", "techniques.recompute", "cli"} <= modules.keys()
    assert edges(modules["compose"], modules) >= {"errors", "model.decoder", "runtime.session", "spec.job"}
    assert "torch" in {full.partition(".")[0] for full in modules["step"].top}


PLANTED = {
    "upward": ({"spec/job.py": "from thrice.model.loss import x", "model/loss.py": ""}, "upward: spec.job (1)"),
    "upward by a plain import": ({"optim/a.py": "import thrice.step", "step.py": ""}, "upward: optim.a (2)"),
    "upward by the package's name": ({"optim/a.py": "from thrice import train", "train.py": ""}, "upward: optim.a"),
    "upward to the top": ({"step.py": "import thrice"}, "upward: step (5) imports thrice (8)"),
    "upward inside a function": (
        {"cli.py": "def f():\n    from thrice.step import x", "step.py": "def f():\n    import thrice.cli"},
        "upward: step (5) imports cli (8)",
    ),
    "within a class": (
        {"model/a.py": "class A:\n    from thrice.step import x", "step.py": ""},
        "upward: model.a",
    ),
    "under a condition": (
        {"model/a.py": "try:\n    from thrice.step import x\nexcept ImportError:\n    pass", "step.py": ""},
        "upward: model.a",
    ),
    "cycle of two": (
        {"model/a.py": "import thrice.model.b", "model/b.py": "from thrice.model import a"},
        "cycle: model.a and model.b",
    ),
    "cycle of three": (
        {
            "data/a.py": "import thrice.data.b",
            "data/b.py": "import thrice.data.c",
            "data/c.py": "import thrice.data.a",
        },
        "cycle: data.c and data.a",
    ),
    "inside a function": ({"step.py": "def f():\n    import json"}, "inside a function: step imports json"),
    "inside a method": (
        {"data/tokenizer.py": "class A:\n    def f(self):\n        import json"},
        "inside a function: data.tokenizer imports json",
    ),
    "technique": (
        {"techniques/a.py": "from thrice.techniques.b import B", "techniques/b.py": ""},
        "technique: techniques.a imports techniques.b",
    ),
    "torch": ({"errors.py": "from torch import nn"}, "torch: errors imports it through errors"),
    "torch at second hand": (
        {
            "spec/a.py": "from thrice.spec.b import x",
            "spec/b.py": "import thrice.errors",
            "errors.py": "import torch.nn",
        },
        "torch: spec.a imports it through errors",
    ),
    "not empty": ({"optim/__init__.py": "X = 1"}, "not empty: optim/__init__.py"),
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(("files", "expected"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(tmp_path, files, expected):
    found = list(problems(plant(tmp_path, files)))
    assert any(line.startswith(expected) for line in found), found


def test_what_is_allowed_is_not_a_problem(tmp_path):
    root = plant(
        tmp_path,
        {
            "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from thrice.step import x",
            "step.py": "from thrice.model import a\nfrom thrice.errors import E",
            "errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "model/__init__.py": "",
            "model/a.py": "from thrice.model.b import x\nimport torch",
            "model/b.py": "",
            "cli.py": "def f():\n    import torch\n    from thrice.step import x",
            "data/tokenizer.py": "def f():\n    import tokenizers\n    from tokenizers.models import BPE",
            "techniques/a.py": "",
            "registry.py": "from thrice.techniques.a import A",
            "diagnose.py": "from thrice.techniques.a import A",
            "observe/trace.py": "",
            "techniques/b.py": "from thrice.observe.trace import Tracer",
        },
    )
    assert list(problems(root)) == []


def test_a_file_with_no_floor_is_not_passed_over(tmp_path):
    with pytest.raises(AssertionError, match="helpers has no floor"):
        list(problems(plant(tmp_path, {"helpers.py": ""})))


@pytest.mark.parametrize("module", ["thrice", "thrice.cli", "thrice.errors", "thrice.spec.load"])
def test_it_loads_without_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
