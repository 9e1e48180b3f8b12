"""A GPU that is not there, for tests: what the real `Pipeline` would give to one is written down, and looked through.

    virtual_ranks   runs a function on every rank: threads, of which one goes on at a time (baton); real CPU tensors
    virtual_device  the verbs of `comm/device.py`: streams, events, waits; what the host waits for
    kernels         every op of aten, with the memory that it reads and writes, on the current stream; allocations and frees
    virtual_nccl    `ProcessGroupNCCL`: transfers that meet in the order of their streams
    recorded        what is written down: a list per rank in the order of its host
    races           what does not wait for what it needs; memory given away under a stream that still uses it
    hangs           streams that wait for each other in a ring, also when a host waits for its device
    reserved        bytes that the allocator would reserve; waits of the host

A race or a hang is found in one run, whatever the timing: it follows from the recording, not from what happened to go wrong.

Not modelled: how long a kernel takes and how many run at once (SMs), errors of the API, the stream on which AccumulateGrad
runs (here the one of B), autograd's thread per device, workspaces of cuBLAS, kernels that do not pass aten's dispatcher
(Triton's own), memory in parts (a race is one of whole storages), and copies to the host that torch hides (`.cpu()`, `.tolist()`
are no op on a CPU tensor).
"""
