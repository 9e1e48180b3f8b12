"""Code of the user and of installed packages: how it is found."""

from mutants.mutant import Mutant

MUTANTS = (
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
        "    if len(found) > 1:\n",
        "    if False:\n",
        ("tests/config/test_target.py", "-k", "installed_package"),
    ),
    Mutant(
        "a module that imports what is not there passes for one that is not there",
        "pipetrain/config/target.py",
        '        if missing is None or not f"{module_name}.".startswith(f"{missing}."):  # its own code fails\n',
        "        if missing is None:\n",
        ("tests/config/test_target.py", "-k", "one_line"),
    ),
)
