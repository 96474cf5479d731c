"""A torch DataLoader on many ranks: every row once per epoch, in an order independent of the number of ranks.

- :class:`Course` tracks the epoch of a loader and the position in it, which checkpoints contain.
- :class:`StepCut` is pure: it cuts an epoch into steps, and a step into the parts of the ranks.
- :class:`OrderedShard` and :class:`DrawnShard` are samplers that give torch's loader this rank's rows.
- :class:`PreparedDataLoader` is returned to the user. It counts a batch when it is handed out, whatever torch's loader
  has prefetched.
"""
