"""The command line: one thin module a command. click lives only here."""

import gc

# A command imports a lot and leaves little behind: to look for garbage again and again while it imports, and
# once more when it ends, takes longer than most commands do. One that goes on for hours still collects.
gc.set_threshold(100_000)
