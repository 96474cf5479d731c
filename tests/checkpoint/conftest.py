"""Real processes for tests of state that ranks share: ``forked(n)``, as the tests of torch's side have it."""

from tests.torch.conftest import forked, zygote

__all__ = ["forked", "zygote"]
