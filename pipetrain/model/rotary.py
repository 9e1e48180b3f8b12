"""Rotary positions (Su et al., "RoFormer", 2021, section 3.2): a head's numbers are turned in pairs, by angles that grow with the
position, so that the product of a query and a key depends on their distance alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(sequence_length: int, head_size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[sequence, head_size / 2]`, float32, of the positions from 0 on.

    Made anew in each forward from the length alone: a table kept in the module would follow it into bfloat16, in which neighbouring
    positions beyond 256 are one.
    """
    return rotary_tables_at(torch.arange(sequence_length, device=device, dtype=torch.float32), head_size, base)


def rotary_tables_at(positions: Tensor, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., head_size / 2]`, float32, of positions `[...]`: pair i turns by `position x base ** (-2 i / head_size)`."""
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions.float()[..., None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn `[..., sequence, head_size]` by its positions; number i is paired with number i + head_size / 2, as Llama's weights are saved."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(heads.dtype)
