"""The server's process: flags, listeners, signals, and the order of a graceful stop. On top: nothing imports it.

Comes in: ``options``. Goes out: an exit code. May not touch: messages and rows, which are the other rooms'. Begin
reading at ``serve``.
"""
