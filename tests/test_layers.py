"""The import table of docs/ARCHITECTURE.md: data flows one way, and plan, schedule, planner, observe and cluster know no torch."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "pipetrain"

# layer -> layers it may import of ours. None: everything.
ALLOWED: dict[str, set[str] | None] = {
    "config": set(),
    "model": {"config"},
    "data": {"config"},
    "plan": {"config"},
    "schedule": {"plan"},
    "planner": {"config", "plan", "schedule"},
    "parallel": {"config", "plan", "schedule"},
    "runtime": {"config", "plan", "schedule", "parallel", "planner", "model"},
    "engine": {"config", "plan", "schedule", "parallel", "model", "data", "runtime"},
    "snapshot": {"config", "plan", "schedule", "parallel", "model", "data", "runtime"},
    "observe": {"config", "plan", "schedule"},
    "cluster": {"config"},
    "train": None,
    "sweep": None,
    "cli": None,
    "__init__": None,
}
TORCH_FREE = {"config", "plan", "schedule", "planner", "observe", "cluster"}
STANDARD_ONLY = {"plan", "schedule", "planner", "cluster"}


def imports(path: pathlib.Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def layer_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_imports_follow_the_table(path: pathlib.Path) -> None:
    layer = layer_of(path)
    allowed = ALLOWED[layer]
    for module in imports(path):
        if module.split(".")[0] == "pipetrain":
            target = module.split(".")[1] if "." in module else "__init__"
            assert target not in {"train", "cli"} or layer in {"cli", "__init__"}, f"nobody imports {module}"
            assert allowed is None or target == layer or target in allowed, f"{layer} may not import {module}"
        elif layer in TORCH_FREE:
            assert module.split(".")[0] != "torch", f"{layer} may not import torch"
        if module.split(".")[0] == "omegaconf":
            assert layer in {"train", "cli"} or path.name == "load.py", "omegaconf belongs to config/load.py"
        if layer in STANDARD_ONLY:
            top = module.split(".")[0]
            assert top == "pipetrain" or top in sys.stdlib_module_names, f"{layer} may not import {top}"


def test_sub_package_inits_are_empty() -> None:
    assert [str(path) for path in ROOT.glob("*/__init__.py") if path.read_text().strip()] == []


def test_torch_is_not_loaded() -> None:
    modules = [
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for path in FILES
        if layer_of(path) in TORCH_FREE - {"config"} and path.name != "__init__.py"
    ]
    code = f"import sys, {', '.join(['pipetrain', 'pipetrain.config.records', *modules])}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
