"""The command line: one thin module a command. click lives only here."""
