"""Sharded tensors on disk: the writer of each part, one safetensors file per rank, and reading at any world size.

::

    state/rank-00000.safetensors    the tensors of rank 0; readable by any safetensors tool
    state/rank-00000.json           other values, and the list of objects
    (powertrain.checkpoint.state.objects)

Every rank finds its share alone, without a collective; where ranks may hold different tensors, they exchange their
holdings before (``powertrain.checkpoint.parallel``). A shard is written by the rank that has it. Replicated tensors are
laid end to end on one line of bytes, and the line is cut into as many pieces as there are ranks that have it; large
tensors are cut between rows, small ones stay whole. The header of each file maps its entries to parts of tensors, so a
reader joins the headers of all files into torch's own checkpoint metadata.

Torch's distributed checkpoint plans both ways (:class:`SharePlanner`, ``DefaultLoadPlanner``); the storage is ours
(:class:`StateWriter`, :class:`StateReader`), so ``dcp.save`` and ``dcp.load`` work with these files too. Nothing is
pickled.
"""
