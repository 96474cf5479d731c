"""First uses of a GPU's libraries on a thread of their own, while a rank starts.

CUDA loads cuBLAS and each kernel when they are first called, which makes the first step of a process half a second
longer. Here cuBLAS is loaded and common kernels are called while the process group forms and the user's function builds
or loads its model.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import Any

from powertrain.checkpoint.state.stream_capture import leave_captures_alone

#: Seconds for which a fork waits: a child must not be made while a library is being loaded.
_FORK_TIMEOUT_S = 10.0

_thread: threading.Thread | None = None


def begin(device: int) -> None:
    """Begin to warm up a GPU. Once per process."""
    global _thread
    if _thread is not None:
        return
    _thread = threading.Thread(target=_warm_up, args=(device,), name="powertrain-warm-up", daemon=True)
    os.register_at_fork(before=_wait)
    atexit.register(_wait)  # a thread that Python ends within C++ code would abort the process
    _thread.start()


def _wait() -> None:
    if _thread is not None and _thread.is_alive() and _thread is not threading.current_thread():
        _thread.join(_FORK_TIMEOUT_S)


def _warm_up(device: int) -> None:
    import torch

    with contextlib.suppress(Exception):  # of a device that fails: the training loop meets it, too
        leave_captures_alone()
        torch.cuda.set_device(device)
        cuda: Any = torch.cuda
        # Versions of torch keep a workspace by handle and stream, and the training thread may get this thread's handle.
        # On the default stream its workspace could have the size from before CUBLAS_WORKSPACE_CONFIG was set.
        stream = cuda.Stream(device)
        with torch.cuda.stream(stream), torch.no_grad():
            cuda.current_blas_handle()
            for dtype in (torch.bfloat16, torch.float32):
                with contextlib.suppress(RuntimeError):  # of a device without this type
                    _use_layers(torch.zeros(128, 128, device=f"cuda:{device}", dtype=dtype))
            _use_losses(torch.zeros(64, 128, device=f"cuda:{device}"))
            stream.synchronize()


# None of these calls changes a random generator, or calls a hook of modules or optimizers. None is a product of
# matrices by cuBLAS: with the first of a process torch reads CUBLAS_WORKSPACE_CONFIG, which the function may still set.
# A linear layer with a bias goes through cublasLt unless torch is set to do without it or the device is too old for the
# type. Its own settings, CUBLASLT_WORKSPACE_SIZE and DISABLE_ADDMM_CUDA_LT, are read here, with the first such product.


def _use_layers(matrix: Any) -> None:
    """Call what the layers of most models call."""
    import torch
    from torch.nn import functional

    functional.layer_norm(functional.gelu(matrix) + matrix * 2, (128,), matrix[0], matrix[0]).sum()
    functional.relu(matrix).softmax(-1).mean()
    if matrix.dtype == torch.bfloat16:
        heads = matrix.view(1, 2, 128, 64)
        # Without the choice among kernels, which could fall on one with products.
        torch.ops.aten._scaled_dot_product_flash_attention(heads, heads, heads, is_causal=True)
    if os.environ.get("DISABLE_ADDMM_CUDA_LT") != "1" and torch.cuda.get_device_capability() >= (8, 0):
        functional.linear(matrix, matrix, matrix[0])
        torch.addmm(matrix[0], matrix, matrix)
        torch.addmm(matrix[0], matrix.t(), matrix)


def _use_losses(scores: Any) -> None:
    """Call a loss, an embedding, a change of type, and the fused kernel of AdamW."""
    import torch
    from torch.nn import functional

    places = torch.zeros(64, device=scores.device, dtype=torch.int64)
    functional.cross_entropy(scores, places)
    functional.embedding(places, scores).to(torch.bfloat16).float()
    parameter, gradient, first, second = ([scores.clone()] for _ in range(4))
    fused: Any = torch._fused_adamw_
    fused(
        parameter, gradient, first, second, [], [torch.ones((), device=scores.device)],
        lr=0.0, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
