"""The user's own model, data and folder."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "a resumed run does not notice another file of its own model",
        "pipetrain/config/own_code.py",
        "file_sha256=record.file_sha256 or code_digest(",
        "file_sha256=record.file_sha256 or str(",
        ("tests/config/test_own_code.py", "-k", "knows_the_file"),
    ),
    Mutant(
        "any key may hold a target",
        "pipetrain/config/secrets.py",
        "and not _ARGUMENTS.match(within or path)",
        "and False",
        ("tests/config/test_own_code.py", "-k", "mistake"),
    ),
    Mutant(
        "all ranks draw the weights of their own model from one seed",
        "pipetrain/models/spec.py",
        "        seed_generators(seed, cpu)",
        "        seed_generators(0, cpu)",
        ("tests/models/test_own_model.py", "-k", "follow_the_seed"),
    ),
    Mutant(
        "layers are counted with memory for their weights",
        "pipetrain/models/own.py",
        '        with torch.device("meta"):',
        '        with torch.device("cpu"):',
        ("tests/models/test_own_model.py", "-k", "what_is_counted and huge"),
    ),
    Mutant(
        "what was counted of an older file holds for ever",
        "pipetrain/models/own_size.py",
        '"file_sha256": config.file_sha256, "format"',
        '"file_sha256": "", "format"',
        ("tests/models/test_own_model.py", "-k", "changed_file"),
    ),
    Mutant(
        "every rank reads the user's data",
        "pipetrain/data/own.py",
        "is_read=self.is_read",
        "is_read=True",
        ("tests/data/test_own_data.py", "-k", "does_not_need_them"),
    ),
    Mutant(
        "workers go on where they are after the run went back",
        "pipetrain/data/own.py",
        "self._loaded is None or self._next != (first, share)",
        "self._loaded is None",
        ("tests/data/test_own_data.py", "-k", "go_back"),
    ),
    Mutant(
        "an iterable dataset begins anew in a resumed run",
        "pipetrain/data/own.py",
        '            self._reader.dataset.load_state_dict(state["dataset"])\n',
        "",
        ("tests/data/test_own_data.py", "-k", "goes_on_from_its_state"),
    ),
    Mutant(
        "an iterable dataset is read again up to where it was",
        "pipetrain/data/own.py",
        "        self._stream.load_state_dict(state)\n",
        "        pass\n",
        ("tests/data/test_own_data.py", "-k", "goes_on_from_its_state"),
    ),
    Mutant(
        "the guard goes back in an iterable dataset and does not pass over",
        "pipetrain/data/own.py",
        "            while self._position < first:  # those",
        "            while False:  # those",
        ("tests/data/test_own_data.py", "-k", "goes_on_from_its_state"),
    ),
    Mutant(
        "a run without --config-dir finds the files of the one before",
        "pipetrain/config/load.py",
        "    UserFolder.folder = source.folder\n    return",
        "    UserFolder.folder = source.folder or UserFolder.folder\n    return",
        ("tests/config/test_user_folder.py", "-k", "without_the_option"),
    ),
    Mutant(
        "text is generated with the code that a run folder names",
        "pipetrain/cli/generate_command.py",
        "    if config.model.name == PYTHON:",
        "    if False:",
        ("tests/train/test_new_project.py", "-k", "without_its_code"),
    ),
)
