"""`python -m tests.mutants`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where tests find each other's modules

if __name__ == "__main__":
    from mutants.run import main

    raise SystemExit(main(sys.argv[1:]))
