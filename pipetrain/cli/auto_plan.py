"""plan=auto: a run takes the first plan of `pipetrain plan`; its folder keeps the profile and the keys, which a resumed run uses again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipetrain.cli.main import say
from pipetrain.cli.plan_command import plan_of_config
from pipetrain.cli.profile_command import ROUNDS, measure_profile
from pipetrain.config.load import load_config
from pipetrain.config.read_files import fitted, read_json
from pipetrain.config.records import RunConfig
from pipetrain.config.write_files import replace_file
from pipetrain.monitor.draw.table import size
from pipetrain.monitor.folder import RunFolder, check_free, reserve_folder
from pipetrain.plan.profile import Profile, read_profile
from pipetrain.snapshot.start import AUTO

# Keys that a planned run does not need, or has in another form.
_SELF = ("plan", "plan.auto", "plan.profile", "run_dir")


def with_plan(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """The overrides of the run that `config` asks to plan: those that were typed, its folder, and the keys of the plan.

    Raises:
        ValueError: nothing fits the budget; ranks on several machines, which could not agree on one plan.
    """
    if config.cluster.name == "slurm" or config.cluster.num_nodes > 1:
        raise ValueError(
            "plan=auto: plans a run on this machine; for several type the keys that `pipetrain plan` prints"
        )
    typed = [text for text in overrides if text.partition("=")[0] not in _SELF]
    before = _planned_before(config)
    if before is not None:
        return [
            *typed,
            *([] if config.run_dir is None else [f"run_dir={config.run_dir}"]),
            *fitted(tuple[str, ...], read_json(before, "remove it to plan again")),
        ]
    if config.resume != AUTO:
        check_free(config.run_dir)
    folder = reserve_folder(config.run_dir, config.experiment)
    if not folder.layers.is_file():
        replace_file(folder.layers, _profile(config).as_json())
    given = load_config([*typed, f"plan.profile={folder.layers}"])
    planned = plan_of_config(given, typed)
    if not planned.fitting:
        raise ValueError(planned.refusal())
    first = planned.fitting[0].candidate
    replace_file(folder.planned, json.dumps(first.overrides) + "\n")
    budget = config.plan.memory_budget_bytes
    within = "" if budget is None else f", {size(first.peak_bytes)} of {size(budget)}"
    say(f"plan=auto: step {first.step_seconds:.3g} s predicted{within}: {' '.join(first.overrides)}")
    return [*typed, f"run_dir={folder.path}", *first.overrides]


def _profile(config: RunConfig) -> Profile:
    """The layers of `plan.profile`, else measured now."""
    if config.plan.profile is not None:
        return read_profile(config.plan.profile)
    say("plan=auto: measuring the layers; plan.profile=FILE takes a file of `pipetrain profile` instead")
    return measure_profile(config, ROUNDS)


def _planned_before(config: RunConfig) -> Path | None:
    """The keys of the run that this one resumes, if that was planned."""
    folders = [Path(config.run_dir)] if config.resume == AUTO and config.run_dir is not None else []
    if config.resume not in (None, AUTO):
        folders = list(Path(str(config.resume)).resolve().parents)
    return next((path for path in (RunFolder(folder).planned for folder in folders) if path.is_file()), None)
