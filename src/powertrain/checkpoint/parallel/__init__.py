"""State of tensor and pipeline parallel training, where ranks hold different tensors."""
