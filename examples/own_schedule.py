"""A schedule of your own: `pipetrain train pipeline.schedule=examples.own_schedule:two_flushes`; `pipetrain show` draws it with the same key.

R, messages, waits, checks and simulation follow from the order of F and B. A package gives it a name with an entry point of
`pipetrain.schedules`: `two-flushes = "examples.own_schedule:two_flushes"`.
"""

from pipetrain import Op
from pipetrain.schedule.families import ComputeLanes, Shape
from pipetrain.schedule.op import Kind


def two_flushes(shape: Shape) -> ComputeLanes:
    """GPipe of the first half of the microbatches, then of the second: half as many inputs are held, for one more bubble.

    rank 0  F0 F1 .  .  B0 B1 F2 F3 .  .  B2 B3
    rank 1     F0 F1 B0 B1 .     F2 F3 B2 B3
    """
    half = (shape.num_microbatches + 1) // 2
    lanes: ComputeLanes = []
    for rank in range(shape.num_ranks):
        stages = shape.stages_of(rank)
        lanes.append([])
        for microbatches in (range(half), range(half, shape.num_microbatches)):
            lanes[-1] += [Op(stage, Kind.F, i) for stage in stages for i in microbatches]
            lanes[-1] += [Op(stage, Kind.B, i) for stage in reversed(stages) for i in microbatches]
    return lanes
