"""How far apart two results may be that are the same sums in another order."""

import torch


def rounding(dtype: torch.dtype, terms: int) -> float:
    """The relative difference of two sums of `terms` terms whose order differs: each addition rounds by at most the dtype's epsilon.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    return torch.finfo(dtype).eps * terms
