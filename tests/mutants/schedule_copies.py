"""Sets that go to host memory and back."""

from mutants.mutant import Mutant

_TESTS = "tests/schedule/test_offload.py"
_HOST = "tests/runtime/test_host_copies.py"
_VIRTUAL = "tests/virtual_gpu/test_matrix.py"

MUTANTS = (
    Mutant(
        "B does not wait for the copy back",
        "pipetrain/schedule/waits.py",
        "            if op.kind is not OFFLOAD:\n                yield read_by(schedule, op)[0], op\n",
        "",
        (_TESTS, "-k", "lanes_of_their_own"),
    ),
    Mutant(
        "F takes the place of a set that is still on its way to the host",
        "pipetrain/schedule/waits.py",
        "(True,) if in_compute else",
        "() if in_compute else",
        (_TESTS, "-k", "frees_its_place"),
    ),
    Mutant(
        "a copy to the host does not wait for room there",
        "pipetrain/schedule/waits.py",
        "copies[stage, part, OFFLOAD][room:]",
        "copies[stage, part, OFFLOAD][10**6 :]",
        (_TESTS, "-k", "have_a_bound"),
    ),
    Mutant(
        "check counts a set as gone when its copy has begun",
        "pipetrain/schedule/alive.py",
        "        ends[op] = [number if one is lane",
        "        ends[op] = [number + 1 if one is lane",
        (_TESTS, "-k", "is_needed or refused"),
    ),
    Mutant(
        "check does not miss the copy back",
        "pipetrain/schedule/check.py",
        "            if up not in reloads:",
        "            if False:",
        (_TESTS, "-k", "another_end"),
    ),
    Mutant(
        "B of a part waits for the copy of another part",
        "pipetrain/schedule/waits.py",
        "op.part if op.kind is RELOAD else None)\n",
        "0 if op.kind is RELOAD and op.part is not None else None)\n",
        (_TESTS, "-k", "part_by_part"),
    ),
    Mutant(
        "a part that stays behind when others go to the host is not missed",
        "pipetrain/schedule/check.py",
        "            if down not in present:",
        "            if False:",
        (_TESTS, "-k", "part_by_part"),
    ),
    Mutant(
        "F of a set in parts takes one slot beside copies",
        "pipetrain/schedule/waits.py",
        "            taken[stage] += slots\n",
        "            taken[stage] += 1\n",
        (_TESTS, "-k", "part_by_part"),
    ),
    Mutant(
        "copies take the time of the rank",
        "pipetrain/schedule/simulate.py",
        "            units.append([copies])\n",
        "            units[self.unit[copies.start]].append(copies)\n",
        (_TESTS, "-k", "beside_the_ranks"),
    ),
    Mutant(
        "the bound forgets that a lane copies one set at a time",
        "pipetrain/schedule/bound.py",
        "away * self.copy[stage] + last",
        "self.copy[stage] + last",
        (_TESTS, "-k", "equal_stages"),
    ),
    Mutant(
        "a stage may end its F after the next one needs it",
        "pipetrain/schedule/search/by_stage.py",
        "            deadlines.append(min(math.floor(starts[op] + _ROUNDING), deadlines[-1]) - hop)",
        "            deadlines.append(self.step)",
        (_TESTS, "-k", "keeps_to_its_steps"),
    ),
    Mutant(
        "the memory of a set is used again under its copy to the host",
        "pipetrain/runtime/host_copies.py",
        "        ahead.hold(lane, op, held.clear)  # [1]\n",
        "        held.clear()\n",
        (_VIRTUAL, "-k", "interleaved and offload"),
    ),
    Mutant(
        "a set comes back into memory that a B still reads",
        "pipetrain/runtime/host_copies.py",
        "host_set.come_back(self._ring.memory, ",
        "host_set.come_back(_new_memory, ",
        (_VIRTUAL, "-k", "offload"),
    ),
    Mutant(
        "a set goes into memory of the host that a copy back still reads",
        "pipetrain/runtime/host_copies.py",
        "lambda after: ahead.comes_after(lane, after, Lane.RELOAD)",
        "lambda _: True",
        (_VIRTUAL, "-k", "offload"),
    ),
    Mutant(
        "a copy back does not wait for the copy to the host, on the device",
        "pipetrain/comm/lanes.py",
        "            if event is not None:\n                self.device.wait(stream, event)  # [1]",
        "            if event is not None and before.kind != 'OFFLOAD':\n                self.device.wait(stream, event)  # [1]",
        (_VIRTUAL, "-k", "offload"),
    ),
    Mutant(
        "B does not wait for the copy back, on the device",
        "pipetrain/comm/lanes.py",
        "            if event is not None:\n                self.device.wait(stream, event)  # [1]",
        "            if event is not None and before.kind != 'RELOAD':\n                self.device.wait(stream, event)  # [1]",
        (_VIRTUAL, "-k", "offload"),
    ),
    Mutant(
        "the whole batch goes to the host with each microbatch",
        "pipetrain/stage/stage.py",
        "lent_storages(given.leaves) if moves else frozenset()",
        "frozenset()",
        (_HOST, "-k", "what_is_copied"),
    ),
    Mutant(
        "weights go to the host",
        "pipetrain/stage/host_set.py",
        "not _has_plain_bytes(tensor) or meter.is_left_out(key)",
        "not _has_plain_bytes(tensor)",
        (_HOST, "-k", "what_is_copied"),
    ),
    Mutant(
        "a copy takes a tensor that has changed since F",
        "pipetrain/stage/host_set.py",
        "                if view.tensor._version != view.slot.version:",
        "                if False:",
        (_HOST, "-k", "changes_before"),
    ),
    Mutant(
        "the pool makes slabs as it needs them",
        "pipetrain/runtime/host_copies.py",
        "self._reserve(self._most[own[0]], num_bytes)",
        "self._reserve(1, num_bytes)",
        (_HOST, "-k", "pool or hold_what"),
    ),
    Mutant(
        "an error in a copy's thread is lost",
        "pipetrain/runtime/host_copies.py",
        "                land = functools.partial(_raise, error)\n",
        "                pass\n",
        (_HOST, "-k", "fails_names_its_op"),
    ),
)
