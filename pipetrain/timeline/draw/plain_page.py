"""A picture as a page that opens anywhere: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem }
svg { max-width: 100%; height: auto }
pre { overflow-x: auto }
"""


def page(title: str, captions: Sequence[str], picture: str, text: str = "") -> str:
    """HTML with `captions` above an SVG `picture` and preformatted `text` below."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(caption)}</p>" for caption in captions),
            picture,
            f"<pre>{escape(text)}</pre>" if text else "",
            "</body></html>\n",
        ]
    )
