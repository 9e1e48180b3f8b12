"""What stands in a page of a schedule or a run: the values that its script draws."""

from __future__ import annotations

import json
import re
from typing import Any

SCRIPT = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def drawn_in(page: str) -> Any:
    """The values, as a browser finds them: up to the first end of the element."""
    (text,) = SCRIPT.findall(page)
    return json.loads(text)


def panels_in(page: str) -> list[Any]:
    """What is drawn when the page opens: the fixed panels, and those of the newest step."""
    values = drawn_in(page)
    return [*values["fixed"], *(values["steps"][-1]["panels"] if values["steps"] else [])]
