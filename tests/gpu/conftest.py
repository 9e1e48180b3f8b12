"""For all that needs CUDA: torch says where gradients are added up on another stream than their backward's."""

import torch

torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
