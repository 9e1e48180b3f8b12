"""Code of the user and of installed packages: how it is found."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a module of Python is taken for the one that the user meant",
        "pipetrain/config/target.py",
        "if package else [os.getcwd()]",
        "if package else sys.path",
        ("tests/config/test_target.py", "-k", "one_line"),
    ),
    Mutant(
        "modules of the current folder are found last",
        "pipetrain/config/target.py",
        "        sys.path.insert(0, os.getcwd())\n",
        "        sys.path.append(os.getcwd())\n",
        ("tests/config/test_target.py", "-k", "searched_first"),
    ),
    Mutant(
        "of two packages that give a name any is taken",
        "pipetrain/config/target.py",
        "    if len(spellings) != 1:\n",
        "    if not spellings:\n",
        ("tests/config/test_target.py", "-k", "installed_package"),
    ),
    Mutant(
        "a module that imports what is not there passes for one that is not there",
        "pipetrain/config/target.py",
        '        if missing is None or not f"{module_name}.".startswith(f"{missing}."):  # its own code fails\n',
        "        if missing is None:\n",
        ("tests/config/test_target.py", "-k", "one_line"),
    ),
    Mutant(
        "a stage without a backward loses its calls",
        "pipetrain/schedule/make.py",
        "if op.stage >= first_backward or op.kind not in _OF_BACKWARD)",
        "if op.stage >= first_backward or op.kind.row.direction is not None)",
        ("tests/schedule/test_call.py", "-k", "keeps_its_calls"),
    ),
    Mutant(
        "a schedule that calls a function starts without it",
        "pipetrain/trainer/prepare.py",
        "    check_calls(schedule, pipeline.on_call)\n",
        "",
        ("tests/train/test_extensions.py", "-k", "told_before"),
    ),
    Mutant(
        "a function sees the gradients of no stage but the first",
        "pipetrain/runtime/executor.py",
        "self.on_call(entry.op, self._stages[entry.op.stage].layers)",
        "self.on_call(entry.op, next(iter(self._stages.values())).layers)",
        ("tests/train/test_extensions.py", "-k", "sees_the_gradients"),
    ),
    Mutant(
        "trackers of the user's are forgotten",
        "pipetrain/monitor/trackers.py",
        "    for name, make in _given(config).items():\n",
        "    for name, make in ():\n",
        ("tests/train/test_extensions.py", "-k", "changes_no_loss"),
    ),
)
