"""Plans for machines that are not here, and for other runtimes."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "tensor ranks send each other nothing",
        "pipetrain/plan/estimate.py",
        "messages=4 * (self.tensor - 1)",
        "messages=0 * (self.tensor - 1)",
        ("tests/plan/test_estimate.py", "-k", "tensor_ranks_share"),
    ),
    Mutant(
        "messages between machines are as fast as within one",
        "pipetrain/plan/estimate.py",
        "within_node=cluster.num_nodes == 1",
        "within_node=True",
        ("tests/plan/test_estimate.py", "-k", "take_the_network"),
    ),
    Mutant(
        "machines need no network between them",
        "pipetrain/plan/cluster.py",
        'if nodes > 1 and found["gigabits"] is None:',
        'if nodes > 10**9 and found["gigabits"] is None:',
        ("tests/plan/test_estimate.py", "-k", "wrong_word"),
    ),
    Mutant(
        "what a peer recomputes takes no time",
        "pipetrain/plan/foreign.py",
        "seconds = layer.backward_seconds + layer.recompute_seconds",
        "seconds = layer.backward_seconds",
        ("tests/plan/test_foreign.py", "-k", "part_of_b"),
    ),
    Mutant(
        "a peer's plan need not fit",
        "pipetrain/plan/foreign.py",
        'float("inf") if budget_bytes is None else budget_bytes',
        'float("inf")',
        ("tests/plan/test_foreign.py", "-k", "less_memory"),
    ),
    Mutant(
        "whole gradients of all stages of a rank are there at once",
        "pipetrain/plan/foreign.py",
        "whole = max(sizes) if option.num_microbatches <= option.num_ranks else numbers",
        "whole = numbers",
        ("tests/plan/test_estimate.py", "-k", "by_torchtitan"),
    ),
)
