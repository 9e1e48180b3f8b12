"""All mutants, in the order in which CI takes turns."""

from mutants import (
    estimates,
    extensions,
    gradients,
    messages,
    models_and_data,
    own_code,
    planning,
    runs,
    runtime,
    schedule_copies,
    schedule_passes,
    schedule_values,
    security,
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
    estimates,
    extensions,
    own_code,
    schedule_copies,
    security,
)
MUTANTS = tuple(mutant for table in _TABLES for mutant in table.MUTANTS)
