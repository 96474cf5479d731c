"""Tracing in the training loops of other frameworks: Ray Train's trainer, Lightning, Hugging Face's Trainer."""
