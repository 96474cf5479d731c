"""Sentences about the cause of an error in a rank, where the error itself does not name it."""

from __future__ import annotations

from powertrain.text.errors import message_of
from powertrain.worker.scripts.working_directory import explain_missing_path

#: The message of torch for a second init_process_group.
_GROUP_TWICE = "initialize the default process group twice"


def hint_for(error: BaseException, launch_dir: str, scratch: str = "") -> str:
    """Return a hint about ``error``, which the user's function raised in a rank; "" where there is none.

    Args:
        error: The error.
        launch_dir: Where this machine has the launch directory.
        scratch: The scratch directory of the node, if ranks work in one.
    """
    if _GROUP_TWICE in message_of(error):
        return (
            "TorchTrainer has called init_process_group in this rank already, with the rank, the world size and the "
            "address of the run. Remove init_process_group and destroy_process_group from the training function. "
            "TorchConfig(backend=..., timeout_s=...) sets the backend and the timeout."
        )
    return explain_missing_path(error, launch_dir, scratch)
