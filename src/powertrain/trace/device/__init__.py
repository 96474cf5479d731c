"""What a rank's device does: operators of a step, kernels of a short window, tensors that stay."""
