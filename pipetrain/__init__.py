"""Pipeline-parallel training for PyTorch in which recomputation is an operation of the schedule.

Importing the package does not import torch; the public names load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetrain.data.own import batches
    from pipetrain.models.spec import ModelSpec
    from pipetrain.plan.plan import Plan, make_plan
    from pipetrain.runtime.cut import Whole
    from pipetrain.runtime.pipeline import Pipeline
    from pipetrain.runtime.reference import reference_step
    from pipetrain.schedule.bound import bound
    from pipetrain.schedule.check import check
    from pipetrain.schedule.make import make_schedule
    from pipetrain.schedule.op import Op
    from pipetrain.schedule.policy import RecomputePolicy
    from pipetrain.schedule.schedule import Schedule
    from pipetrain.schedule.simulate import simulate
    from pipetrain.snapshot.own_loop import load, save
    from pipetrain.stage.microbatch import add_loss

__version__ = "0.1.0"

_HOME = {
    "Pipeline": "pipetrain.runtime.pipeline",
    "ModelSpec": "pipetrain.models.spec",
    "RecomputePolicy": "pipetrain.schedule.policy",
    "Schedule": "pipetrain.schedule.schedule",
    "Op": "pipetrain.schedule.op",
    "Plan": "pipetrain.plan.plan",
    "Whole": "pipetrain.runtime.cut",
    "make_schedule": "pipetrain.schedule.make",
    "make_plan": "pipetrain.plan.plan",
    "check": "pipetrain.schedule.check",
    "simulate": "pipetrain.schedule.simulate",
    "bound": "pipetrain.schedule.bound",
    "reference_step": "pipetrain.runtime.reference",
    "add_loss": "pipetrain.stage.microbatch",
    "load": "pipetrain.snapshot.own_loop",
    "save": "pipetrain.snapshot.own_loop",
    "batches": "pipetrain.data.own",
}

__all__ = [
    "ModelSpec",
    "Op",
    "Pipeline",
    "Plan",
    "RecomputePolicy",
    "Schedule",
    "Whole",
    "add_loss",
    "batches",
    "bound",
    "check",
    "load",
    "make_plan",
    "make_schedule",
    "reference_step",
    "save",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipetrain' has no attribute {name!r}; public are {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
