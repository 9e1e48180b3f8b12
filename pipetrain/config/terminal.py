"""What reaches a terminal: untrusted text, such as a file's, must not move the cursor or change what was said before."""

from __future__ import annotations

import sys

# C0, DEL, C1; half characters, which no stream takes; marks that turn the direction of text; line separators.
_CODES = (*range(32), *range(127, 160), *range(0xD800, 0xE000))
_TURNING = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_IN_A_LINE = {code: ascii(chr(code))[1:-1] for code in (*_CODES, *_TURNING)}
_OVER_LINES = {code: escape for code, escape in _IN_A_LINE.items() if chr(code) not in "\n\t"}


def printable(text: str, *, lines: bool = True) -> str:
    """The text with its control codes written as `\\x1b`; `lines`: line breaks and tabs stay."""
    return text.translate(_OVER_LINES if lines else _IN_A_LINE)


def say(text: str) -> None:
    """A line for the user, on stderr."""
    print(f"pipetrain: {printable(text)}", file=sys.stderr, flush=True)
