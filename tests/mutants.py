"""Breaks one line at a time and asks the tests to notice: `python tests/mutants.py [part of a name ...]`.

Each mutant is applied to a copy of the tree in a temporary folder, where only the tests that should turn red are run. It
fails if one survives, or if the line that it breaks is no longer there.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 120
NUM_AT_ONCE = min(4, os.cpu_count() or 1)
_CONTEXT = mp.get_context("forkserver")


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in `file`; `tests` are arguments of pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


STAGE, PARITY = "tests/runtime/test_stage.py", "tests/runtime/test_parity.py"
CASTS, HANGS = "tests/runtime/test_casts.py", "tests/runtime/test_device_hangs.py"
CLOCK = "tests/runtime/test_device_clock.py"
DEFERRED = "tests/runtime/test_deferred.py"
SELECTIVE = "tests/runtime/test_selective.py"
MARKS = "tests/config/test_marks.py"
MUSEUM, STATE = "tests/test_regressions.py", "tests/runtime/test_state.py"
COUNTING, WITHOUT = "tests/runtime/test_counting.py", "tests/schedule/test_without.py"
PINNED = "tests/transport/test_pinned.py"
HALVES = "tests/schedule/test_halves.py"
LAUNCHES = "tests/schedule/test_launches.py"
REDUCES, REPLICAS = "tests/schedule/test_reduces.py", "tests/schedule/test_replica_reduces.py"
LISTED, SEARCHED = "tests/planner/test_list_order.py", "tests/planner/test_search.py"
SAMPLES, CHATS, FOLDERS = (f"tests/data/test_{name}.py" for name in ("samples", "chats", "token_folders"))
HF_MASKS = "tests/hf/test_masks.py"
GENERATION = "tests/runtime/test_generation.py"
HF_GENERATION = "tests/hf/test_generate_hf.py"
MUTANTS = (
    Mutant(
        "each layer makes a float mask of its own",
        "pipetrain/model/hf/frame.py",
        "            if id(value) not in made:\n                made[id(value)]",
        "            if True:\n                made[id(value)]",
        (HF_MASKS, "-k", "one_mask"),
    ),
    Mutant(
        "a frame leaves its stage",
        "pipetrain/stage/stage.py",
        "        return without_local(value)\n",
        "        return value\n",
        ("tests/runtime/test_local.py",),
    ),
    Mutant(
        "positions may start again beside a mask",
        "pipetrain/model/hf/labels.py",
        "            _check_no_restart(mask, positions)",
        "            pass",
        (HF_MASKS, "-k", "beside"),
    ),
    Mutant(
        "labels of one document teach the last token of another",
        "pipetrain/model/hf/labels.py",
        "    if positions is not None:\n        targets",
        "    if False:\n        targets",
        ("tests/hf/test_model_in.py", "-k", "last_token"),
    ),
    Mutant(
        "a head with a cap is taken for a linear one",
        "pipetrain/model/hf/causal_loss.py",
        "for size in (1.0, 1e-2, 1e3):",
        "for size in (1e-4,):",
        ("tests/hf/test_causal_loss.py", "-k", "linear or pieces"),
    ),
    Mutant(
        "padding counts in the loss of experts",
        "pipetrain/model/hf/router.py",
        "weights = torch.ones(rows, device=logits.device) if mask is None else mask.reshape(-1).float()",
        "weights = torch.ones(rows, device=logits.device)",
        ("tests/hf/test_causal_loss.py", "-k", "experts"),
    ),
    Mutant(
        "a resume may change every key",
        "pipetrain/config/schema.py",
        "        if Resume.MAY_CHANGE in _marks(hint):",
        "        if Resume.MAY_CHANGE not in _marks(hint):",
        (MARKS, "-k", "guarded or goes_on"),
    ),
    Mutant(
        "a range beside an optional key is not seen",
        "pipetrain/config/schema.py",
        "    if typing.get_origin(hint) in (Union, types.UnionType):\n        return tuple(mark",
        "    if False:\n        return tuple(mark",
        (MARKS, "-k", "unions"),
    ),
    Mutant(
        "generators not seeded in R",
        "pipetrain/stage/stage.py",
        "        self._seed(number, given)\n        try:\n            with nullcontext() if",
        "        try:\n            with nullcontext() if",
        (STAGE, "-k", "linear and recomputed"),
    ),
    Mutant(
        "the seed does not know the microbatch",
        "pipetrain/runtime/executor.py",
        "layer_seed(self.seed, self.index, microbatch, layer)",
        "layer_seed(self.seed, self.index, 0, layer)",
        (PARITY, "-k", "ten_steps and overlap"),
    ),
    Mutant(
        "the weight of the uneven microbatch",
        "pipetrain/runtime/cut.py",
        "    return [count / total for count in counts]",
        "    return [1 / len(counts) for count in counts]",
        ("tests/runtime/test_cut.py",),
    ),
    Mutant(
        "rows counted from the wrong end",
        "pipetrain/runtime/cut.py",
        "number < rest",
        "number >= num_microbatches - rest",
        (PARITY, "-k", "ten_steps and overlap"),
    ),
    Mutant(
        "no version check at the end of F",
        "pipetrain/stage/slots.py",
        '        self._check_witnesses("later in the same forward")\n',
        "",
        (STAGE, "-k", "change_of_a_saved_tensor_in_forward"),
    ),
    Mutant(
        "no version check when B reads",
        "pipetrain/stage/slots.py",
        "if self.tensor._version != self.version:",
        "if False:",
        (STAGE, "-k", "before_backward"),
    ),
    Mutant(
        "parameters are not checked between F and R",
        "pipetrain/stage/stage.py",
        "        self._check_parameters(held)\n",
        "",
        (STAGE, "-k", "change_of_a_parameter"),
    ),
    Mutant(
        "a cast that R has made stays for F",
        "pipetrain/stage/casts.py",
        "            torch.clear_autocast_cache()\n",
        "",
        (CASTS, "-k", "no_forward_gets"),
    ),
    Mutant(
        "each set holds a cast of trained weights",
        "pipetrain/stage/casts.py",
        "                self._leave_out(known.cdata)\n",
        "                pass\n",
        (CASTS, "-k", "holds_no_weights"),
    ),
    Mutant(
        "a frozen weight is cast each time",
        "pipetrain/stage/casts.py",
        "        if found is not None and found.is_of(weight):",
        "        if False:",
        (CASTS, "-k", "once_per_step"),
    ),
    Mutant(
        "a frozen weight keeps its first cast",
        "pipetrain/stage/casts.py",
        "        if found is not None and found.is_of(weight):",
        "        if found is not None:",
        (CASTS, "-k", "within_a_step"),
    ),
    Mutant(
        "a frozen weight is cast where a layer has switched autocast off",
        "pipetrain/stage/casts.py",
        "        if func in _CASTING and self._casts.is_cast_here():",
        "        if func in _CASTING:",
        (CASTS, "-k", "plain_loop and hand"),
    ),
    Mutant(
        "what R reads of buffers goes when R is launched",
        "pipetrain/stage/stage.py",
        "        late.end_recompute(held.seen.storages())\n",
        "        late.end_recompute(held.seen.storages())\n        held.seen = NOTHING_SEEN\n",
        (STAGE, "-k", "until_its_backward"),
    ),
    Mutant(
        "the host sits in the driver for the loss",
        "pipetrain/transport/fetch.py",
        "    monitor.wait_polling(lambda: device.has_ended(end), lambda: doing)",
        "    device.finish(device.current())",
        (HANGS, "-k", "two_ranks"),
    ),
    Mutant(
        "a value is read before it has come",
        "pipetrain/transport/fetch.py",
        "    monitor.wait_polling(lambda: device.has_ended(end), lambda: doing)",
        "",
        ("tests/transport/test_fetch.py", "-k", "fetched"),
    ),
    Mutant(
        "who waits for a device does not look for others",
        "pipetrain/group/failure.py",
        "            if now >= look_at:\n",
        "            if False:\n",
        (HANGS, "-k", "is_killed_is_named"),
    ),
    Mutant(
        "nobody looks after a host that sits in a launch",
        "pipetrain/group/watchdog.py",
        "            self._monitor.look()\n",
        "",
        (HANGS, "-k", "sits_in_a_launch"),
    ),
    Mutant(
        "a host may sit in a launch for ever",
        "pipetrain/group/watchdog.py",
        "            elif time.monotonic() - since > self._monitor.timeout_seconds:",
        "            elif False:",
        (HANGS, "-k", "gives_up"),
    ),
    Mutant(
        "who waits in the monitor is given up by the watchdog",
        "pipetrain/group/watchdog.py",
        "doing is None or self._monitor.is_waiting:",
        "doing is None:",
        (HANGS, "-k", "leaves_alone"),
    ),
    Mutant(
        "clocks are compared when an event is launched",
        "pipetrain/transport/device_clock.py",
        "        while not self._has_ended(event):\n",
        "        while False:\n",
        (CLOCK,),
    ),
    Mutant(
        "clocks are compared once",
        "pipetrain/transport/device_clock.py",
        "        if old is not None and self._now() - old.seconds < _REFRESH_SECONDS:",
        "        if old is not None:",
        (CLOCK,),
    ),
    Mutant(
        "a clock's drift is no error",
        "pipetrain/transport/device_clock.py",
        "anchor.error_seconds + _DRIFT * farthest",
        "anchor.error_seconds",
        (CLOCK,),
    ),
    Mutant(
        "a batch is copied from memory that the driver does not know",
        "pipetrain/transport/fetch.py",
        "    device.copy(there, staged)",
        "    device.copy(there, tensor)",
        ("tests/transport/test_fetch.py", "-k", "overwritten"),
    ),
    Mutant(
        "a norm is fetched for each gradient",
        "pipetrain/parallel/clipping.py",
        "    values = iter(fetch(torch.stack(of_all)).tolist() if of_all else [])",
        "    values = iter([fetch(norm).item() for norm in of_all])",
        ("tests/virtual_gpu/test_host_waits.py",),
    ),
    Mutant(
        "whether losses are finite is asked one by one",
        "pipetrain/runtime/losses.py",
        "    finite = torch.stack([torch.isfinite(loss).to(total.device) for _, loss in ordered])",
        "    finite = torch.tensor([bool(torch.isfinite(loss)) for _, loss in ordered])",
        ("tests/virtual_gpu/test_host_waits.py",),
    ),
    Mutant(
        "R changes the buffers",
        "pipetrain/stage/stage.py",
        "            with self._state.as_seen(held.seen):",
        "            with nullcontext():",
        (STAGE, "-k", "buffers or batch"),
    ),
    Mutant(
        "strides are lost on entering a stage",
        "pipetrain/stage/stage.py",
        "tensor.storage_offset(), tensor.shape, tensor.stride())",
        "tensor.storage_offset(), tensor.shape)",
        (PARITY, "-k", "layout and 2"),
    ),
    Mutant(
        "messages are sent contiguous",
        "pipetrain/transport/forms.py",
        "    return tensor if _is_dense(tensor) else tensor.clone()",
        "    return tensor.contiguous()",
        (PARITY, "-k", "layout and 2"),
    ),
    Mutant(
        "another path of R is not noticed",
        "pipetrain/stage/slots.py",
        "        if found != expected:",
        "        if False:",
        (STAGE, "-k", "another_path"),
    ),
    Mutant(
        "a slot that fits the next layer",
        "pipetrain/stage/slots.py",
        "        if self._filled < expected:",
        "        if False:",
        (STAGE, "-k", "another_path and fewer"),
    ),
    Mutant(
        "R does not end early",
        "pipetrain/stage/slots.py",
        "        if self._stop is Stop.AT_LAYER and self._filled >= self._end:",
        "        if False:",
        (STAGE, "-k", "last_slot"),
    ),
    Mutant(
        "a slot is never released",
        "pipetrain/stage/slots.py",
        "        if self._key:\n            self._meter.release(self._key)",
        "        self._key = 0",
        ("tests/runtime/test_slots.py",),
    ),
    Mutant(
        "a storage counts twice",
        "pipetrain/stage/meter.py",
        "            if not holders:\n                size",
        "            if True:\n                size",
        ("tests/runtime/test_memory.py", "-k", "counts_once"),
    ),
    Mutant(
        "R of the last stage although it is not wanted",
        "pipetrain/schedule/recompute.py",
        "        kept |= kept_at_once(schedule)\n",
        "",
        ("tests/schedule/test_schedule_waits.py", "tests/schedule/test_schedule_families.py"),
    ),
    Mutant(
        "a wait left out: B does not wait for its R",
        "pipetrain/schedule/waits.py",
        "        yield read_by(schedule, op)[0], op  # [2]\n",
        "",
        ("tests/schedule/test_schedule_waits.py", "tests/schedule/test_schedule_check.py"),
    ),
    Mutant(
        "a wait left out: R does not wait for a free place",
        "pipetrain/schedule/waits.py",
        "            yield op, full  # [3]\n",
        "            pass\n",
        ("tests/schedule/test_schedule_waits.py",),
    ),
    Mutant(
        "check does not look at the order of a link",
        "pipetrain/schedule/check.py",
        "    each_link_in_one_order,\n",
        "",
        ("tests/schedule/test_schedule_check.py",),
    ),
    Mutant(
        "check does not bound the sets",
        "pipetrain/schedule/check.py",
        "    sets_within_bounds,\n",
        "",
        ("tests/schedule/test_schedule_check.py",),
    ),
    Mutant(
        "what is sent is let go of at once",
        "pipetrain/transport/transport.py",
        "            if end.reads_later:\n",
        "            if False:\n",
        ("tests/runtime/test_device.py",),
    ),
    Mutant(
        "lanes do not join at the end of a step",
        "pipetrain/transport/lanes.py",
        "                self.device.follow(stream, caller)  # what one lane has read another may be given, whoever calls next\n",
        "                pass\n",
        ("tests/runtime/test_device.py",),
    ),
    Mutant(
        "a ring does not ask the device",
        "pipetrain/transport/rings.py",
        " if self._lanes.comes_after(Lane.RECV, self._op, moment)]",
        " if moment >= 0]",
        ("tests/transport/test_rings.py",),
    ),
    Mutant(
        "a ring does not ask the host",
        "pipetrain/transport/rings.py",
        "_storage_Use_Count(memory._cdata) == 1]",
        "_storage_Use_Count(memory._cdata) >= 1]",
        ("tests/transport/test_rings.py",),
    ),
    Mutant(
        "a ring forgets nothing",
        "pipetrain/transport/rings.py",
        "            del self._free[free[0]]\n",
        "            pass\n",
        ("tests/transport/test_rings.py",),
    ),
    Mutant(
        "clocks do not know what an op came after",
        "pipetrain/transport/ahead.py",
        "        self._ends[op] = dict(clock)\n",
        "        self._ends[op] = {line: clock[line]}\n",
        ("tests/transport/test_ahead.py",),
    ),
    Mutant(
        "an op that is being launched has not read",
        "pipetrain/transport/ahead.py",
        ".get(Lane.COMPUTE, 0) + self._is_open)",
        ".get(Lane.COMPUTE, 0))",
        ("tests/transport/test_ahead.py",),
    ),
    Mutant(
        "NCCL gets memory that the allocator knows",
        "pipetrain/transport/nccl.py",
        "self._device.lent(flat_bytes(tensor).view(torch.uint8))",
        "flat_bytes(tensor).view(torch.uint8)",
        ("tests/transport/test_nccl.py",),
    ),
    Mutant(
        "communicators stay open",
        "pipetrain/transport/nccl.py",
        "    data.shutdown()  # type: ignore[attr-defined]\n",
        "",
        ("tests/transport/test_nccl.py",),
    ),
    Mutant(
        "edges are met one after the other",
        "pipetrain/transport/transport.py",
        "in (*edge_ranks[::2], *edge_ranks[1::2]):",
        "in edge_ranks:",
        ("tests/transport/test_nccl.py",),
    ),
    Mutant(
        "a pair's ranks are both the first",
        "pipetrain/transport/nccl.py",
        'name, place = f"pair/{source}/{target}", int(own > other)',
        'name, place = f"pair/{source}/{target}", 0',
        ("tests/transport/test_nccl.py",),
    ),
    Mutant(
        "two get one stream",
        "pipetrain/transport/device.py",
        "            if stream.cuda_stream not in self._taken:\n",
        "            if stream is not None:\n",
        ("tests/transport/test_streams_of_a_gpu.py",),
    ),
    Mutant(
        "each step makes its events",
        "pipetrain/transport/lanes.py",
        "            self._spare += (start, end)\n",
        "            pass\n",
        ("tests/transport/test_streams_of_a_gpu.py",),
    ),
    Mutant(
        "each save takes a stream",
        "pipetrain/snapshot/saver.py",
        "            if one not in self._streams:\n",
        "            if one is not None:\n",
        ("tests/snapshot/test_saver.py", "-k", "one_stream"),
    ),
    Mutant(
        "a lazy conjugate is carried out after F has ended",
        "pipetrain/runtime/executor.py",
        "            if not is_last:  # before the op ends: what it gives may have to be copied\n                self._give(",
        "        if not is_last:\n            self._give(",
        ("tests/virtual_gpu/test_matrix.py", "-m", "not slow", "-k", "conjugate"),
    ),
    Mutant(
        "two receives swapped",
        "pipetrain/transport/transport.py",
        "self._arrived.pop(op)",
        "self._arrived.pop(max(self._arrived, key=str))",
        (PARITY, "-k", "every_schedule and 2"),
    ),
    Mutant(
        "one wait of several is enough",
        "pipetrain/runtime/program.py",
        "            self._open[follower] -= 1\n",
        "            self._open[follower] = 0\n",
        ("tests/runtime/test_executor_waits.py", "-k", "every_kind and overlap"),
    ),
    Mutant(
        "what a step holds at its end is not looked at",
        "pipetrain/runtime/executor.py",
        "        self._assert_nothing_is_held()\n",
        "",
        ("tests/runtime/test_nothing_is_held.py", "-k", "is_an_error"),
    ),
    Mutant(
        "a stream does not wait for an event",
        "pipetrain/transport/lanes.py",
        "                self.device.wait(stream, event)  # [1]\n",
        "                pass\n",
        ("tests/runtime/test_device.py",),
    ),
    Mutant(
        "norms summed from the last stage on",
        "pipetrain/parallel/clipping.py",
        "for stage in sorted(of_stage) for",
        "for stage in sorted(of_stage, reverse=True) for",
        (PARITY, "-k", "ten_steps or every_schedule"),
    ),
    Mutant(
        "a failure is not posted",
        "pipetrain/runtime/executor.py",
        '        self._board.post(f"{place}: {type(error).__name__}: {first_line}")\n',
        "",
        ("tests/runtime/test_failures.py", "-k", "raises and 1F1"),
    ),
    Mutant(
        "who hosts the store leaves at once",
        "pipetrain/group/versions.py",
        "        _stay_until_all_have_read(store, num_ranks)\n",
        "",
        ("tests/hosts/test_start_up.py", "-k", "stays"),
    ),
    Mutant(
        "nobody says who is gone",
        "pipetrain/group/courier.py",
        "                self._monitor.lost(what, self.peer, error)\n",
        "",
        ("tests/runtime/test_failures.py", "-k", "killed_from_outside and 1"),
    ),
    Mutant(
        "a full slot is not read inside F",
        "pipetrain/stage/slots.py",
        "            if slot.tensor is None:\n                self.wanted",
        "            if True:\n                self.wanted",
        (MUSEUM, "-k", "through_an_earlier_layer and never"),
    ),
    Mutant(
        "layers whose slots are read in F stay late-bound",
        "pipetrain/stage/slots.py",
        "            self._whole.update(range(first, reader + 1))",
        "            self._whole.add(reader)",
        (MUSEUM, "-k", "through_an_earlier_layer and always"),
    ),
    Mutant(
        "what a layer that runs again has changed stays",
        "pipetrain/stage/stage.py",
        "        self._state.put_layer_back(number, before, at_layer)\n",
        "",
        (MUSEUM, "-k", "inside_a_layer_with_state"),
    ),
    Mutant(
        "a layer that runs again has other random numbers",
        "pipetrain/stage/stage.py",
        "        self._seed(number, given)\n        self._gradients.start()",
        "        self._gradients.start()",
        (MUSEUM, "-k", "inside_a_layer_with_state"),
    ),
    Mutant(
        "a layer may catch the wish for a gradient",
        "pipetrain/stage/stage.py",
        "            if late.wanted is None and not late.hooks_refused:\n                late.after_layer(",
        "            if True:\n                late.after_layer(",
        (MUSEUM, "-k", "catches_what"),
    ),
    Mutant(
        "a layer may catch what torch.func says",
        "pipetrain/stage/stage.py",
        "late.listening_to_functorch() if look else nullcontext()",
        "nullcontext()",
        (MUSEUM, "-k", "says_of_hooks"),
    ),
    Mutant(
        "a mismatch that a layer catches is forgotten",
        "pipetrain/stage/slots.py",
        "        if self._failure is not None:\n            raise self._failure",
        "        if False:\n            raise self._failure",
        (MUSEUM, "-k", "mismatch_that_a_layer"),
    ),
    Mutant(
        "R ends at its last slot although an operation fills it later",
        "pipetrain/stage/proof.py",
        "            self.stop = max(self.stop, Stop.AT_LAYER)",
        "            pass",
        (MUSEUM, "-k", "operation_that_fills and always"),
    ),
    Mutant(
        "R ends at its last slot without a proof",
        "pipetrain/stage/stage.py",
        "Stop.AT_LAYER if self._stop is None else self._stop",
        "self._stop or Stop.AT_SLOT",
        (MUSEUM, "-k", "operation_that_fills and unproved"),
    ),
    Mutant(
        "R ends before the layer that changes what is saved",
        "pipetrain/stage/proof.py",
        "            self.stop = Stop.AT_END",
        "            pass",
        (MUSEUM, "-k", "later_layer_changes"),
    ),
    Mutant(
        "other values of R are not noticed",
        "pipetrain/stage/proof.py",
        "            if _differ(*pair):\n                self._deferred",
        "            if False:\n                self._deferred",
        (MUSEUM, "-k", "other_values"),
    ),
    Mutant(
        "values that differ are not looked at again at the end",
        "pipetrain/stage/proof.py",
        "differing = [pair for pair in self._deferred if _differ(*pair)]",
        "differing = list(self._deferred)",
        (MUSEUM, "-k", "later_layer_changes"),
    ),
    Mutant(
        "a proved set shares its buffers with later forwards",
        "pipetrain/stage/stage.py",
        "self._state.live_storages() if held.late.is_filled else",
        "frozenset() if held.late.is_filled else",
        (STAGE, "-k", "proof_finds_nothing"),
    ),
    Mutant(
        "only buffers that have changed before are copied out of a kept set",
        "pipetrain/stage/layer_state.py",
        "small = {storage_key(buffer) for buffer in self._buffers() if is_small(buffer)}",
        "small = set[int]()",
        (MUSEUM, "-k", "begins_to_change_under_a_kept_set"),
    ),
    Mutant(
        "backward in a forward is not noticed",
        "pipetrain/stage/stage.py",
        "        self._gradients.check(self._name_of(number))\n",
        "",
        (MUSEUM, "-k", "backward_inside"),
    ),
    Mutant(
        "a stage whose output needs no gradient holds nothing",
        "pipetrain/stage/stage.py",
        "        if has_backward or any(wants):",
        "        if any(wants):",
        (MUSEUM, "-k", "output_needs_no_gradient and not rank"),
    ),
    Mutant(
        "a loss without a gradient is let pass",
        "pipetrain/stage/stage.py",
        "            raise ValueError(_LOSS_WITHOUT_GRADIENT)",
        "            pass",
        (MUSEUM, "-k", "loss_that_needs_no"),
    ),
    Mutant(
        "a kind of step is proved once for all",
        "pipetrain/runtime/proving.py",
        "        kind = (signature, *self._flags())",
        "        kind = signature",
        ("tests/runtime/test_proof.py", "-k", "which_microbatches"),
    ),
    Mutant(
        "a folder is nobody's claim",
        "pipetrain/observe/claim.py",
        "                fcntl.lockf(file, (fcntl.LOCK_SH if only_look else fcntl.LOCK_EX) | fcntl.LOCK_NB)",
        "                pass",
        ("tests/observe/test_claim.py", "-k", "second_run"),
    ),
    Mutant(
        "a lock on a file that is gone",
        "pipetrain/observe/claim.py",
        "if only_look or _is_still(path, file):",
        "if True:",
        ("tests/observe/test_claim.py", "-k", "gone_is_no_claim"),
    ),
    Mutant(
        "nobody waits for a killed run",
        "pipetrain/observe/claim.py",
        "    if not again:\n        return _GLANCE_SECONDS",
        "    if True:\n        return _GLANCE_SECONDS",
        ("tests/observe/test_claim.py", "-k", "goes_on_waits"),
    ),
    Mutant(
        "the name of a folder is chosen, and not taken",
        "pipetrain/observe/folder.py",
        "exist_ok=run_dir is not None)",
        "exist_ok=True)",
        ("tests/test_regressions.py", "-k", "one_second"),
    ),
    Mutant(
        "a run does not claim its folder",
        "pipetrain/loop/agree.py",
        "    with claimed(folder.path, again=again):",
        "    with contextlib.nullcontext():",
        ("tests/train/test_cli.py", "-k", "claimed"),
    ),
    Mutant(
        "nan is within a range",
        "pipetrain/config/limits.py",
        "(_is_finite(value) and self.holds(value))",
        "self.holds(value)",
        (MARKS,),
    ),
    Mutant(
        "costs may be nan",
        "pipetrain/schedule/costs.py",
        "            if not all(0 <= entry < math.inf for entry in values):",
        "            if any(entry < 0 for entry in values):",
        ("tests/test_regressions.py", "-k", "costs_are_finite"),
    ),
    Mutant(
        "a schedule of any size",
        "pipetrain/schedule/schedule_spec.py",
        "if stages * microbatches > MOST_PASSES:",
        "if False:",
        ("tests/test_regressions.py", "-k", "too_large"),
    ),
    Mutant(
        "ops that do not run are found by the ranks",
        "pipetrain/prepare.py",
        "    refuse_unknown_kinds(schedule)\n",
        "",
        ("tests/test_regressions.py", "-k", "does_not_run_yet"),
    ),
    Mutant(
        "a microbatch that counts nothing is run",
        "pipetrain/runtime/counting.py",
        "if weight == 0]",
        "if weight < 0]",
        ("tests/test_regressions.py", "-k", "counts_nothing"),
    ),
    Mutant(
        "evaluation runs what counts nothing",
        "pipetrain/runtime/runner.py",
        "self._programs.inference(call.num_microbatches, call.skipped)",
        "self._programs.inference(call.num_microbatches)",
        (COUNTING, "-k", "evaluation"),
    ),
    Mutant(
        "a count is taken as it comes",
        "pipetrain/runtime/counting.py",
        "    if value is not None and 0 <= value < math.inf:\n        return value",
        "    return found",
        ("tests/test_regressions.py", "-k", "count_that_is_no_number"),
    ),
    Mutant(
        "forms are taken to be known of microbatches that never came",
        "pipetrain/runtime/calls.py",
        "untold = set(range(num_microbatches)) - skipped - self.microbatches",
        "untold = set() if self.microbatches else set(range(num_microbatches)) - skipped",
        (COUNTING, "-k", "microbatch_by_microbatch"),
    ),
    Mutant(
        "forms of microbatches that did not come stay known when what needs a gradient changes",
        "pipetrain/runtime/calls.py",
        "            self.microbatches.clear()\n        untold",
        "            self.microbatches -= set(range(num_microbatches)) - skipped\n        untold",
        (COUNTING, "-k", "microbatch_by_microbatch"),
    ),
    Mutant(
        "ranks that differ in count_fn are not told",
        "pipetrain/runtime/agreement.py",
        "    if own.counts != first.counts:",
        "    if False:",
        (COUNTING, "-k", "counts_or_none"),
    ),
    Mutant(
        "programs without some microbatches are kept without end",
        "pipetrain/runtime/call_programs.py",
        "if len(self._with_skipped) > _MOST_WITH_SKIPPED:",
        "if False:",
        (COUNTING, "-k", "programs"),
    ),
    Mutant(
        "a given schedule may leave out microbatches",
        "pipetrain/runtime/call_programs.py",
        "    if schedule.skipped:",
        "    if False:",
        (COUNTING, "-k", "given_schedule"),
    ),
    Mutant(
        "a wait for an op that is gone is gone",
        "pipetrain/schedule/without.py",
        "        if len(stay) < len(awaited) or not all",
        "        if not all",
        (WITHOUT, "-k", "ended_before_it"),
    ),
    Mutant(
        "what an op that is gone waited for is forgotten",
        "pipetrain/schedule/without.py",
        "        if len(stay) < len(awaited) or not all(map(self._is_left, self._clocks.before(op))):",
        "        if len(stay) < len(awaited):",
        (WITHOUT, "-k", "those_of_the_next"),
    ),
    Mutant(
        "waits pile up over what is gone",
        "pipetrain/schedule/without.py",
        "            if not any(end.get(other, -1) >= last for end in ends):\n                yield",
        "            if True:\n                yield",
        (WITHOUT, "-k", "place_of_a_set"),
    ),
    Mutant(
        "check takes ops of microbatches that are left out",
        "pipetrain/schedule/check.py",
        "    if op.microbatch in schedule.skipped:",
        "    if False:",
        (WITHOUT, "-k", "cannot_be_left_out"),
    ),
    Mutant(
        "the bound counts what is left out",
        "pipetrain/schedule/bound.py",
        "    return _least_time(links, len(schedule.microbatches), [",
        "    return _least_time(links, schedule.num_microbatches, [",
        (WITHOUT, "-k", "sound and not more"),
    ),
    Mutant(
        "R runs with the buffers of now",
        "pipetrain/stage/layer_state.py",
        "        live = seen.buffers.stand_in()\n",
        "        live = [tensor.data for tensor in seen.buffers.tensors]\n",
        (MUSEUM, "-k", "changes_in_its_own_way"),
    ),
    Mutant(
        "R runs with the attributes of now",
        "pipetrain/stage/layer_state.py",
        "        undo = [attributes.stand_in() for attributes in seen.attributes]\n",
        "        undo = []\n",
        (MUSEUM, "-k", "plain_python"),
    ),
    Mutant(
        "only buffers are copied that the first forward changed",
        "pipetrain/stage/layer_state.py",
        "[buffer for buffer in buffers if is_small(buffer) or id(buffer) in known]",
        "[buffer for buffer in buffers if id(buffer) in known]",
        (MUSEUM, "-k", "second_step"),
    ),
    Mutant(
        "large buffers are not watched",
        "pipetrain/stage/layer_state.py",
        "            if version_of(buffer) != version:\n                self.relearn()",
        "            if False:\n                self.relearn()",
        (STATE, "-k", "only_what_changes"),
    ),
    Mutant(
        "a kept set looks into the live buffer",
        "pipetrain/stage/slots.py",
        "                slot.replace(view_into(copies[key], slot.tensor))\n",
        "                pass\n",
        (MUSEUM, "-k", "own_way and unseen"),
    ),
    Mutant(
        "copies do not share memory",
        "pipetrain/stage/layer_state.py",
        "storages: Storages | None = {} if self._sharing else None",
        "storages: Storages | None = None",
        (MUSEUM, "-k", "reads_the_buffer"),
    ),
    Mutant(
        "parameters are not compared around F",
        "pipetrain/stage/layer_state.py",
        "        self._refuse_changed_parameters(before)\n",
        "",
        (MUSEUM, "-k", "parameter_that_the_forward_changes"),
    ),
    Mutant(
        "an object in the inputs is not looked at",
        "pipetrain/stage/layer_state.py",
        "inputs = _attributes_of_inputs(leaves) if recomputed else None",
        "inputs = None",
        (MUSEUM, "-k", "forward_fills"),
    ),
    Mutant(
        "an input changed through .data is not seen",
        "pipetrain/stage/entered.py",
        "        return self.before is not None and not _is_equal(self.tensor.detach(), self.before)",
        "        return False",
        (MUSEUM, "-k", "changed_through_data"),
    ),
    Mutant(
        "Python and numpy are not seeded",
        "pipetrain/stage/seeding.py",
        "    if python:\n",
        "    if False:\n",
        (STATE, "-k", "start_from_the_seed"),
    ),
    Mutant(
        "a large tensor of before is not missed",
        "pipetrain/stage/attributes.py",
        '        raise StateChanged(\n            f"{place} is read',
        '        return torch.zeros(20_000, 4)[:2]\n        raise StateChanged(\n            f"{place} is read',
        (MUSEUM, "-k", "large_tensor_attribute"),
    ),
    Mutant(
        "the probe asks lazy parameters",
        "pipetrain/stage/probe.py",
        "    with torch._C.DisableTorchFunctionSubclass():",
        "    with contextlib.nullcontext():",
        (MUSEUM, "-k", "lazy_layer"),
    ),
    Mutant(
        "foreign leaves are let through",
        "pipetrain/stage/leaves.py",
        "            if id(leaf_of(node)) not in allowed and self",
        "            if False and self",
        ("tests/runtime/test_leaves.py", "-k", "attribute"),
    ),
    Mutant(
        "what a forward makes and drops is refused",
        "pipetrain/stage/leaves.py",
        "        return _references(node) > _references_of_nobody()",
        "        return True",
        ("tests/runtime/test_leaves.py", "-k", "plain_loop"),
    ),
    Mutant(
        "a leaf that is returned counts its references",
        "pipetrain/stage/leaves.py",
        "        if any(tensor is leaf for tensor in returned):",
        "        if False:",
        ("tests/runtime/test_leaves.py", "-k", "returned"),
    ),
    Mutant(
        "gathered parameters are foreign",
        "pipetrain/stage/leaves.py",
        "        if is_sharded(self._user(number)):",
        "        if False:",
        ("tests/runtime/test_leaves.py", "-k", "sharded"),
    ),
    Mutant(
        "every forward is walked",
        "pipetrain/stage/leaves.py",
        "        self._seen.add(kind)\n",
        "",
        ("tests/runtime/test_leaves.py", "-k", "first_forward"),
    ),
    Mutant(
        "a failed forward counts as walked",
        "pipetrain/stage/leaves.py",
        "        if kind in self._seen:\n            yield on_layer\n            return\n",
        "        if kind in self._seen:\n            yield on_layer\n            return\n        self._seen.add(kind)\n",
        ("tests/runtime/test_leaves.py", "-k", "first_forward"),
    ),
    Mutant(
        "a step runs where no gradients are made",
        "pipetrain/runtime/arguments.py",
        "    if torch.is_grad_enabled():\n",
        "    if True:\n",
        ("tests/test_regressions.py", "-k", "no_gradients"),
    ),
    Mutant(
        "inputs may require a gradient",
        "pipetrain/runtime/given_batch.py",
        "    if with_graph and tensor.requires_grad:",
        "    if False:",
        ("tests/test_regressions.py", "-k", "inputs_that_require"),
    ),
    Mutant(
        "targets are not looked at",
        "pipetrain/runtime/runner.py",
        '            check_batch(targets, "targets", call.rows, with_graph=step.with_graph)\n',
        "",
        ("tests/test_regressions.py", "-k", "inputs_that_require"),
    ),
    Mutant(
        "arrays go to every microbatch",
        "pipetrain/runtime/given_batch.py",
        '    if hasattr(leaf, "__array__") and',
        "    if False and",
        ("tests/test_regressions.py", "-k", "no_tensors"),
    ),
    Mutant(
        "lists of rows go to every microbatch",
        "pipetrain/runtime/given_batch.py",
        "        _refuse_lists(batch, name, rows)",
        "        pass",
        ("tests/test_regressions.py", "-k", "no_tensors"),
    ),
    Mutant(
        "a loss may have parameters",
        "pipetrain/runtime/pipeline.py",
        "                check_loss_is_plain(loss_fn, spec.modules.values())\n",
        "",
        ("tests/test_regressions.py", "-k", "parameters_of_its_own"),
    ),
    Mutant(
        "a method hides its module",
        "pipetrain/runtime/arguments.py",
        "        yield from _modules_of(owner)",
        "        yield from ()",
        ("tests/test_regressions.py", "-k", "parameters_of_its_own"),
    ),
    Mutant(
        "stages may share a buffer that changes",
        "pipetrain/runtime/runner.py",
        "            with shared.unchanged(is_training=is_training):\n                self._execute(call, step)",
        "            self._execute(call, step)",
        ("tests/test_regressions.py", "-k", "statistics or counter"),
    ),
    Mutant(
        "shared buffers are compared by version alone",
        "pipetrain/model/sharing.py",
        "        by_value = is_training not in self._looked",
        "        by_value = False",
        ("tests/model/test_sharing.py",),
    ),
    Mutant(
        "stages may lie in one memory",
        "pipetrain/model/spec.py",
        "        if other != stage and pair.has_parameter and not is_tied:",
        "        if False:",
        ("tests/test_regressions.py", "-k", "one_memory"),
    ),
    Mutant(
        "tensors side by side overlap",
        "pipetrain/model/sharing.py",
        "start < furthest[2]:",
        "start <= furthest[2]:",
        ("tests/test_regressions.py", "-k", "one_memory"),
    ),
    Mutant(
        "what was built is not compared",
        "pipetrain/runtime/pipeline.py",
        "                check_built(spec, self._layers(), self.plan.stage_of)\n",
        "",
        ("tests/test_regressions.py", "-k", "callables"),
    ),
    Mutant(
        "what was added up already is added up again",
        "pipetrain/parallel/tied.py",
        "                self._before[parameter], parameter.grad = parameter.grad, None",
        "                self._before[parameter] = None",
        ("tests/runtime/test_tied.py", "-k", "several_steps"),
    ),
    Mutant(
        "both copies count in the norm",
        "pipetrain/runtime/pipeline.py",
        "            uncounted=self._copies.second,",
        "            uncounted=(),",
        ("tests/runtime/test_tied.py", "-k", "several_steps"),
    ),
    Mutant(
        "copies start as they were built",
        "pipetrain/runtime/pipeline.py",
        "            self._copies.make_equal(self._group.chain)\n",
        "",
        ("tests/runtime/test_tied.py", "-k", "callables"),
    ),
    Mutant(
        "a copy has a name of its own",
        "pipetrain/runtime/copies.py",
        "        return self._first_names.get(name, name)",
        "        return name",
        ("tests/runtime/test_tied.py", "-k", "resume"),
    ),
    Mutant(
        "gradients are added up before they are whole",
        "pipetrain/schedule/reduce.py",
        "{op: (last,) for op, (_, last) in ready.items()}",
        "{op: () for op, (_, last) in ready.items()}",
        (REDUCES, "-k", "wait_for"),
    ),
    Mutant(
        "a bucket forgets the backwards of whole sets",
        "pipetrain/schedule/reduce.py",
        "        ends = [last.get((reduce.stage, part)), whole.get((reduce.stage, None))]",
        "        ends = [last.get((reduce.stage, part))]",
        (REPLICAS, "-k", "in_one_order or wait_for"),
    ),
    Mutant(
        "the first part is added up first",
        "pipetrain/schedule/reduce.py",
        "-(op.part or 0)))",
        "op.part or 0))",
        (REPLICAS, "-k", "wait_for"),
    ),
    Mutant(
        "stages are added up in their order",
        "pipetrain/schedule/reduce.py",
        "key=lambda op: (ready[op][0] if op in ready else -1,",
        "key=lambda op: (op.stage,",
        (REPLICAS, "-k", "wait_for"),
    ),
    Mutant(
        "frozen stages are added up over the replicas",
        "pipetrain/schedule/reduce.py",
        "        for stage in range(schedule.first_backward, schedule.num_stages):",
        "        for stage in range(schedule.num_stages):",
        (REPLICAS, "-k", "wait_for"),
    ),
    Mutant(
        "nobody looks whether replicas add up",
        "pipetrain/schedule/check.py",
        "    each_gradient_of_replicas,\n    each_reduce_in_its_turn,\n",
        "    each_reduce_in_its_turn,\n",
        (REPLICAS, "-k", "broken"),
    ),
    Mutant(
        "nobody looks in which order replicas add up",
        "pipetrain/schedule/check.py",
        "    each_gradient_of_replicas,\n    each_reduce_in_its_turn,\n",
        "    each_gradient_of_replicas,\n",
        (REPLICAS, "-k", "broken"),
    ),
    Mutant(
        "a part takes as long to add up as its stage",
        "pipetrain/schedule/simulate.py",
        "if op.part is not None and op.peer is None else 1.0",
        "if op.part is not None and not op.kind.row.per_stage else 1.0",
        (REPLICAS, "-k", "parts_hide or by_layers"),
    ),
    Mutant(
        "what two stages share costs what a stage does",
        "pipetrain/schedule/costs.py",
        "(to_stage and self.reduce_shared) or seconds",
        "seconds",
        (REPLICAS, "-k", "apart"),
    ),
    Mutant(
        "the bound knows of no reduce of earlier parts",
        "pipetrain/schedule/bound.py",
        "sum(shares[place:]) * seconds + shared",
        "shares[-1] * seconds + shared",
        (REPLICAS, "-k", "by_layers"),
    ),
    Mutant(
        "the bound has all the work before each part",
        "pipetrain/schedule/bound.py",
        "(sum(shares[: place + 1]), sum",
        "(1.0, sum",
        (REPLICAS, "-k", "parts_hide or in_one_order"),
    ),
    Mutant(
        "a replica that skips all leaves the others waiting",
        "pipetrain/schedule/without.py",
        "skipped <= present if schedule.num_replicas > 1 else",
        "False if schedule.num_replicas > 1 else",
        (REPLICAS, "-k", "leave_out_all"),
    ),
    Mutant(
        "a given schedule knows no replicas",
        "pipetrain/schedule/reduce.py",
        "    return add_reduces(bare)",
        "    return bare",
        (REPLICAS, "-k", "without_a_word"),
    ),
    Mutant(
        "clipping takes any norm",
        "pipetrain/parallel/clipping.py",
        "    mistake = _mistake_in(max_norm)",
        "    mistake = None",
        ("tests/test_regressions.py", "-k", "norm_that_is_none"),
    ),
    Mutant(
        "a mistake in clipping stays on its rank",
        "pipetrain/parallel/clipping.py",
        '    if mistakes := [part["mistake"] for part in parts if part["mistake"]]:',
        "    if mistakes := [mistake] if mistake else []:",
        ("tests/runtime/test_clipping.py", "-k", "one_rank"),
    ),
    Mutant(
        "a sparse gradient's entries are not added",
        "pipetrain/parallel/clipping.py",
        "        gradient = (gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient).values()",
        "        gradient = gradient._values()",
        ("tests/runtime/test_clipping.py", "-k", "meet"),
    ),
    Mutant(
        "a rank's share is the norm",
        "pipetrain/parallel/clipping.py",
        '(whole := getattr(norm, "full_tensor", None))',
        '(whole := getattr(norm, "to_local", None))',
        ("tests/runtime/test_clipping.py", "-k", "share"),
    ),
    Mutant(
        "masters are saved without what they hold beyond the weights",
        "pipetrain/engine/masters.py",
        "master.copy_(values.get(weight, weight))",
        "master.copy_(weight)",
        ("tests/train/test_masters.py",),
    ),
    Mutant(
        "masters begin when the optimizer is made, not at the first step",
        "pipetrain/engine/masters.py",
        "        if not self._have_begun:\n            self._begin({})\n",
        "",
        ("tests/train/test_masters.py",),
    ),
    Mutant(
        "masters that are not wanted any more stay in the state",
        "pipetrain/engine/optimizer.py",
        "    optimizer.register_load_state_dict_pre_hook(_without_masters)\n",
        "",
        ("tests/train/test_masters.py", "-k", "dropped"),
    ),
    Mutant(
        "a stage may have more work than need be",
        "pipetrain/plan/balance.py",
        "if needed[end] < left)",
        "if needed[end] <= left)",
        ("tests/planner/test_balance.py",),
    ),
    Mutant(
        "refused steps count as seen",
        "pipetrain/loop/steps.py",
        "            if result.is_accepted:\n                self.seen.add(tokens)\n",
        "            self.seen.add(tokens)\n",
        ("tests/train/test_guard.py",),
    ),
    Mutant(
        "microbatches may be half",
        "pipetrain/plan/plan.py",
        "    if isinstance(value, bool) or not isinstance(value, Integral):\n",
        "    if False:\n",
        ("tests/test_regressions.py", "-k", "no_numbers"),
    ),
    Mutant(
        "half layers are cut off",
        "pipetrain/plan/plan.py",
        "    if counts is None or any(",
        "    if counts is None or False and any(",
        ("tests/test_regressions.py", "-k", "no_numbers"),
    ),
    Mutant(
        "no wait is too short",
        "pipetrain/runtime/arguments.py",
        "    if not is_number(seconds) or not 0 < seconds",
        "    if not is_number(seconds) or not -9 < seconds",
        ("tests/test_regressions.py", "-k", "no_numbers"),
    ),
    Mutant(
        "a mistake of another rank than the first is forgotten",
        "pipetrain/runtime/runner.py",
        "            if mistake is not None:",
        "            if False:",
        ("tests/runtime/test_bad_input.py", "-k", "not_the_first and scale"),
    ),
    Mutant(
        "names that no layer has are ignored",
        "pipetrain/runtime/whole_state.py",
        "    if unknown:\n",
        "    if False:\n",
        ("tests/test_regressions.py", "-k", "state_of_another"),
    ),
    Mutant(
        "lazy bits are dropped at a cut",
        "pipetrain/transport/crossing.py",
        "    return [done.get(id(leaf), leaf) for leaf in leaves] if done else list(leaves)",
        "    return list(leaves)",
        ("tests/test_regressions.py", "-k", "lazy_bits and 1"),
    ),
    Mutant(
        "a lazy gradient is sent as it lies",
        "pipetrain/transport/forms.py",
        "    tensor = tensor.resolve_conj().resolve_neg()  # bytes alone are sent\n",
        "",
        ("tests/test_regressions.py", "-k", "lazy_bits and 2"),
    ),
    Mutant(
        "a tensor that stands twice is sent twice",
        "pipetrain/transport/forms.py",
        "        elif spec and places.setdefault(id(leaf), number) != number:",
        "        elif False:",
        ("tests/test_regressions.py", "-k", "one_tensor_twice and 2"),
    ),
    Mutant(
        "a tensor that stands twice enters twice",
        "pipetrain/stage/stage.py",
        "            if id(leaf) not in entered:\n",
        "            if True:\n",
        ("tests/test_regressions.py", "-k", "one_tensor_twice and 1"),
    ),
    Mutant(
        "a tensor that stands twice is detached twice",
        "pipetrain/stage/stage.py",
        "        return StageOutput(tuple(detached.get(id(leaf), leaf) for leaf in leaves), spec, wants)",
        "        return StageOutput(tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec, wants)",
        ("tests/test_regressions.py", "-k", "one_tensor_twice and 1"),
    ),
    Mutant(
        "common entries of two leaves are not seen",
        "pipetrain/transport/crossing.py",
        "        if other := int(entries.max()):",
        "        if other := 0:",
        ("tests/test_regressions.py", "-k", "common_entries"),
    ),
    Mutant(
        "parts beside each other are taken for common entries",
        "pipetrain/transport/crossing.py",
        "        if stride <= reach:\n",
        "        if True:\n",
        ("tests/test_regressions.py", "-k", "one_tensor_twice and 1"),
    ),
    Mutant(
        "a message of another form is not told",
        "pipetrain/transport/transport.py",
        "        if expected is not None and form == expected:",
        "        if expected is not None and form.is_laid_out_as(expected):",
        ("tests/test_regressions.py", "-k", "inside_a_layer and 2"),
    ),
    Mutant(
        "a note is not looked at",
        "pipetrain/transport/gloo.py",
        "        if self._note.item() != number:",
        "        if True:",
        ("tests/test_regressions.py", "-k", "structures_at and 2"),
    ),
    Mutant(
        "one more is taken for true",
        "pipetrain/transport/forms.py",
        "    bool: repr,\n",
        "    bool: lambda value: repr(int(value)),\n",
        ("tests/test_regressions.py", "-k", "structures_at and 2"),
    ),
    Mutant(
        "a named tuple is written as a tuple",
        "pipetrain/transport/structures.py",
        '        return "namedtuple", _name_of(context)',
        '        return "tuple", None',
        ("tests/test_regressions.py", "-k", "structures_at and 2"),
    ),
    Mutant(
        "a sparse tensor crosses a cut",
        "pipetrain/transport/crossing.py",
        "    if leaf.layout is not torch.strided:\n",
        "    if False:\n",
        ("tests/test_regressions.py", "-k", "cannot_cross and sparse"),
    ),
    Mutant(
        "an enum crosses a cut",
        "pipetrain/transport/crossing.py",
        '        return "" if is_plain(leaf) else _fault_of_value(leaf)',
        '        return ""',
        ("tests/test_regressions.py", "-k", "cannot_cross and enum"),
    ),
    Mutant(
        "Whole stays where it is",
        "pipetrain/runtime/cut.py",
        "            return Whole(on_device(leaf.value, bring))",
        "            return leaf",
        ("tests/test_regressions.py", "-k", "whole_goes"),
    ),
    Mutant(
        "Whole may be changed",
        "pipetrain/runtime/executor.py",
        "_why_fixed(step.whole_inputs)",
        "{}",
        ("tests/test_regressions.py", "-k", "whole_changed"),
    ),
    Mutant(
        "Whole that is passed on may be changed",
        "pipetrain/transport/crossing.py",
        "        may_not_change = {n: fixed[storage] for n, storage in storages.items() if storage in fixed}",
        "        may_not_change = {}",
        ("tests/test_regressions.py", "-k", "whole_changed and second"),
    ),
    Mutant(
        "a change through data is not seen",
        "pipetrain/stage/entered.py",
        "        return self.before is not None and not _is_equal(self.tensor.detach(), self.before)",
        "        return False",
        ("tests/test_regressions.py", "-k", "whole_changed and data"),
    ),
    Mutant(
        "R gets a target that F has changed",
        "pipetrain/stage/entered.py",
        "        if isinstance(leaf, Tensor) and (recomputed or number in fixed):",
        "        if isinstance(leaf, Tensor) and number in fixed:",
        ("tests/test_regressions.py", "-k", "targets_changed"),
    ),
    Mutant(
        "equal is what is close",
        "pipetrain/proof/beside_loop.py",
        "    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)",
        "    return torch.allclose(one, other, equal_nan=True)",
        ("tests/zoo/test_layer_zoo.py", "-k", "last_bit"),
    ),
    Mutant(
        "a raw error passes for one that names a layer",
        "pipetrain/proof/beside_loop.py",
        "    raw = isinstance(error, _RAW) or not isinstance(error, Exception)",
        "    raw = False",
        ("tests/zoo/test_layer_zoo.py", "-k", "name_a_layer"),
    ),
    Mutant(
        "the zoo takes any refusal",
        "pipetrain/proof/layer_zoo.py",
        "        return worst.result is self.entry.expected and self.entry.says in worst.detail",
        "        return worst.result is self.entry.expected",
        ("tests/zoo/test_layer_zoo.py", "-k", "as_expected"),
    ),
    Mutant(
        "the zoo looks at the first way alone",
        "pipetrain/proof/layer_zoo.py",
        "        return worst_of([found for _, found in self.found])",
        "        return self.found[0][1]",
        ("tests/zoo/test_layer_zoo.py", "-k", "as_expected"),
    ),
    Mutant(
        "the trials of an entry go on after one that hung",
        "pipetrain/proof/apart.py",
        "        if left and processes.hung:",
        "        if False:",
        ("tests/zoo/test_layer_zoo.py", "-k", "hangs_or_dies"),
    ),
    Mutant(
        "R does not wait while kept sets take the places",
        "pipetrain/schedule/waits.py",
        "self._kept[number] + recomputed >= self._size",
        "recomputed >= self._size",
        ("tests/schedule/test_schedule_waits.py", "-k", "kept"),
    ),
    Mutant(
        "R waits for places of its own beside those of kept sets",
        "pipetrain/schedule/waits.py",
        "len(self._recomputed_ends) - bisect.bisect_left(self._recomputed_ends, moment)",
        "0",
        ("tests/schedule/test_schedule_waits.py", "-k", "overlap or two_sets"),
    ),
    Mutant(
        "all stages have the places of the first",
        "pipetrain/schedule/policy.py",
        "return sets[stage] if isinstance",
        "return sets[0] if isinstance",
        ("tests/schedule/test_policy.py", "tests/schedule/test_schedule_waits.py"),
    ),
    Mutant(
        "kept sets fill all places although an R needs one",
        "pipetrain/schedule/keep.py",
        "                for place in range(read, end + 1):\n                    self._needed[place] += 1\n",
        "",
        ("tests/schedule/test_schedule_waits.py", "tests/schedule/test_schedule_families.py"),
    ),
    Mutant(
        "the bound forgets that sets lie in places",
        "pipetrain/schedule/bound.py",
        "least = max(least, self.head(stage) + lives / places + outside)",
        "least = 0.0",
        ("tests/schedule/test_schedule_time.py", "-k", "place_time or lives"),
    ),
    Mutant(
        "the bound gives each set a place of its own",
        "pipetrain/schedule/bound.py",
        "lives / places + outside",
        "lives + outside",
        ("tests/schedule/test_schedule_time.py", "-k", "bounded_by_the_work"),
    ),
    Mutant(
        "check does not bound the stash",
        "pipetrain/schedule/check.py",
        "    stash_within_bounds,\n)",
        ")",
        ("tests/schedule/test_schedule_check.py",),
    ),
    Mutant(
        "early: R goes where no place is free",
        "pipetrain/schedule/gaps.py",
        " or (size is not None and alive[earlier] >= size)",
        "",
        ("tests/schedule/test_schedule_waits.py", "-k", "early"),
    ),
    Mutant(
        "a slot is sent before the device has filled it",
        "pipetrain/transport/pinned.py",
        "            _wait(lambda: self._device.has_ended(copied), self._monitor)",
        "            pass",
        (PINNED, "-k", "late_copies"),
    ),
    Mutant(
        "a slot is filled again before it has been sent",
        "pipetrain/transport/pinned.py",
        "        copied = self._device.record(self._device.current())  # [3]",
        "        copied = self._device.record(self._device.current())\n        self._free.append(slot)",
        (PINNED, "-k", "late_copies"),
    ),
    Mutant(
        "a slot is received into before the device has read it",
        "pipetrain/transport/pinned.py",
        "        return not self._is_taken and (self._read is None or self._device.has_ended(self._read))",
        "        return not self._is_taken",
        (PINNED, "-k", "late_copies"),
    ),
    Mutant(
        "a slot is received into while its message waits for the device",
        "pipetrain/transport/pinned.py",
        "        return not self._is_taken and (self._read is None or self._device.has_ended(self._read))",
        "        return self._read is None or self._device.has_ended(self._read)",
        (PINNED, "-k", "late_copies or waits_for_its_turn"),
    ),
    Mutant(
        "nobody waits for the copy to the device",
        "pipetrain/transport/pinned.py",
        "                    slot.give_back(self._lanes.mark(Lane.RECV, op))  # [3]",
        "                    slot.give_back(self._lanes.device.record(self._lanes.device.current()))",
        (PINNED, "-k", "late_copies"),
    ),
    Mutant(
        "ranks do not share a GPU where they may",
        "pipetrain/group/own_device.py",
        "        needed = 1 if shares_gpus else",
        "        needed = 2 if shares_gpus else",
        (PINNED, "-k", "share_gpus"),
    ),
    Mutant(
        "two ranks on one GPU are not seen",
        "pipetrain/runtime/agreement.py",
        "        if own.gpu:",
        "        if False:",
        (PINNED, "-k", "two_ranks_on_one_gpu"),
    ),
    Mutant(
        "a plan's receives ahead are not obeyed",
        "pipetrain/runtime/call_programs.py",
        "            transport_ahead=plan.transport_ahead,\n",
        "",
        (PINNED, "-k", "ahead_reaches"),
    ),
    Mutant(
        "a run's receives ahead are not obeyed",
        "pipetrain/prepare.py",
        "        transport_ahead=config.transport.ahead,\n    )",
        "    )",
        (PINNED, "-k", "ahead_reaches"),
    ),
    Mutant(
        "ranks that run ahead launch in the order in which things come",
        "pipetrain/runtime/call_programs.py",
        "        if self._runs_ahead and not schedule.launch_order:",
        "        if False:",
        ("tests/transport/test_spinning.py",),
    ),
    Mutant(
        "a weight that others read waits, too",
        "pipetrain/stage/deferred.py",
        "        return self._other_reader.get(parameter) == _NOBODY",
        "        return True",
        (DEFERRED, "-k", "tied"),
    ),
    Mutant(
        "a weight with hooks waits",
        "pipetrain/stage/split_function.py",
        "    if weight._backward_hooks or weight._post_accumulate_grad_hooks:",
        "    if False:",
        (DEFERRED, "-k", "a_hook or hook-"),
    ),
    Mutant(
        "what a microbatch gives a weight is not summed first",
        "pipetrain/stage/split_function.py",
        "        if not self._left[key] and key in sums:",
        "        if key in sums:",
        (DEFERRED, "-k", "used and twice"),
    ),
    Mutant(
        "what waits may change",
        "pipetrain/stage/split_function.py",
        "            if tensor._version != version:",
        "            if False:",
        (DEFERRED, "-k", "may_not_change"),
    ),
    Mutant(
        "what waits is not counted",
        "pipetrain/stage/split_function.py",
        "        keys = tuple(self._meter.hold(tensor) for tensor in tensors)",
        "        keys = tuple(0 for tensor in tensors)",
        (DEFERRED, "-k", "only_what_w_needs"),
    ),
    Mutant(
        "linear layers under a checkpoint are split",
        "pipetrain/stage/split_linear.py",
        "    if hooks_in_force() is not user.hooks:",
        "    if False:",
        (DEFERRED, "-k", "nested and checkpoint"),
    ),
    Mutant(
        "a layer that takes gradients goes on with halves",
        "pipetrain/stage/split_function.py",
        "            self._start_again()",
        "            pass",
        (DEFERRED, "-k", "inside and forward"),
    ),
    Mutant(
        "one operation where torch has two",
        "pipetrain/stage/split_linear.py",
        "(x.dim() == 2 or x.is_contiguous())",
        "(x.dim() > 0)",
        (DEFERRED, "-k", "product"),
    ),
    Mutant(
        "a weight's cast is made anew for each set",
        "pipetrain/stage/split_linear.py",
        "user.deferral.weights.cast(weight, make=user.is_forward).detach()",
        "weight.detach()",
        (DEFERRED, "-k", "casts_are_no_part"),
    ),
    Mutant(
        "halves: a W stays behind an op that needs its place",
        "pipetrain/schedule/halves.py",
        "for rest in needed.intersection(waiting):",
        "for rest in ():",
        ("tests/schedule/test_schedule_families.py", "-k", "zero_bubble"),
    ),
    Mutant(
        "halves: without recomputation W are put off to the end",
        "pipetrain/schedule/halves.py",
        "most if never else closed.policy.places_of(stage)",
        "None if never else closed.policy.places_of(stage)",
        (HALVES, "-k", "holds_more"),
    ),
    Mutant(
        "halves: the order with W behind their I is not among those to choose from",
        "pipetrain/schedule/halves.py",
        "        return closed, _where_ranks_wait",
        "        return _where_ranks_wait(closed, costs, 10**6), _where_ranks_wait",
        (HALVES, "-k", "never_slower or holds_more"),
    ),
    Mutant(
        "halves: a family's own place for W is forgotten",
        "pipetrain/schedule/halves.py",
        "    return _as_given(closed, given), ",
        "    return closed, ",
        ("tests/schedule/test_schedule_families.py", "-k", "zero_bubble or staircase"),
    ),
    Mutant(
        "zbv: a forward more before the turns",
        "pipetrain/schedule/families.py",
        "(2 * (ranks - rank) - 1, [forth])",
        "(2 * (ranks - rank), [forth])",
        ("tests/schedule/test_schedule_families.py", "-k", "zero_bubble or staircase"),
    ),
    Mutant(
        "zb-h1: W right behind its I",
        "pipetrain/schedule/families.py",
        "order += [(Kind.W, i - stage)] if i >= stage else []",
        "order += [(Kind.W, i)]",
        ("tests/schedule/test_split_backward.py", "-k", "staircase"),
    ),
    Mutant(
        "a pair of torch's file is read backward first",
        "pipetrain/schedule/csv_file.py",
        "    return first, second\n",
        "    return second, first\n",
        ("tests/schedule/test_schedule_csv.py", "-k", "pairs"),
    ),
    Mutant(
        "what is kept of a product is the memory that an operation writes on",
        "pipetrain/stage/selective.py",
        "            output.copy()\n",
        "            pass\n",
        (SELECTIVE, "-k", "operation_writes"),
    ),
    Mutant(
        "what torch says to draw random numbers is skipped",
        "pipetrain/stage/selective.py",
        "            and not operation.draws_with(args, kwargs)\n",
        "",
        (SELECTIVE, "-k", "random"),
    ),
    Mutant(
        "an operation of a library that draws unsaid is skipped",
        "pipetrain/stage/selective.py",
        "        if has_drawn or nested",
        "        if nested",
        (SELECTIVE, "-k", "random"),
    ),
    Mutant(
        "what a compiled layer writes on stays kept",
        "pipetrain/stage/slots.py",
        "for one, old in zip(given, versions) if one._version != old",
        "for one, old in zip(given, versions) if one._version < old",
        (SELECTIVE, "-k", "compiled"),
    ),
    Mutant(
        "kept outputs stay when B has begun",
        "pipetrain/stage/stage.py",
        "        held.late.start_backward()\n",
        "",
        (SELECTIVE, "-k", "kept_outputs"),
    ),
    Mutant(
        "R takes another product for the one that F kept",
        "pipetrain/stage/selective.py",
        "if call.func is not func or call.shapes != _shapes(args, kwargs):",
        "if call.func is not func:",
        (SELECTIVE, "-k", "another_order"),
    ),
    Mutant(
        "an output is kept that R never comes to",
        "pipetrain/stage/selective.py",
        "changed or call.num_slots >= num_slots",
        "changed",
        (SELECTIVE, "-k", "never_comes"),
    ),
    Mutant(
        "an entry that keeps nothing is not told",
        "pipetrain/stage/selective.py",
        "        return [line for line in found if line is not None]",
        "        return []",
        (SELECTIVE, "-k", "keeps_nothing"),
    ),
    Mutant(
        "an entry that keeps something is told",
        "pipetrain/stage/selective.py",
        "if name not in one.names or layer not in one.layers]",
        "if one.names]",
        (SELECTIVE, "-k", "keeps_something"),
    ),
    Mutant(
        "what other stages have is missed",
        "pipetrain/stage/selective.py",
        "        if not self.is_all_here and (self.wanted.op is None",
        "        if False and (self.wanted.op is None",
        (SELECTIVE, "-k", "other_stages_may"),
    ),
    Mutant(
        "a border between layers is in no part",
        "pipetrain/plan/profile.py",
        "layer.inner_bytes + layer.output_bytes * is_saved for",
        "layer.inner_bytes for",
        ("tests/planner/test_layer_profile.py", "-k", "equal_bytes"),
    ),
    Mutant(
        "parts that are known are cut anew",
        "pipetrain/schedule/policy.py",
        "        if not self.in_parts or [sum(parts) for parts in self.parts] == list(balance):",
        "        if not self.in_parts:",
        ("tests/schedule/test_parts.py", "-k", "known_stay"),
    ),
    Mutant(
        "a part takes the time of its number of layers",
        "pipetrain/schedule/policy.py",
        "        if self.shares:\n",
        "        if False:\n",
        ("tests/schedule/test_parts.py", "-k", "share_of_the_work"),
    ),
    Mutant(
        "a run's profile cuts stages",
        "pipetrain/prepare.py",
        "    _refuse_profile_without_layers(config)\n",
        "",
        ("tests/planner/test_layer_profile.py", "-k", "has_parts"),
    ),
    Mutant(
        "inputs are counted as whole sets",
        "pipetrain/timeline/shown.py",
        "input_bytes=self.costs.input_share or (0.0,) * stages,",
        "input_bytes=(1.0,) * stages,",
        ("tests/schedule/test_schedule_breakdown.py", "-k", "share"),
    ),
    Mutant(
        "R is launched when it would run, not right behind what it waits for",
        "pipetrain/schedule/launches.py",
        "            turns.append((-1.0, 0))\n",
        "            turns.append((started[op], 1))\n",
        (LAUNCHES, "-k", "one_order"),
    ),
    Mutant(
        "R may be given memory that B still reads, if R waits for a message",
        "pipetrain/schedule/launches.py",
        "    for find in (_waits_for_memory, _waits_for_sends",
        "    for find in (_waits_for_sends",
        (LAUNCHES, "-k", "waits_for_a_message"),
    ),
    Mutant(
        "results that are not sent pile up",
        "pipetrain/schedule/launches.py",
        "_waits_for_memory, _waits_for_sends, _waits",
        "_waits_for_memory, _waits",
        (LAUNCHES, "-k", "any_number_of_microbatches"),
    ),
    Mutant(
        "each hop delays the next F",
        "pipetrain/schedule/launches.py",
        "MOST_UNSENT = 3",
        "MOST_UNSENT = 1",
        (LAUNCHES, "-k", "takes_as_long"),
    ),
    Mutant(
        "a receive waits for an op on which its message does not depend",
        "pipetrain/schedule/launches.py",
        "            ended[op][rank] += 1\n",
        "            ended[op][rank] += 2\n",
        (LAUNCHES, "-k", "transfers_and_their or soundly and not length"),
    ),
    Mutant(
        "a receive does not know what its message depends on over other ranks",
        "pipetrain/schedule/launches.py",
        "            ended[op] = ended[partner_of(op)] = _later(sent, ended[op])\n",
        "",
        (LAUNCHES, "-k", "transfers_and_their"),
    ),
    Mutant(
        "check does not look at the order of launching",
        "pipetrain/schedule/check.py",
        "    launched_in_one_order,\n",
        "",
        ("tests/schedule/test_schedule_check.py",),
    ),
    Mutant(
        "check does not ask whose memory an R gets",
        "pipetrain/schedule/check.py",
        "    each_recompute_gets_free_memory,\n",
        "",
        ("tests/schedule/test_schedule_check.py",),
    ),
    Mutant(
        "check does not ask for transfers one at a time",
        "pipetrain/schedule/check.py",
        "(*RULES, one_transfer_at_a_time) if serial else RULES",
        "RULES",
        (LAUNCHES, "-k", "one_transfer"),
    ),
    Mutant(
        "a device's ops start when they may, not in the launch order",
        "pipetrain/runtime/program.py",
        "    if schedule.launch_order:\n",
        "    if False:\n",
        ("tests/runtime/test_executor_waits.py", "-k", "families_are_launched"),
    ),
    Mutant(
        "nobody asks whether the host runs ahead",
        "pipetrain/runtime/call_programs.py",
        "        if self._runs_ahead and not",
        "        if False and not",
        (COUNTING, "-k", "runs_ahead"),
    ),
    Mutant(
        "what parts give a weight that they share is added at once",
        "pipetrain/runtime/segmented.py",
        "        self._shared = _shared_parameters(self._parts)\n",
        "        self._shared: list[nn.Parameter] = []\n",
        ("tests/runtime/test_segments.py", "-k", "crosses"),
    ),
    Mutant(
        "a part of a set frees the places of all",
        "pipetrain/schedule/alive.py",
        "if op.part is None else 1",
        "if True else 1",
        ("tests/schedule/test_parts.py", "-k", "kept or come_back"),
    ),
    Mutant(
        "a kept set leaves an earlier one without a place",
        "pipetrain/schedule/list_order.py",
        "return self._without_set == number or (len(self._later) + 1) * self._parts < self._places",
        "return True",
        (LISTED, "-k", "any_problem"),
    ),
    Mutant(
        "W does not make room for an F",
        "pipetrain/schedule/list_order.py",
        "return 3 if waits_w and not self._can_keep(self.forwards) else 0",
        "return 0",
        (LISTED, "-k", "near_the_best"),
    ),
    Mutant(
        "R does not wait for the op in front of it",
        "pipetrain/schedule/hold_back.py",
        "waits[op] = tuple(dict.fromkeys((*waits.get(op, ()), before)))",
        "waits[op] = waits.get(op, ())",
        (LISTED, "-k", "in_front"),
    ),
    Mutant(
        "an order that was found is not run",
        "pipetrain/schedule/make.py",
        "    if spec.order is not None:\n        return held_to",
        "    if False:\n        return held_to",
        (SEARCHED, "-k", "reached"),
    ),
    Mutant(
        "a search proves nothing",
        "pipetrain/plan/search.py",
        "max(found.least_seconds, polished.least_seconds)",
        "found.least_seconds",
        (SEARCHED, "-k", "kept"),
    ),
    Mutant(
        "what was sought is never sought longer",
        "pipetrain/plan/search.py",
        "known.searched_seconds >= effort.seconds",
        "known.searched_seconds >= 0",
        (SEARCHED, "-k", "kept"),
    ),
    Mutant(
        "an order of another hand is not checked",
        "pipetrain/plan/search.py",
        "        check(schedule)\n        return [schedule]",
        "        return [schedule]",
        (SEARCHED, "-k", "cache"),
    ),
    Mutant(
        "costs are rounded up before something is proven",
        "pipetrain/plan/polish.py",
        "math.floor(time / unit + 1e-6)",
        "math.ceil(time / unit - 1e-6)",
        (SEARCHED, "-k", "beats"),
    ),
    Mutant(
        "places are not counted in a model",
        "pipetrain/plan/polish.py",
        "            model.AddNoOverlap(lives)",
        "            pass",
        (SEARCHED, "-k", "beats"),
    ),
    Mutant(
        "a profile of other stages will do",
        "pipetrain/plan/profile.py",
        "        if there != wanted:",
        "        if False:",
        ("tests/planner/test_profile.py",),
    ),
    Mutant(
        "a run goes on in an order for other sets",
        "pipetrain/train.py",
        'return pipeline, replace(config.recompute, verify="off"), ',
        "return pipeline, ",
        ("tests/train/test_order.py", "-k", "goes_on"),
    ),
    Mutant(
        "packed documents share their positions",
        "pipetrain/data/samples.py",
        "np.arange(last - first)",
        "np.arange(at, end)",
        (SAMPLES, "-k", "packed"),
    ),
    Mutant(
        "the filling goes on with the last document",
        "pipetrain/data/samples.py",
        "np.arange(self.sequence_length - at)",
        "np.arange(at, self.sequence_length)",
        (SAMPLES, "-k", "packed"),
    ),
    Mutant(
        "questions count, too",
        "pipetrain/data/samples.py",
        "last] == 0] = IGNORED",
        "last] == 2] = IGNORED",
        (SAMPLES, "-k", "count"),
    ),
    Mutant(
        "a copy of what is held out is trained on",
        "pipetrain/data/cached_tokens.py",
        "if file.digest not in held",
        "if file.path not in held",
        (FOLDERS, "-k", "held_out"),
    ),
    Mutant(
        "turns that are written in another way are taken",
        "pipetrain/data/chat_template.py",
        "if not (whole.startswith(prompt) and whole",
        "if False and not (whole.startswith(prompt) and whole",
        (CHATS, "-k", "dropped"),
    ),
    Mutant(
        "templates are told today's date",
        "pipetrain/data/chat_template.py",
        "with _pinned(self._date):",
        "with _pinned(datetime.date.today()):",
        (CHATS, "-k", "what_counts"),
    ),
    Mutant(
        "a text begins twice",
        "pipetrain/data/hf_tokenizer.py",
        "if document.begins and begin and row[: len(begin)] != begin:",
        "if document.begins and begin:",
        (CHATS, "-k", "begins_once"),
    ),
    Mutant(
        "another tokenizer finds the tokens of the first",
        "pipetrain/data/cached_tokens.py",
        "corpus.digest, tokenizer.digest, held",
        "corpus.digest, held",
        (FOLDERS, "-k", "cached"),
    ),
    Mutant(
        "padding counts as a position",
        "pipetrain/stage/past.py",
        "return (columns - self._pads()).clamp_(min=0)",
        "return columns.expand(self.num_rows, -1)",
        (GENERATION,),
    ),
    Mutant(
        "padding is looked at",
        "pipetrain/model/attention.py",
        "return (causal & padded[:, None, None]) | (keys == own)",
        "return causal[None, None]",
        (GENERATION,),
    ),
    Mutant(
        "a full room forgets what was in it",
        "pipetrain/stage/past.py",
        "wider[:, :, :start] = self._memory[:, :, :start]",
        "pass",
        (GENERATION,),
    ),
    Mutant(
        "a turn begins before its token is known",
        "pipetrain/runtime/generation.py",
        "while any(turn.group is group for turn in unknown):",
        "while False:",
        (f"{GENERATION}::test_ranks_make_the_same_text",),
    ),
    Mutant(
        "a later stage asks layer 0 how many tokens came before",
        "pipetrain/model/hf/stage_cache.py",
        "        return self._length\n",
        "        return int(super().get_seq_length(layer_idx))\n",
        (f"{HF_GENERATION}::test_a_later_stage_has_no_layer_0",),
    ),
    Mutant(
        "a later stage's sliding window does not slide",
        "pipetrain/model/hf/stage_cache.py",
        "kept = min(self._length, layer.sliding_window - 1)",
        "kept = self._length",
        (f"{HF_GENERATION}::test_a_later_stage_has_no_layer_0",),
    ),
    Mutant(
        "top_p leaves out the token that reaches it",
        "pipetrain/runtime/sampling.py",
        "before = ordered.softmax(-1).cumsum(-1).roll(1, -1)",
        "before = ordered.softmax(-1).cumsum(-1)",
        (GENERATION,),
    ),
    Mutant(
        "what layers kept of inference mode stays so",
        "pipetrain/runtime/pipeline.py",
        "                set_trainable(self._layers().values())\n",
        "                pass\n",
        (f"{GENERATION}::test_what_layers_keep_while_generating_can_be_trained_with",),
    ),
    Mutant(
        "who chooses gets tensors of inference mode",
        "pipetrain/runtime/generation.py",
        "self._choose(logits.clone())",
        "self._choose(logits)",
        (f"{GENERATION}::test_what_layers_keep_while_generating_can_be_trained_with",),
    ),
    Mutant(
        "the first stage prepares what it makes anyway",
        "pipetrain/runtime/executor.py",
        "        if 0 not in self._stages:\n            for stage",
        "        if True:\n            for stage",
        (f"{GENERATION}::test_a_stage_that_waits_prepares_what_it_can",),
    ),
    Mutant(
        "a short message overtakes a long one",
        "pipetrain/group/courier.py",
        "if self._num_given != self._num_ended:",
        "if False:",
        ("tests/runtime/test_group.py", "-k", "keep_their_order or begins_at_once"),
    ),
    Mutant(
        "a transfer that fails at once is told by nobody",
        "pipetrain/group/courier.py",
        "return functools.partial(_raise, error)",
        "return lambda: None",
        ("tests/runtime/test_group.py", "-k", "begins_at_once"),
    ),
)


def main(wanted: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not wanted or any(word in mutant.name for word in wanted)]
    survivors = []
    # Of the server that all tests are forked from.
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PATIENCE_SECONDS="40")
    _CONTEXT.set_forkserver_preload(["torch", "pytest"])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(NUM_AT_ONCE):
            copy = Path(folder) / f"tree-{number}"
            shutil.copytree(
                ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
            )
            copies.put(copy)
        for mutant, (seconds, verdict) in zip(chosen, threads.map(partial(in_a_copy, copies), chosen)):
            if not verdict.startswith("red"):
                survivors.append(mutant.name)
            print(f"{mutant.name:<52} {seconds:5.1f} s  {verdict}", flush=True)
    print(
        f"{len(chosen) - len(survivors)} of {len(chosen)} turn a test red" + "".join(f"\n  not: {n}" for n in survivors)
    )
    return 1 if survivors or not chosen else 0


def in_a_copy(copies: SimpleQueue[Path], mutant: Mutant) -> tuple[float, str]:
    """Seconds that it took, and the verdict."""
    copy = copies.get()
    try:
        start = time.monotonic()
        verdict = try_one(copy, mutant)
        return time.monotonic() - start, verdict
    finally:
        copies.put(copy)


def try_one(tree: Path, mutant: Mutant) -> str:
    """What happened to one mutant: `red` with the test that noticed, or why it counts as a failure."""
    path = tree / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"DOES NOT APPLY: the text stands {original.count(mutant.old)} times in {mutant.file}"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        return verdict_of(tree, mutant)
    finally:
        path.write_text(original)


def verdict_of(tree: Path, mutant: Mutant) -> str:
    said = tree / "said.txt"
    process = _CONTEXT.Process(target=run_tests, args=(tree, mutant.tests, said))
    process.start()
    process.join(TIMEOUT_SECONDS)
    if process.exitcode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.kill()  # where it had not come so far as to have a group
        process.join()
        return f"red (nothing after {TIMEOUT_SECONDS} s)"
    lines = said.read_text(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), None)
    if process.exitcode == 1 and failed:
        return "red: " + failed.removeprefix("FAILED ").split(" - ")[0]
    return "SURVIVED" if process.exitcode == 0 else f"NO TEST RAN (pytest {process.exitcode}): {' '.join(lines)[-300:]}"


def run_tests(tree: Path, tests: tuple[str, ...], said: Path) -> None:
    """In a process of its own, forked where torch is loaded already, which takes longer than most of these tests: pytest in `tree`."""
    os.setsid()
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    # As `python -m pytest` in the tree has it: without this file's folder, which is the one of the tree that nobody has broken.
    sys.path[:] = [str(tree), *(path for path in sys.path if not Path(path).is_relative_to(ROOT / "tests"))]
    pytest = importlib.import_module("pytest")
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
