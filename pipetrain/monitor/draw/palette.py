"""How each kind of op looks, in every picture: one table, keyed by the name in the kind's row.

Blue, green and orange of Okabe and Ito's palette for F, B and R; I is a light tone of B's green, W a dark purple. Any two
differ also in lightness or stay apart for eyes that lack a kind of cone (distances in CIELAB of at least 14), and each box
is named, so that a picture survives grey print.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipetrain.schedule.op import Kind


@dataclass(frozen=True)
class Looks:
    """`fill` of a box and `ink` of its name; in the terminal the character that fills a box, and its colours."""

    word: str
    fill: str
    ink: str
    character: str
    ansi: str  # foreground and background, of the 256 colours


LOOKS = {
    "forward": Looks("forward", "#4a90c4", "#ffffff", "-", "38;5;231;48;5;25"),
    "backward": Looks("backward", "#1b7f67", "#ffffff", "=", "38;5;16;48;5;36"),
    "input gradient": Looks("backward, input", "#7ccfb0", "#0b3b2f", "<", "38;5;16;48;5;115"),
    "weight gradient": Looks("backward, weights", "#7b3f7d", "#ffffff", "+", "38;5;231;48;5;90"),
    "reduce": Looks("gradients added up", "#6b7280", "#ffffff", "%", "38;5;231;48;5;242"),
    "call": Looks("call", "#c9d1d9", "#24292f", "c", "38;5;16;48;5;252"),
    "offload": Looks("set to the host", "#b03a48", "#ffffff", "v", "38;5;231;48;5;124"),
    "reload": Looks("set back from the host", "#e39ba5", "#4a0d16", "^", "38;5;16;48;5;217"),
    "recompute": Looks("recompute", "#f0a830", "#3d2600", "~", "38;5;16;48;5;214"),
}

# Text and lines, for a light and a dark page.
THEME = """
  .text { fill: #24292f } .faint { fill: #6e7781 } .idle { fill: #8c959f; fill-opacity: .18 } .line { stroke: #8c959f }
  @media (prefers-color-scheme: dark) {
    .text { fill: #e6edf3 } .faint { fill: #8d96a0 }
  }
"""


def looks_of(kind: Kind) -> Looks:
    """How an op of `kind`, one that computes or adds up gradients, is drawn."""
    looks = kind.row.looks
    assert looks is not None
    return LOOKS[looks]


def drawn_kinds(kinds: Iterable[Kind]) -> dict[Kind, Looks]:
    """Those of `kinds` that are drawn, each with its looks: what a legend explains, in the order of the table."""
    found = {kind: looks_of(kind) for kind in set(kinds) if kind.row.looks is not None}
    return dict(sorted(found.items(), key=lambda entry: list(LOOKS.values()).index(entry[1])))
