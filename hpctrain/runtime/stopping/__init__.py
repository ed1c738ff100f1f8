"""Stop signals of a rank, and the agreement of all ranks on the last step."""
