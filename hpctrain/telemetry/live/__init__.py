"""The live view of a run, in the terminal and in the browser."""
