"""The server's process: flags, listeners, signals, and the order of a graceful stop. On top: nothing imports it."""
