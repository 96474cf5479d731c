"""The thread beside the training function that talks to the run."""
