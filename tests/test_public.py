"""The public surface, frozen: names, signatures and defaults that users' scripts rely on."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import pipetrain

NAMES = {
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
}

# A star stands where arguments by name begin.
SIGNATURES = {
    "Pipeline": (
        "model loss_fn=None * num_microbatches=8 schedule='gpipe' recompute='overlap' balance='auto' num_stages=None "
        "stages_per_rank=1 num_replicas=1 plan=None mesh=None group=None device=None seed=0 count_fn=None loss_reduction='mean' "
        "timeout_seconds=600.0 on_event=None on_call=None"
    ),
    "Pipeline.step": "self inputs=None targets=None * scale=1.0",
    "Pipeline.change": "self * num_microbatches=None schedule=None recompute=None",
    "Pipeline.evaluate": "self inputs=None targets=None",
    "Pipeline.__call__": "self inputs=None",
    "Pipeline.parameters": "self",
    "Pipeline.named_parameters": "self",
    "Pipeline.zero_grad": "self set_to_none=True",
    "Pipeline.train": "self mode=True",
    "Pipeline.eval": "self",
    "Pipeline.clip_grad_norm_": "self max_norm",
    "Pipeline.state_dict": "self",
    "Pipeline.load_state_dict": "self state",
    "Pipeline.full_state_dict": "self",
    "Pipeline.gather_report": "self",
    "Pipeline.close": "self",
    "reference_step": "model loss_fn inputs targets * num_microbatches seed=0 step=0 count_fn=None loss_reduction='mean'",
    "make_schedule": (
        "family='gpipe' * num_stages num_microbatches num_ranks=None placement='loop' recompute='overlap' warmup=None "
        "costs=None first_backward=0 transport_ahead=2 split_backward=False tied=() num_replicas=1"
    ),
    "RecomputePolicy": (
        "mode=<Mode.OVERLAP: 'overlap'> sets=None keep=None stash=None last_stage=<LastStage.AUTO: 'auto'> selective=() keep_layers=() "
        "segments=1 parts=() shares=() offload=<Offload.NONE: 'none'> host_sets=None host_bytes=None verify='first'"
    ),
    "ModelSpec.build": "self first last * seed=0 device='cpu'",
    "Op": "stage kind microbatch=None part=None peer=None",
    "Whole": "value",
    "add_loss": "loss",
    "save": "folder pipeline optimizer * scheduler=None extra=None keep_last=None",
    "load": "folder pipeline optimizer * scheduler=None",
}


def signature_of(path: str) -> str:
    name, *rest = path.split(".")
    thing = getattr(pipetrain, name)
    for attribute in rest:
        thing = getattr(thing, attribute)
    words = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        words.append(parameter.name + default)
    return " ".join(words)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    assert signature_of(path) == SIGNATURES[path]


def test_names() -> None:
    assert set(pipetrain.__all__) == NAMES
    assert set(dir(pipetrain)) == NAMES | {"__version__"}
    for name in NAMES:
        assert getattr(pipetrain, name).__name__ == name


def test_an_unknown_name_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Pipelines'; public are ModelSpec, Op"):
        _ = pipetrain.Pipelines


def test_what_a_pipeline_has() -> None:
    with pipetrain.Pipeline([nn.Linear(2, 2)], num_microbatches=3) as pipeline:
        assert (pipeline.step_index, pipeline.is_first, pipeline.is_last) == (0, True, True)
        assert isinstance(pipeline.plan, pipetrain.Plan)
        assert isinstance(pipeline.schedule, pipetrain.Schedule)
        assert [name for name, _ in pipeline.named_parameters()] == ["0.weight", "0.bias"]
        assert isinstance(type(pipeline).report, property)
