"""Sets that go to host memory and back."""

from mutants.mutant import Mutant

_TESTS = "tests/schedule/test_offload.py"

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
        "copies[stage, OFFLOAD][room:]",
        "copies[stage, OFFLOAD][10**6 :]",
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
        "        if up not in reloads:",
        "        if False:",
        (_TESTS, "-k", "another_end"),
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
        "(away + 1) * self.copy[stage]",
        "2 * self.copy[stage]",
        (_TESTS, "-k", "equal_stages"),
    ),
    Mutant(
        "a stage may end its F after the next one needs it",
        "pipetrain/schedule/search/by_stage.py",
        "            deadlines.append(min(math.floor(starts[op] + _ROUNDING), deadlines[-1]) - hop)",
        "            deadlines.append(self.step)",
        (_TESTS, "-k", "keeps_to_its_steps"),
    ),
)
