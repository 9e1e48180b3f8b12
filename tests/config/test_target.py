"""Promise: `module:name` gives what the user wrote in a file of the current folder, and one line where it names nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipetrain.config.problem import ConfigError
from pipetrain.config.target import is_extension, load_extension, load_target

GROUP = "pipetrain.made_up"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    before = set(sys.modules)
    (tmp_path / "own_shapes.py").write_text("class Square:\n    sides = 4\n    def of(self): ...\nvalue = None\n")
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("def make_layers(): return 'made'\n")
    (package / "broken.py").write_text("import no_such_library\n")
    (package / "raises.py").write_text("raise RuntimeError('first line\\nsecond')\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("spelling", ["own_package.models:make_layers", "own_package.models.make_layers"])
def test_both_spellings_name_a_function(spelling: str) -> None:
    assert load_target(spelling)() == "made"


def test_a_name_may_lie_in_a_class_and_be_none() -> None:
    assert load_target("own_shapes:Square.sides") == 4
    assert load_target("own_shapes:value") is None


def test_the_current_folder_is_searched_first(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "own_shapes.py").write_text("value = 'of the other folder'\n")
    sys.path.insert(0, str(other))
    assert load_target("own_shapes:value") is None


@pytest.mark.parametrize(
    ("spelling", "told"),
    [
        ("make_layers", "make_layers: names no function; write MODULE:FUNCTION, as in my_package.models:make_layers"),
        ("own_shapes:", "own_shapes:: names no function"),
        ("own_shapes:f()", "own_shapes:f(): names no function"),
        ("../own_shapes:f", "../own_shapes:f: names no function"),
        (
            "own_shape:f",
            "there is no module 'own_shape' in .* or in the installed packages; did you mean 'own_shapes'?",
        ),
        (
            "tkinterr:f",
            "there is no module 'tkinterr' in .* or in the installed packages$",
        ),  # a module of Python is not meant
        ("own_package.model:f", "there is no module 'model' in own_package; did you mean 'models'?"),
        (
            "own_package.broken:f",
            "own_package.broken cannot be imported: ModuleNotFoundError: No module named 'no_such_",
        ),
        ("own_package.raises:f", "own_package.raises cannot be imported: RuntimeError: first line$"),
        ("own_package.models:make_layer", "own_package.models has no 'make_layer'; did you mean 'make_layers'?"),
        ("own_shapes:Square.off", "own_shapes has no 'Square.off'; did you mean 'of'?"),
        ("own_shapes:xyz", "own_shapes has no 'xyz'; there are Square$"),
        ("own_package:xyz", "own_package has no 'xyz'; there are no functions$"),
    ],
)
def test_what_names_nothing_is_one_line(spelling: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?").replace("()", r"\(\)")) as raised:
        load_target(spelling)
    assert "\n" not in str(raised.value)


def test_an_installed_package_gives_a_name(folder: Path) -> None:
    _install(
        folder, "first", "twice = own_shapes:Square\nonce = own_package.models:make_layers\ngone = own_shapes:no\n"
    )
    assert is_extension("once", GROUP)
    assert load_extension("key", "once", GROUP)() == "made"
    assert not is_extension("never", GROUP)
    with pytest.raises(ConfigError, match="key=never: installed are gone, once, twice; write MODULE:FUNCTION"):
        load_extension("key", "never", GROUP)
    with pytest.raises(ConfigError, match=r"key=own_shapes:Square\.sides: is a int, and no function or class"):
        load_extension("key", "own_shapes:Square.sides", GROUP)
    with pytest.raises(ConfigError, match=r"^key=gone: own_shapes:no: own_shapes has no 'no'"):
        load_extension("key", "gone", GROUP)
    with pytest.raises(ConfigError, match=r"^key=own_shapes:no: own_shapes has no 'no'"):
        load_extension("key", "own_shapes:no", GROUP)
    _install(folder, "second", "twice = own_package:other\n")
    with pytest.raises(ConfigError, match="key=twice: packages give own_package:other and own_shapes:Square this name"):
        load_extension("key", "twice", GROUP)


def _install(folder: Path, name: str, entry_points: str) -> None:
    """What pip leaves of a package that has these entry points."""
    made = folder / f"{name}-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(f"[{GROUP}]\n{entry_points}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
