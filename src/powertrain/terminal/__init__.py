"""What a person sees of a run: the live view, plain lines, the ranks' output, the error report, the end card.

Three layers, each testable without the next:

- :class:`RunView` folds facts into what is worth showing. It reads no clock and writes nothing.
- Functions turn a view into text: :func:`live_rows` (what the live region says), :class:`Narrator` (which
  plain lines a fact is worth), :func:`failure_report`, :func:`end_rows`.
- :class:`Terminal` owns the stream. Its methods fold, queue and return: a terminal that nobody reads (a full
  pipe, Ctrl-S) delays lines, never training, and what goes wrong in here never reaches the run.

``rich`` is loaded by the live view's own thread, after the launch; plain mode never loads it.
"""
