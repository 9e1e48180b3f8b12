"""No room of the package, and no file of it or of the tests, is longer than it may be."""

import size


def test_rooms_and_files_keep_within_their_lines() -> None:
    assert size.over_limits() == []
