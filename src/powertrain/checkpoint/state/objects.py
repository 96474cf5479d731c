"""The objects of a training loop as tensors with names and plain values, and back.

Names are the same whatever wraps the model and however many ranks there are: ``model.layers.0.weight`` for a
parameter, ``optimizer.state.model.layers.0.weight.exp_avg`` for an optimizer's state about it. So a state saved with
DistributedDataParallel loads into FSDP and the other way round.

Parameters and optimizer state are alike on all ranks that hold them (or shards of one whole) and written once. Buffers
are those of the first rank that has them, as with DistributedDataParallel. Everything else is each rank's own: loaded
with as many ranks as it was saved, a rank gets back its own; with another number all get rank 0's.

Values go into JSON. A value outside JSON is an object with one key that starts with "$", as in
``powertrain.checkpoint.manifest``; here also ``$tuple``, ``$set``, ``$counter``, ``$ordered``, ``$dtype``, ``$device``,
and ``$tensor`` or ``$numpy`` with the name under which its numbers are.
"""
