"""The phases of a run, each with its own configuration.

    phases: [{from: 0, recompute: {sets: 1}}, {from: 5000, recompute: {sets: 3}, data: {sequence_length: 2048}}]

    steps 1 to 5000     the run's configuration, with recompute.sets=1
    steps from 5001 on  the run's configuration, with recompute.sets=3 and data.sequence_length=2048

A key that a phase does not name has the run's value, not that of the phase before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pipetrain.config.problem import ConfigError
from pipetrain.config.records import RunConfig
from pipetrain.config.schema import check_key, keys, phase_keys, with_value

FROM = "from"
_LIKE = "as in {from: 5000, recompute: {sets: 3}}"
_MAY = (
    "a phase may change recompute.*, data.global_batch_size, data.sequence_length and pipeline.num_microbatches; "
    "all other keys hold for the whole run"
)


@dataclass(frozen=True)
class Phase:
    """The steps from `first_step` (from 1), until the next phase begins or the run ends."""

    number: int  # from 0
    first_step: int
    config: RunConfig  # the run's configuration with the changes of the phase; it has no phases


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run in order; one phase if the run has none. `together.py` checks their values.

    Raises:
        ConfigError: the phases do not begin at step 0, are not in order, or have a key that a phase may not change.
    """
    whole = replace(config, phases=())
    found = [_phase(number, given, whole) for number, given in enumerate(config.phases)] or [Phase(0, 1, whole)]
    if found[0].first_step != 1:
        raise ConfigError(
            f"phases[0].from={found[0].first_step - 1}: the first phase begins with the run; write from: 0"
        )
    for before, phase in pairwise(found):
        if phase.first_step <= before.first_step:
            raise ConfigError(
                f"phases[{phase.number}].from={phase.first_step - 1}: phases[{before.number}] begins after "
                f"{before.first_step - 1} steps; each phase begins after more steps than the one before it"
            )
    if config.epochs is None and found[-1].first_step > config.num_steps:
        late = next(phase for phase in found if phase.first_step > config.num_steps)
        raise ConfigError(
            f"phases[{late.number}].from={late.first_step - 1}: the run ends after steps={config.num_steps}, so this phase would "
            "not begin; let it begin earlier, or set more steps"
        )
    return tuple(found)


def steps_of_phases(phases: Sequence[Phase], last_step: int) -> Iterator[tuple[Phase, int]]:
    """Each phase with its number of steps, up to `last_step`."""
    ends = [*(phase.first_step for phase in phases[1:]), last_step + 1]
    for phase, end in zip(phases, ends):
        yield phase, max(0, min(end, last_step + 1) - phase.first_step)


@contextmanager
def naming_phase(phase: Phase, config: RunConfig) -> Iterator[None]:
    """An error names the phase, if the run has phases.

    Raises:
        ValueError: that of the block.
    """
    try:
        yield
    except ValueError as error:
        if not config.phases:
            raise
        raise ValueError(f"phases[{phase.number}]: {error}") from error


def batches_before(config: Mapping[str, Any], step: int) -> list[tuple[int, Any, Any]]:
    """The batches of the first `step` steps, from a configuration of plain values: (steps done before, samples, tokens of a sample) for each
    change. A resumed run must have had the same."""
    data, found = config.get("data", {}), list[tuple[int, Any, Any]]()
    for phase in config.get("phases") or [{FROM: 0}]:
        given = dict(leaves(phase))
        size, length = (given.get(f"data.{key}", data.get(key)) for key in ("global_batch_size", "sequence_length"))
        if phase[FROM] < step and (not found or found[-1][1:] != (size, length)):
            found.append((phase[FROM], size, length))
    return found


def value_in_step(config: Mapping[str, Any], key: str, step: int) -> Any:
    """The value in a step (from 1) of a key that phases may change, from a configuration of plain values."""
    given: Mapping[str, Any] = next((phase for phase in reversed(config.get("phases") or ()) if phase[FROM] < step), {})
    group, name = key.split(".")
    return dict(leaves(given)).get(key, config[group][name])


def _phase(number: int, given: Mapping[str, Any], config: RunConfig) -> Phase:
    key = f"phases[{number}]"
    if FROM not in given:
        raise ConfigError(f"{key}: it has no `from`; add the number of steps done before it, {_LIKE}")
    done = given[FROM]
    if type(done) is not int or done < 0:
        raise ConfigError(f"{key}.from={done}: allowed is a number of steps, 0 or more, {_LIKE}")
    for path, value in leaves({name: value for name, value in given.items() if name != FROM}):
        check_key(path, f"{key}.")
        if path not in phase_keys():
            if path in ("pipeline.balance", "pipeline.num_stages", "pipeline.placement", "pipeline.stages_per_rank"):
                raise ConfigError(f"{key}.{path}: layers stay on their stages during a run; {_MAY}")
            is_group = any(known.startswith(f"{path}.") for known in phase_keys())
            raise ConfigError(f"{key}.{path}: {f'this is a group with keys of its own, {_LIKE}' if is_group else _MAY}")
        config = with_value(config, path, value, f"{key}.{path}")
    return Phase(number, done + 1, config)


def leaves(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; for a group that is not a mapping, the group itself."""
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in keys()):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
