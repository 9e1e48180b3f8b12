"""The import table of docs/ARCHITECTURE.md: data flows one way, and what draws, plans and starts knows no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pipetrain"

# layer -> layers it may import of ours. None: everything.
ALLOWED: dict[str, set[str] | None] = {
    "config": {"schedule.policy"},
    "schedule": set(),
    "stage": set(),
    "comm": {"schedule", "stage.meter"},
    "plan": {"schedule", "comm.coordinates", "config"},
    "models": {"stage", "config"},
    "data": {"config"},
    "monitor": {"schedule", "plan", "config"},
    "runtime": (LIBRARY := {"schedule", "stage", "comm", "plan", "models", "monitor.step_report"}),
    "optim": {"comm", "models.trained", "config"},
    "engine": LIBRARY | {"runtime", "optim", "data.batch", "config"},
    "snapshot": {"plan", "models", "stage", "comm", "config"},
    "launcher": {"comm.address", "config"},
    "trainer": (BELOW := LIBRARY | {"runtime", "engine", "snapshot", "monitor", "data", "config"}),
    "verify": BELOW | {"trainer", "launcher"},
    "train": None,
    "cli": None,
    "__init__": None,
}
TORCH_FREE = {"config", "schedule", "plan", "monitor", "launcher"}
TORCH_FREE_FILES = {
    "trainer/prepare.py",
    "models/size.py",
    "models/hf/hf_size.py",
    "models/hf/source.py",
    "engine/available.py",
    "snapshot/start.py",
    "comm/coordinates.py",
}  # of a room with torch: what is read before a process starts
STANDARD_ONLY = {"schedule", "plan", "launcher"}
STANDARD_ONLY_FILES = ("monitor/draw/", "trainer/prepare.py")  # begin with
# Files that may be read by who otherwise has no business in their room, or do what their room otherwise may not.
READS_CONFIG_FILES = {"config/load.py"}  # omegaconf
STARTS_TORCHRUN = {"launcher/launch.py", "launcher/signed.py"}  # torch, inside a function


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


NOBODY_IMPORTS = {"train", "cli"}  # nor, but these, trainer.prepare: what runs is handed on, not made again
FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_imports_follow_the_table(path: Path) -> None:
    layer, name = layer_of(path), str(path.relative_to(ROOT))
    allowed = ALLOWED[layer]
    for module in imports(path):
        top, *rest = module.split(".")
        if top == "pipetrain":
            target = rest[0] if rest else "__init__"
            assert target not in NOBODY_IMPORTS or layer in {"cli", "__init__"}, f"nobody imports {module}"
            assert rest[:2] != ["trainer", "prepare"] or layer in NOBODY_IMPORTS, f"{layer} may not import {module}"
            within = {".".join(rest[:length]) for length in (1, 2)}
            assert allowed is None or target == layer or within & allowed, f"{layer} may not import {module}"
            if module == "pipetrain.config.load":
                assert allowed is None or name in READS_CONFIG_FILES, f"{name}: config is given, not loaded"
        elif (layer in TORCH_FREE or name in TORCH_FREE_FILES) and name not in STARTS_TORCHRUN:
            assert top != "torch", f"{layer} may not import torch"
        if top == "omegaconf":
            assert allowed is None or name in READS_CONFIG_FILES, "omegaconf belongs to config/load.py"
        if (layer in STANDARD_ONLY or name.startswith(STANDARD_ONLY_FILES)) and name not in STARTS_TORCHRUN:
            assert top == "pipetrain" or top in sys.stdlib_module_names, f"{layer} may not import {top}"


def test_sub_package_inits_are_empty() -> None:
    assert [str(path) for path in ROOT.glob("*/__init__.py") if path.read_text().strip()] == []


def test_torch_is_not_loaded() -> None:
    modules = [
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for path in FILES
        if (layer_of(path) in TORCH_FREE - {"config"} and path.name != "__init__.py")
        or str(path.relative_to(ROOT)) in TORCH_FREE_FILES
    ]
    code = f"import sys, {', '.join(['pipetrain', 'pipetrain.config.records', *modules])}"
    public = "pipetrain.Op, pipetrain.make_schedule, pipetrain.bound"
    command = [sys.executable, "-c", f"{code}; {public}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, check=False).returncode == 0
