"""What changes over a run: its phases, each with a configuration of its own.

    phases: [{from: 0, recompute: {sets: 1}}, {from: 5000, recompute: {sets: 3}, data: {sequence_length: 2048}}]

    steps 1 to 5000     the run's configuration, with recompute.sets=1
    steps from 5001 on  the run's configuration, with recompute.sets=3 and data.sequence_length=2048

What a phase does not name is as the run has it, and not as the phase before had it.
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
    "what else there is holds for the whole run"
)


@dataclass(frozen=True)
class Phase:
    """Steps from `first_step` (from 1) on, until the next phase begins or the run ends."""

    number: int  # from 0
    first_step: int
    config: RunConfig  # the run's, with what the phase changes; it has no phases itself


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a run in their order; one where it says of none. Whether their values make a run is for `together.py` to say.

    Raises:
        ConfigError: phases that do not follow one another from step 0 on, or a key that no phase has or may change.
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
    """What is wrong with a phase says which it is, where the run has any.

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
    """What the batches of the first `step` steps were, of a configuration as plain values: (steps done before, samples, tokens of a
    sample) for each change. A run that goes on must have the same behind it."""
    data, found = config.get("data", {}), list[tuple[int, Any, Any]]()
    for phase in config.get("phases") or [{FROM: 0}]:
        given = dict(leaves(phase))
        size, length = (given.get(f"data.{key}", data.get(key)) for key in ("global_batch_size", "sequence_length"))
        if phase[FROM] < step and (not found or found[-1][1:] != (size, length)):
            found.append((phase[FROM], size, length))
    return found


def value_in_step(config: Mapping[str, Any], key: str, step: int) -> Any:
    """What a key that phases may change is in a step, from 1, of a configuration as plain values."""
    given: Mapping[str, Any] = next((phase for phase in reversed(config.get("phases") or ()) if phase[FROM] < step), {})
    group, name = key.split(".")
    return dict(leaves(given)).get(key, config[group][name])


def _phase(number: int, given: Mapping[str, Any], config: RunConfig) -> Phase:
    key = f"phases[{number}]"
    if FROM not in given:
        raise ConfigError(f"{key}: it does not say when it begins; add from, the steps done before it, {_LIKE}")
    done = given[FROM]
    if type(done) is not int or done < 0:
        raise ConfigError(f"{key}.from={done}: allowed is a number of steps, 0 or more, {_LIKE}")
    for path, value in leaves({name: value for name, value in given.items() if name != FROM}):
        check_key(path, f"{key}.")
        if path not in phase_keys():
            if path in ("pipeline.balance", "pipeline.num_stages", "pipeline.placement", "pipeline.stages_per_rank"):
                raise ConfigError(f"{key}.{path}: layers stay where they are over a run; {_MAY}")
            is_group = any(known.startswith(f"{path}.") for known in phase_keys())
            raise ConfigError(f"{key}.{path}: {f'this is a group with keys of its own, {_LIKE}' if is_group else _MAY}")
        config = with_value(config, path, value, f"{key}.{path}")
    return Phase(number, done + 1, config)


def leaves(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; of a group that is no mapping, the group itself."""
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in keys()):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
