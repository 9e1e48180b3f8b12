"""What each file of rows needs."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder that everybody may enter: pytest's own are for their owner."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="pipetrain-test-"))
    path.chmod(0o777)
    yield path
    path.chmod(0o777)
    for inside, folders, _ in os.walk(path):  # top-down: a row may have shut a folder
        for name in folders:
            (pathlib.Path(inside) / name).chmod(0o777)
    shutil.rmtree(path)
