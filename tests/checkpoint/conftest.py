"""Real processes for tests of state that ranks share: ``forked(n)`` and ``ranks(n)`` of the tests of torch."""

from tests.torch.conftest import forked, ranks, zygote

__all__ = ["forked", "ranks", "zygote"]
