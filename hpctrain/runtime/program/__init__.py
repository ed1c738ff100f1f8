"""The program of a rank: execution, and observation of steps and progress from outside."""
