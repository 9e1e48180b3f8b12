"""The colours of F, B and R: one choice for every picture.

Blue, green and orange of Okabe and Ito's palette, which all kinds of colour vision tell apart; each also differs in
lightness and is named in its box, so that a picture survives grey print.
"""

from __future__ import annotations

from pipetrain.schedule.op import Kind

FILL = {Kind.F: "#4a90c4", Kind.B: "#1b7f67", Kind.R: "#f0a830"}
INK = {Kind.F: "#ffffff", Kind.B: "#ffffff", Kind.R: "#3d2600"}
WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.R: "recompute"}

# Text and lines, for a light and a dark page.
THEME = """
  .text { fill: #24292f } .faint { fill: #6e7781 } .idle { fill: #8c959f; fill-opacity: .18 } .line { stroke: #8c959f }
  @media (prefers-color-scheme: dark) {
    .text { fill: #e6edf3 } .faint { fill: #8d96a0 }
  }
"""
