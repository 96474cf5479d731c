"""Tracing inside other people's training loops: Ray Train's trainer, Lightning, Hugging Face's Trainer."""
