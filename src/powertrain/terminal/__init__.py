"""Terminal output of a run: live view, plain lines, output of ranks, error report, end card.

Three layers, each testable without the next:

- :class:`RunView` folds facts into the state to show. It reads no clock and writes nothing.
- Functions turn a view into text: :func:`live_rows` (the live region), :class:`Narrator` (plain lines
  for facts), :func:`failure_report`, :func:`end_rows`.
- :class:`Terminal` owns the stream. Its methods fold, queue and return: a blocked terminal (a full
  pipe, Ctrl-S) delays lines, never training, and errors in here never reach the run.

``rich`` is loaded by the live view's own thread, after the launch; plain mode never loads it.
"""
