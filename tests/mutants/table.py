"""All mutants, in the order in which CI takes turns."""

from mutants import (
    extensions,
    gradients,
    messages,
    models_and_data,
    own_code,
    planning,
    runs,
    runtime,
    schedule_passes,
    schedule_values,
    stage_layers,
    stage_sets,
)

_TABLES = (
    schedule_values,
    schedule_passes,
    stage_sets,
    stage_layers,
    runtime,
    gradients,
    messages,
    models_and_data,
    runs,
    planning,
    extensions,
    own_code,
)
MUTANTS = tuple(mutant for table in _TABLES for mutant in table.MUTANTS)
