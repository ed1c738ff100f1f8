"""Code for the login node: submits jobs on the user's request, and reports their progress and results."""
