# shellcheck shell=bash
# What the ranks find in their environment. Every script here reads this file; what is set before stays as it is.
#
# INTERFACE=ib0 and DEVICE=cpu may be set by the caller (keys cluster.interface and cluster.device).

# --- CPU ---
# Threads of OpenMP while libraries load. Training takes `threads_per_rank`; without this, each rank would take all cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Lines of a log appear when they are written.
export PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}
# Ranks that compute on the CPU must not see GPUs that are there by chance.
if [[ ${DEVICE:-gpu} == cpu ]]; then export CUDA_VISIBLE_DEVICES=""; fi

# --- CUDA ---
# Hardware queues of a GPU. With 1, a stream that waits would hold up the others: recomputation could not overlap.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# When a GPU's kernels are loaded. LAZY, at its first launch: quick to start, but loading makes the host wait for all that the GPU
# still has to do, in the first steps. EAGER, when CUDA starts: no such waits, for a longer start and some hundred MB on each GPU.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-LAZY}

# --- gloo and NCCL ---
# The network device that joins the machines. Without it, ranks take the one that leads to the rendezvous. Where none does (its name is that
# of 127.0.1.1, on some systems), gloo takes the one to which the machine's own name leads, and NCCL the first that is up. `ip -br addr`
# lists them.
if [[ -n ${INTERFACE:-} ]]; then
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE}
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE}
fi
# What NCCL tells: WARN only says what is wrong; INFO shows the links that it has chosen.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# torch's C++ warnings about sockets that it tries again; errors are still shown.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
