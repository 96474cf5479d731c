"""Calls of torch in the process that workers are forked from. Importing this module does not import torch."""

from __future__ import annotations


def make_first_calls() -> None:
    """Call functions of torch that load or build something when they are called first, so that no worker does.

    A gradient that is set, not computed, starts no thread of autograd. Workers seed themselves.
    """
    import torch

    torch.set_num_threads(1)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.zeros(1)
    optimizer.step()
    optimizer.zero_grad()
    torch.manual_seed(0)


def use_one_thread() -> None:
    """Compute on one thread, as far as a process does not ask for more."""
    import torch

    torch.set_num_threads(1)
