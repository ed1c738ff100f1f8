"""The login node: from what a user asks for to a job, and what became of it."""
