"""Whoever searches for a name finds one thing: no two public classes or functions of the package share a name."""

import ast
import collections
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "pipetrain"
EVERYWHERE = {"main"}  # what `python -m` runs
OF_A_COMMAND = {"add_arguments", "run"}  # what `cli/main.py` calls in each cli/NAME_command.py


def shared(places: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that are in more than one place, with their places."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return {name: where for name, where in found.items() if len(where) > 1 and name not in EVERYWHERE}


def public_names(path: pathlib.Path) -> list[str]:
    """Classes and functions at the top of a file, but those that each command has."""
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.parse(path.read_text()).body
    found = [node.name for node in nodes if isinstance(node, definitions) and not node.name.startswith("_")]
    return [name for name in found if not (name in OF_A_COMMAND and path.name.endswith("_command.py"))]


FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


def test_no_two_public_classes_or_functions_share_a_name() -> None:
    assert shared([(name, place) for place, path in FILES.items() for name in public_names(path)]) == {}


def test_a_shared_name_is_seen() -> None:
    assert shared([("check", "a.py"), ("check", "b.py"), ("main", "a.py"), ("main", "b.py")]) == {
        "check": ["a.py", "b.py"]
    }
