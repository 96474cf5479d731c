"""A torch DataLoader on many ranks: every row once per epoch, in an order that does not depend on how many they are.

- :class:`Course` knows which epoch a loader is in and how far: that goes into checkpoints.
- :class:`StepCut` is pure: how an epoch is cut into steps, and a step into the parts of the ranks.
- :class:`OrderedShard` and :class:`DrawnShard` are samplers that give torch's loader this rank's rows.
- :class:`PreparedDataLoader` is what the user gets. It notes a batch when it is handed out, whatever torch's loader
  has fetched ahead.
"""
