"""The program of a rank: how it is run, and how its steps and progress are observed from outside."""
