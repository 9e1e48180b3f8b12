"""What others may put into files and folders."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "JSON may be as deep as Python reads it",
        "pipetrain/config/read_files.py",
        "        _check_depth(value)\n    return value",
        "        pass\n    return value",
        ("tests/security/test_damaged_files.py", "-k", "report or limits"),
    ),
    Mutant(
        "a configuration of others reads the environment",
        "pipetrain/config/load.py",
        "OmegaConf.load(io.StringIO(text)), resolve=False",
        "OmegaConf.load(io.StringIO(text)), resolve=True",
        ("tests/security/test_damaged_files.py", "-k", "configuration"),
    ),
    Mutant(
        "control codes of a file reach the terminal",
        "pipetrain/config/terminal.py",
        "    return text.translate(_OVER_LINES if lines else _IN_A_LINE)",
        "    return text",
        ("tests/security/test_damaged_files.py", "-k", "control_codes"),
    ),
    Mutant(
        "a manifest may leave files out",
        "pipetrain/snapshot/manifest.py",
        "    if wrong := sorted(wanted ^ named):",
        "    if wrong := sorted(named - wanted):",
        ("tests/snapshot/test_damage.py", "-k", "leaves_files_out"),
    ),
    Mutant(
        "a draft is written where a link leads",
        "pipetrain/config/write_files.py",
        "        folder.unlink()  # a link, or a file",
        "        pass",
        ("tests/security/test_links.py", "-k", "leads_into"),
    ),
    Mutant(
        "a log follows a link",
        "pipetrain/config/write_files.py",
        "os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_CREAT | os.O_NONBLOCK",
        ("tests/security/test_links.py", "-k", "log"),
    ),
    Mutant(
        "everybody may read the user's cache",
        "pipetrain/config/write_files.py",
        "        root.chmod(0o700)",
        "        pass",
        ("tests/security/test_links.py", "-k", "user_alone"),
    ),
    Mutant(
        "everybody may write tokens",
        "pipetrain/data/corpus.py",
        "if root.is_dir() and root.stat().st_mode & stat.S_IWOTH:",
        "if False:",
        ("tests/security/test_links.py", "-k", "everybody"),
    ),
    Mutant(
        "changed tokens pass the check",
        "pipetrain/data/token_file.py",
        "if _digest_of_part(digests) != sheet.parts[name].digest:",
        "if False:",
        ("tests/security/test_changed_tokens.py", "-k", "finds"),
    ),
    Mutant(
        "a token that the model has not reaches it",
        "pipetrain/data/samples.py",
        "if largest >= self._vocabulary_size:",
        "if False:",
        ("tests/security/test_changed_tokens.py", "-k", "vocabulary"),
    ),
    Mutant(
        "a rank without memory prints a traceback",
        "pipetrain/launcher/outcome.py",
        "        if (told := out_of_memory(error)) is not None:\n",
        "        if (told := None) is not None:\n",
        ("tests/security/test_one_line.py", "-k", "rank"),
    ),
    Mutant(
        "a rank that holds the store is not named where others still connect",
        "pipetrain/comm/failure.py",
        "if isinstance(error, DistNetworkError):",
        "if False:",
        ("tests/runtime/test_failures.py", "-k", "others_connect or who_is_named"),
    ),
    Mutant(
        "a snapshot takes its name before the lines of its steps are on the disk",
        "pipetrain/snapshot/saver.py",
        "if self._run is not None:",
        "if False:",
        ("tests/snapshot/test_saver.py", "-k", "lines_of_steps"),
    ),
)
