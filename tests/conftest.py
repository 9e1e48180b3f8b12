"""Shared by all tests. That this file is here puts tests/ on the path, so that `import ranks` works in every folder."""

import torch

# Equality bit for bit is promised for one thread: a sum over several has another order.
torch.set_num_threads(1)
