"""A function of your own between two ops: the gradient norm of each stage, while other stages still run their last B.

    pipetrain train pipeline.schedule=examples.own_op:with_norms pipeline.on_call=examples.own_op:write_norm

Entry points are of `pipetrain.schedules` and `pipetrain.op_handlers`. A `Pipeline` takes both: `schedule=with_norms, on_call=write_norm`.
"""

from collections.abc import Sequence

from torch import nn

from pipetrain import Op
from pipetrain.schedule.families import ComputeLanes, Shape, gpipe
from pipetrain.schedule.op import Kind


def with_norms(shape: Shape) -> ComputeLanes:
    """GPipe, with a CALL behind the last B of each stage."""
    lanes = gpipe(shape)
    for lane in lanes:
        for last in [op for op in lane if op.kind is Kind.B and op.microbatch == shape.num_microbatches - 1]:
            lane.insert(lane.index(last) + 1, Op(last.stage, Kind.CALL, last.microbatch))
    return lanes


def write_norm(op: Op, layers: Sequence[nn.Module]) -> None:
    """A line per step in a file per stage. It runs on the rank that holds the stage, on the stream of F and B, without a graph."""
    gradients = [weight.grad for weight in nn.ModuleList(layers).parameters() if weight.grad is not None]
    with open(f"norms-of-stage-{op.stage}.txt", "a") as file:
        print(float(nn.utils.get_total_norm(gradients)), file=file)
